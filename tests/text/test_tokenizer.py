"""Encoding, decoding whole and piece by piece, chat templates; against the tokenizers library and transformers' goldens."""

import functools
import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.checkpoints.gguf_files import write_gguf
from tests.real_files import qwen3_tokenizer_folder, smollm2_gguf

GOLDENS = Path(__file__).parents[1] / "goldens"
SPECIALS = ["<s>", "</s>", "<|turn|>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "héllo wörld", "漢字 かな 🙂 👩‍👩‍👧", "hello the world, the end"] * 3


def byte_level_backend(*, bos: bool = False) -> tokenizers.Tokenizer:
    """Byte-level BPE with a few merges, three special tokens, and an added one with characters outside the byte alphabet."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIALS, initial_alphabet=alphabet))
    backend.add_tokens([AddedToken("<tool call é>", normalized=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """The make of Llama 2's tokenizer: spaces as U+2581, bytes for what the vocabulary lacks, the first space dropped again."""
    words = ["▁", "▁the", "▁he", "llo", "o", "h", "e", "l", "t", "w", "r", "d", "▁w", "▁wo", "rld", "th", "he"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    merges = [("t", "h"), ("h", "e"), ("▁", "w"), ("▁", "he"), ("▁w", "o")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIALS)
    return backend


BYTE_LEVEL = Tokenizer(byte_level_backend(bos=True), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
BYTE_FALLBACK = Tokenizer(byte_fallback_backend())


def test_a_word_is_encoded_with_and_without_a_space_before_it():
    encode = functools.partial(BYTE_LEVEL.encode, add_special_tokens=False)
    for word in ("the", "  the", "quick brown"):
        found = BYTE_LEVEL.encode_word(word)
        assert found == [encode(word.lstrip()), encode(" " + word.lstrip())] and found[0] != found[1]
        assert [BYTE_LEVEL.decode(ids) for ids in found] == [word.lstrip(), " " + word.lstrip()]
    same = tokenizers.Tokenizer(models.WordLevel({"the": 3, "?": 0}, unk_token="?"))
    same.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer(same).encode_word("the") == [[3]]


def pieces(tokenizer: Tokenizer, ids: list[int], prompt_ids: Sequence[int] = (), skip: bool = True) -> list[str]:
    """What each token adds, and last what `flush` does."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip)
    return [*map(detokenizer.step, ids), detokenizer.flush()]


# ---- encode and decode


def test_encode_adds_special_tokens_only_where_asked():
    assert BYTE_LEVEL.encode("hello")[0] == BYTE_LEVEL.bos_token_id == 0
    assert BYTE_LEVEL.encode("hello")[1:] == BYTE_LEVEL.encode("hello", add_special_tokens=False)
    assert BYTE_LEVEL.encode("", add_special_tokens=False) == []
    assert BYTE_LEVEL.encode("a</s>b", add_special_tokens=False)[1] == BYTE_LEVEL.eos_token_id == 1


def test_decode_skips_special_tokens_only_where_asked():
    ids = [0, *BYTE_LEVEL.encode("hi <tool call é>", add_special_tokens=False), 1]
    assert BYTE_LEVEL.decode(ids) == "hi <tool call é>"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<s>hi <tool call é></s>"
    assert BYTE_LEVEL.decode([]) == "" and BYTE_LEVEL.decode([10**6]) == ""


def test_vocabulary_and_special_ids():
    backend = byte_level_backend()
    assert BYTE_LEVEL.vocab_size == backend.get_vocab_size(with_added_tokens=True) > 256
    assert BYTE_LEVEL.special_ids == {0, 1, 2}  # the added token is not special
    assert BYTE_LEVEL.special_id("pad_token") is None and BYTE_FALLBACK.bos_token_id is None
    with_hole = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 41}, []))
    assert Tokenizer(with_hole).vocab_size == 42


def test_saved_truncation_and_padding_do_not_apply():
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=16)
    assert len(Tokenizer(backend).encode("the quick brown fox")) > 2
    assert len(Tokenizer(backend).encode("t")) == 1


def test_special_tokens_must_exist():
    with pytest.raises(ValueError, match="eos_token='<eos>' is not in the tokenizer's vocabulary"):
        Tokenizer(byte_level_backend(), special_tokens={"eos_token": "<eos>"})
    with pytest.raises(ValueError, match="special token name 'end' must be one of bos_token"):
        Tokenizer(byte_level_backend(), special_tokens={"end": "</s>"})


def test_token_bytes_are_what_each_token_decodes_to():
    table, skipping = BYTE_LEVEL.token_bytes(), BYTE_LEVEL.token_bytes(skip_special_tokens=True)
    for i in range(BYTE_LEVEL.vocab_size):
        assert table[i].decode("utf-8", "replace") == BYTE_LEVEL.decode([i], skip_special_tokens=False)
        assert skipping[i] == (b"" if i in BYTE_LEVEL.special_ids else table[i])
    assert {table[i] for i in range(BYTE_LEVEL.vocab_size)} >= {bytes([byte]) for byte in range(256)}
    assert table[10**6] == b""
    with pytest.raises(ValueError, match="token_bytes needs a byte-level tokenizer"):
        BYTE_FALLBACK.token_bytes()


# ---- incremental decoding

ids_of = lambda tokenizer: st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24)  # noqa: E731
some_text = st.text(max_size=12) | st.text("the hlowrd🙂é漢👩\u200d", max_size=20)


@settings(max_examples=150, deadline=None)
@given(ids=ids_of(BYTE_LEVEL), skip=st.booleans())
def test_byte_level_pieces_of_any_ids_add_up_to_the_whole(ids, skip):
    # Random ids are mostly lone bytes: characters broken anywhere, special tokens in their middle.
    assert "".join(pieces(BYTE_LEVEL, ids, skip=skip)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=some_text)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_pieces_of_a_text_are_whole_characters(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    *stepped, flushed = pieces(tokenizer, ids)
    assert "".join(stepped) + flushed == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert flushed == "" and "\ufffd" not in "".join(stepped)


@settings(max_examples=150, deadline=None)
@given(text=some_text, cut=st.integers(0, 40))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_pieces_continue_the_prompt(tokenizer, text, cut):
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, rest = ids[:cut], ids[cut:]
    before = tokenizer.decode(prompt)
    if text.startswith(before) and tokenizer.decode(ids) == text:  # the cut is not inside a character
        assert before + "".join(pieces(tokenizer, rest, prompt)) == text


def test_a_word_after_a_prompt_keeps_its_space():
    hello, world = BYTE_FALLBACK.encode("hello")[:-1], BYTE_FALLBACK.encode("world")
    assert BYTE_FALLBACK.decode(world) == "world"
    assert "".join(pieces(BYTE_FALLBACK, world)) == "world"
    assert "".join(pieces(BYTE_FALLBACK, world, hello)) == " world"
    assert "".join(pieces(BYTE_FALLBACK, world, [*hello, 1])) == " world"  # a skipped </s> between changes nothing


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_a_character_comes_when_its_last_byte_does(tokenizer):
    byte_id = {b: i for i, b in BYTE_LEVEL_BYTES.items()} if tokenizer is BYTE_LEVEL else FALLBACK_IDS
    ids = [byte_id[bytes([byte])] for byte in "xé🙂é".encode()]
    assert pieces(tokenizer, ids) == ["x", "", "é", "", "", "", "🙂", "", "é", ""]
    assert pieces(tokenizer, ids[3:6]) == ["", "", "", tokenizer.decode(ids[3:6])]
    assert set(tokenizer.decode(ids[3:6])) == {"\ufffd"}
    assert "".join(pieces(tokenizer, [*ids[:3], *[2] * 9, *ids[3:6], *[2] * 9, *ids[6:]])) == "xé🙂é"
    assert pieces(tokenizer, [*ids[:4], 2, *ids[4:]]) == ["x", "", "é", "", "", "", "", "🙂", "", "é", ""]


BYTE_LEVEL_BYTES = {i: BYTE_LEVEL.token_bytes()[i] for i in range(BYTE_LEVEL.vocab_size)}
FALLBACK_IDS = {bytes([byte]): len(SPECIALS) + byte for byte in range(256)}


def test_special_tokens_are_shown_where_asked():
    ids = [0, *BYTE_FALLBACK.encode("hello"), 1]
    assert "".join(pieces(BYTE_FALLBACK, ids, skip=False)) == BYTE_FALLBACK.decode(ids, skip_special_tokens=False)
    assert "".join(pieces(BYTE_FALLBACK, ids)) == "hello"


def test_endless_broken_bytes_are_not_held_back_for_ever():
    broken = [FALLBACK_IDS[b"\xff"]] * 40
    *stepped, flushed = pieces(BYTE_FALLBACK, broken)
    assert "".join(stepped) + flushed == "\ufffd" * 40 == BYTE_FALLBACK.decode(broken) and len(flushed) < 8


# ---- folders


def save(folder: Path, config: dict | None = None, backend: tokenizers.Tokenizer | None = None) -> Path:
    (backend or byte_level_backend()).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_from_folder_reads_special_tokens_in_each_spelling(tmp_path):
    config = {"bos_token": None, "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}}
    save(tmp_path, config)
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": {"content": "<|turn|>"}, "eos_token": "<s>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {"eos_token": "<s>", "pad_token": "<|turn|>"}  # of two files the map counts
    assert tokenizer.eos_token_id == 0 and tokenizer.bos_token_id is None and tokenizer.special_id("pad_token") == 2


def test_from_folder_adds_tokens_that_only_the_config_declares(tmp_path):
    new_id = BYTE_LEVEL.vocab_size
    declared = {"1": {"content": "</s>", "special": True}, str(new_id): {"content": "<new>", "special": True}}
    tokenizer = Tokenizer.from_folder(save(tmp_path, {"added_tokens_decoder": declared}))
    assert tokenizer.encode("a<new>b")[1] == new_id and new_id in tokenizer.special_ids
    save(tmp_path, {"added_tokens_decoder": {"400": {"content": "<new>"}}})
    with pytest.raises(ValueError, match=f"gives '<new>' the id 400, but it is {new_id} in tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_from_folder_with_a_broken_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer that the tokenizers library can read"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent is not a folder"):
        Tokenizer.from_folder(tmp_path / "absent")


def test_from_folder_refuses_a_special_token_that_nothing_declares(tmp_path):
    save(tmp_path, {"eos_token": "<eos>"})
    with pytest.raises(ValueError, match=f"^{tmp_path}: eos_token='<eos>' is not in the tokenizer's vocabulary$"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_from_folder_names_a_file_that_is_no_json(tmp_path, name):
    save(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=f"{name} is not valid JSON"):
        Tokenizer.from_folder(tmp_path)


def test_tokenizer_json_is_taken_as_it_stands_whatever_the_model_is(tmp_path):
    # transformers' class for "llama" splits at U+2581; nobody has a class for "strange"
    for config in ({"model_type": "llama"}, {"model_type": "strange", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        save(tmp_path, {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}})
        for text in ("the quick é", " hello"):
            assert Tokenizer.from_folder(tmp_path).encode(text) == BYTE_LEVEL.encode(text, add_special_tokens=False)


def test_a_folder_is_read_without_a_network(tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    save(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "x"})
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(HI) == "x"


def sentencepiece_model(folder: Path):
    """Writes tokenizer.model, a BPE model of the SentencePiece library; returns its processor."""
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, vocab_size=330, model_type="bpe", byte_fallback=True, minloglevel=2
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


@pytest.mark.parametrize("model_type", ["llama", "strange"])
def test_without_tokenizer_json_a_sentencepiece_model_is_converted(tmp_path, model_type):
    processor = sentencepiece_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for text in ("the quick dog", "héllo é ß 🙂"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == processor.encode(text) and tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == text


def test_without_tokenizer_json_gpt2_files_are_converted(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "he", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("the<|endoftext|>") == [vocab["t"], vocab["he"], vocab["<|endoftext|>"]]


def test_without_a_tokenizer_the_error_says_what_is_missing(tmp_path, monkeypatch, caplog):
    with pytest.raises(ValueError, match=f"^{tmp_path} has no tokenizer.json, and no other vocabulary .*merges.txt"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match="has no tokenizer.json, and transformers can't make one of its files: .*"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tok.Tok", null]}}')
    with pytest.raises(ValueError, match="has no tokenizer.json, .* contains custom code"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"junk")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="has no tokenizer.json, .*install the package sentencepiece"):
        Tokenizer.from_folder(tmp_path)
    assert not caplog.records


def test_from_gguf_and_from_id(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata={"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    for tokenizer in (Tokenizer.from_gguf(path), Tokenizer.from_id(path)):
        assert tokenizer.eos_token_id == 0 and tokenizer.special_tokens["bos_token"] == "<|turn|>"
        assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [1, tokenizer.backend.token_to_id("hello")]
    assert Tokenizer.from_id(save(tmp_path)).encode("hello") == BYTE_LEVEL.encode("hello", add_special_tokens=False)


def loaded_after(code: str, *args: str) -> str:
    """Which of some heavy modules a process has imported that ran `code`, and what it wrote to stderr."""
    heavy = '{"jax", "torch", "transformers"}'
    code = f"import sys\nfrom jaxserve.text.tokenizer import Tokenizer\n{code}\nprint(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_transformers_is_imported_where_it_is_needed_and_quietly(tmp_path):
    save(tmp_path, {"chat_template": "{{ messages[0].content }}"})
    path = str(tmp_path / "tokenizer.json")
    of_a_backend = "import tokenizers\nTokenizer(tokenizers.Tokenizer.from_file(sys.argv[1])).encode('x')"
    assert loaded_after(of_a_backend, path) == "[]\n"
    of_a_folder = "Tokenizer.from_folder(sys.argv[1]).encode_chat([{'role': 'user', 'content': 'x'}])"
    assert loaded_after(of_a_folder, str(tmp_path)) == "['transformers']\n"


# ---- chat templates

HI = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for message in messages %}\n    {% if message.role == 'skip' %}{% continue %}{% endif %}\n"
    "<|turn|>{{ message.role }}\n{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def templated(*templates: str, **named: str) -> Tokenizer:
    """A tokenizer that adds BOS to any text, with one default template or with named ones."""
    chat_templates = named or {"default": templates[0]}
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(byte_level_backend(bos=True), special_tokens=specials, chat_templates=chat_templates)


def test_blocks_are_trimmed_and_loops_can_be_left():
    tokenizer = templated(CHATML)
    messages = [{"role": "skip", "content": "x"}, *HI]
    assert tokenizer.apply_chat_template(messages) == "<|turn|>user\nhi\n<|turn|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<|turn|>user\nhi\n"


def test_special_tokens_are_seen_by_their_names_and_others_are_empty():
    tokenizer = templated("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ messages | length }}")
    assert tokenizer.apply_chat_template(HI) == "<s>|</s>||1"


def test_bos_is_not_added_twice():
    tokenizer = templated("{{ bos_token }}{{ messages[0].content }}")
    assert tokenizer.encode_chat(HI) == tokenizer.encode("hi") == [0, *tokenizer.encode("hi", add_special_tokens=False)]


def test_tojson_keeps_unicode_and_html_and_takes_options():
    tokenizer = templated("{{ tools | tojson }}\n{{ tools | tojson(indent=2) }}")
    tools = [{"b": "<ü> & 'x'", "a": None}]
    expected = json.dumps(tools, ensure_ascii=False) + "\n" + json.dumps(tools, ensure_ascii=False, indent=2)
    assert tokenizer.apply_chat_template(HI, tools=tools) == expected


def test_strftime_now_and_generation_blocks():
    tokenizer = templated(
        "{{ strftime_now('%Y') }}{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    )
    assert tokenizer.apply_chat_template(HI) in {f"{datetime.now().year - late}[hi]" for late in (0, 1)}


def test_text_parts_are_joined_by_newlines():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tokenizer = templated("{{ messages[0].content }}")
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(ValueError, match=r"message 1: content may hold only parts like .* found \{'type': 'image'"):
        tokenizer.apply_chat_template([*HI, {"role": "user", "content": [*parts, {"type": "image", "url": "x"}]}])


def test_other_fields_reach_the_template_and_a_content_of_none_is_left_out():
    tokenizer = templated("{{ messages[0].content is defined }} {{ messages[0].tool_calls[0].name }}")
    message = {"role": "assistant", "content": None, "tool_calls": ({"name": "f"},)}
    assert tokenizer.apply_chat_template([message]) == "False f"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_seen_under_each_of_its_names(name):
    tokenizer = templated("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}")
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": "x", name: "why"}]) == "why why"


@pytest.mark.parametrize(
    "messages, says",
    [
        ([], "messages is empty"),
        (["hi"], "message 0 must be a dict with a string under 'role', found 'hi'"),
        ([*HI, {"content": "x"}], "message 1 must be a dict with a string under 'role'"),
        ([*HI, {"role": 3, "content": "x"}], "message 1 must be a dict"),
        ([{"role": "user", "content": {1, 2}}], "message 0 must be made of JSON values"),
    ],
)
def test_malformed_messages_are_named(messages, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        templated(CHATML).apply_chat_template(messages)


def test_an_error_of_the_template_names_the_message_that_brings_it_about():
    alternate = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate, got ' + m.role) }}{% endif %}{% endfor %}"
    )
    messages = [*HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, *HI]
    says = re.escape("the chat template fails at message 2 (role 'assistant'): Roles must alternate, got assistant")
    with pytest.raises(ValueError, match=f"^{says}$"):
        templated(alternate).apply_chat_template(messages)
    last_is_user = "{% if messages[-1].role != 'user' %}{{ raise_exception('ends with ' + messages[-1].role) }}{% endif %}"
    with pytest.raises(ValueError, match=re.escape("fails at message 2 (role 'tool'): ends with tool")):
        templated(last_is_user).apply_chat_template([messages[1], *HI, {"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match=r"fails at message 1 \(role 'user'\): .*no attribute 'content'"):
        templated("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}").apply_chat_template(
            [*HI, {"role": "user", "content": None}]
        )


def test_templates_cannot_reach_python_or_change_the_messages():
    messages = [{"role": "user", "content": "hi", "tags": ["a"]}]
    for attack in ("{{ messages[0].tags.append('b') }}", "{{ messages[0].content.__class__.__mro__ }}", "{{ messages.clear() }}"):
        with pytest.raises(ValueError, match="the chat template fails.*(unsafe|undefined|not safely callable)"):
            templated(attack).apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "hi", "tags": ["a"]}]


def test_variables_that_the_template_does_not_read_are_refused():
    tokenizer = templated("{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}")
    assert tokenizer.apply_chat_template(HI, enable_thinking=False) == "quiet"
    assert tokenizer.apply_chat_template(HI, tools=None) == ""
    with pytest.raises(ValueError, match="the chat template does not read thinking, tokenize; it reads enable_thinking"):
        tokenizer.apply_chat_template(HI, thinking=False, tokenize=False)
    with pytest.raises(ValueError, match="enable_thinking must be made of JSON values"):
        tokenizer.apply_chat_template(HI, enable_thinking=object())


def test_which_template_is_used():
    tokenizer = templated(default="D{{ tools is none }}", tool_use="T{{ tools[0].name }}", rag="R")
    tools = [{"name": "f"}]
    assert tokenizer.apply_chat_template(HI) == "DTrue"
    assert tokenizer.apply_chat_template(HI, tools=tools) == "Tf"
    assert tokenizer.apply_chat_template(HI, tools=tools, chat_template="default") == "DFalse"
    assert tokenizer.apply_chat_template(HI, chat_template="rag") == "R"
    assert tokenizer.apply_chat_template(HI, chat_template="own {{ messages[0].content }}") == "own hi"
    assert BYTE_LEVEL.apply_chat_template(HI, chat_template="x") == "x"
    with pytest.raises(ValueError, match="this model has no chat template: give one with chat_template="):
        BYTE_LEVEL.apply_chat_template(HI)
    with pytest.raises(ValueError, match=r"no default chat template: choose with chat_template= from \['a', 'b'\]"):
        templated(a="A", b="B").apply_chat_template(HI)
    with pytest.raises(ValueError, match=r"the chat template is not valid Jinja \(line 2\)"):
        templated("\n{% if %}").apply_chat_template(HI)


def test_where_a_folder_keeps_its_templates(tmp_path):
    chat = lambda **kwargs: Tokenizer.from_folder(tmp_path).apply_chat_template(HI, **kwargs)  # noqa: E731
    save(tmp_path, {"chat_template": "config"})
    assert chat() == "config"
    save(tmp_path, {"chat_template": [{"name": "default", "template": "listed"}, {"name": "rag", "template": "rag"}]})
    assert chat() == "listed" and chat(chat_template="rag") == "rag"
    (tmp_path / "chat_template.jinja").write_text("file ü", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("additional")
    assert Tokenizer.from_folder(tmp_path).chat_templates == {
        "default": "file ü",
        "short": "additional",
    }  # in place of the config's
    assert chat() == "file ü" and chat(chat_template="short") == "additional"


# ---- real models, as transformers sees them


@pytest.fixture(scope="module", params=["smollm2", "qwen3"])
def real(request, tmp_path_factory):
    """(tokenizer, golden) of a real model."""
    if request.param == "smollm2":
        tokenizer = Tokenizer.from_gguf(smollm2_gguf())
    else:
        tokenizer = Tokenizer.from_folder(qwen3_tokenizer_folder(tmp_path_factory.mktemp("qwen3")))
    return tokenizer, json.loads((GOLDENS / f"{request.param}_tokenizer.json").read_text(encoding="utf-8"))


def test_real_tokenizers_encode_as_transformers_does(real):
    tokenizer, golden = real
    wrong = [text for text, ids in golden["encode"] if tokenizer.encode(text, add_special_tokens=False) != ids]
    assert len(golden["encode"]) > 300 and wrong == []


def test_real_tokenizers_decode_as_transformers_does(real):
    tokenizer, golden = real
    assert len(golden["decode"]) > 50
    for ids, *texts in golden["decode"]:
        for skip, text in zip((False, True), texts, strict=True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == text
            assert "".join(pieces(tokenizer, ids, skip=skip)) == text


def test_real_chat_templates_render_as_transformers_does(real):
    tokenizer, golden = real
    for chat, text in golden["chat"]:
        assert tokenizer.apply_chat_template(**chat) == text
