"""Tokenizers as they are read: from folders of each make, from GGUF, and without a network."""

import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from jaxserve.text.tokenizer import Tokenizer
from tests.checkpoints.gguf_files import write_gguf
from tests.text.small_tokenizers import (
    BYTE_LEVEL,
    CORPUS,
    HI,
    pieces,
    save,
)


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
