"""What the tokenizer goldens hold: strings and their ids, id sequences and their texts, conversations and their prompts.

The strings are hand-picked edges and seeded mixtures of them. Imported by the scripts that write goldens, which run beside
transformers; it imports nothing of jaxserve.
"""

import json
import random
from pathlib import Path
from typing import Any

WORDS = [
    "Hello", "world", " the", " quick brown fox", "I'm", "we'LL", "don't've", "O'Neill's", "naïve café", "Zürich", "straße",
    "ﬁne ﬂoor", "e\u0301clair", "ÅNGSTRÖM", "İstanbul", "Привет, мир!", "Ελληνικά", "שלום עולם", "مرحبا بالعالم",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "안녕하세요", "こんにちは、世界。",
    "你好，世界！", "漢字かな交じり文", "Tiếng Việt", "ⅷ Ⅻ ½ ²³", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "𐍈𐌰𐌹𐍂𐌳", "\u200bzero\u200dwidth\ufeff",
]  # fmt: skip
EMOJI = [
    "🙂", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇳🇱🇫🇷", "❤️", "1️⃣", "🤦🏾‍♂️ ok", "☃", "🧑‍🚀🚀🚀",
]  # fmt: skip
NUMBERS = [
    "0", "7", " 42", "1234567", "3.14159", "1,000,000", "-17e-3", "0x1F4A9", "2026-11-21T13:28:00Z", "٣٤٥", "१२३", "１２３",
    " 12 345", "v1.2.3",
]  # fmt: skip
SPACES = [
    " ", "  ", "   ", "\t", "\t\t x", "\n", "\n\n", " \n ", "\r\n", "\r", "    indented", "trailing   ", "\u00a0", "\u3000",
    "\x0b\x0c", "a  b   c",
]  # fmt: skip
CODE = [
    "def f(x: int) -> int:\n    return x ** 2  # square\n", "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "#include <stdio.h>\n", "SELECT * FROM t WHERE a='b';", "{\"key\": [1, null, true]}", "<div class=\"x\">&nbsp;</div>",
    "https://example.org/a?b=c&d=%20#e", "x != y && !(z || w)", "$\\frac{1}{2}$ \\LaTeX", "C:\\Users\\me",
    "`code` **bold** _it_", "------", "====>", "...", "?!?!", "(((", "a_b-c.d/e", "\\n\\t\\\\", "@user #tag 50%", "~`^|¬¦",
]  # fmt: skip
CONTROL = [
    "\x00", "\x1b[31m", "\x7f", "\ufffd", "\ue000", "\U0010ffff",
]  # fmt: skip


def texts(special_tokens: list[str], num_mixed: int = 260) -> list[str]:
    """All the strings above, each special token alone and inside text, and `num_mixed` mixtures of two to five pieces."""
    single = [*WORDS, *EMOJI, *NUMBERS, *SPACES, *CODE, *CONTROL]
    special = [*special_tokens, *(f"a{token}b {token} \n{token}{token}" for token in special_tokens[:3])]
    near_special = [special_tokens[0][:-1], special_tokens[0].upper(), " ".join(special_tokens[0])]
    rng = random.Random(0)
    pools = [WORDS, EMOJI, NUMBERS, SPACES, CODE, CONTROL, special_tokens]
    mixed = []
    for _ in range(num_mixed):
        mixed.append("".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(2, 5))))
    return list(dict.fromkeys(["", *single, *special, *near_special, *mixed]))


def id_sequences(vocab_size: int, special_ids: list[int], count: int = 60) -> list[list[int]]:
    """Random ids, which break characters anywhere, with special ones in between."""
    rng = random.Random(1)
    pick = lambda: rng.choice(special_ids) if rng.random() < 0.1 else rng.randrange(vocab_size)  # noqa: E731
    return [[pick() for _ in range(rng.randint(1, 12))] for _ in range(count)]


def record(tokenizer: Any, conversations: list[dict[str, Any]], special_tokens: list[str]) -> dict[str, Any]:
    """All cases with the answers of a transformers tokenizer. conversations: {"messages": ..., and other arguments}."""
    strings = texts(special_tokens)
    render = lambda messages, **rest: tokenizer.apply_chat_template(messages, tokenize=False, **rest)  # noqa: E731
    sequences = id_sequences(len(tokenizer), tokenizer.convert_tokens_to_ids(special_tokens))
    return {
        "encode": [[text, tokenizer.encode(text, add_special_tokens=False)] for text in strings],
        "decode": [
            [ids, tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids, skip_special_tokens=True)]
            for ids in sequences
        ],
        "chat": [[chat, render(**chat)] for chat in conversations],
    }


def write(path: Path, made_by: str, golden: dict[str, Any]) -> None:
    """JSON with one line a case."""
    lines = [f"{json.dumps('made_by')}: {json.dumps(made_by)}"]
    for key, value in golden.items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row, ensure_ascii=True, separators=(",", ":")) for row in value)
            lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
