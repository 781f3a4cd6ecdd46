"""Encoding and decoding; against the tokenizers library and transformers' goldens."""

import functools
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxserve.text.tokenizer import Tokenizer
from tests import alphabet_model
from tests.alphabet_model import EOS, SPECIALS, VOCABULARY
from tests.real_files import qwen3_tokenizer_folder, smollm2_gguf
from tests.text.small_tokenizers import (
    BYTE_FALLBACK,
    BYTE_LEVEL,
    byte_level_backend,
    pieces,
)

GOLDENS = Path(__file__).parents[1] / "goldens"


def test_a_word_is_encoded_with_and_without_a_space_before_it():
    encode = functools.partial(BYTE_LEVEL.encode, add_special_tokens=False)
    for word in ("the", "  the", "quick brown"):
        found = BYTE_LEVEL.encode_word(word)
        assert found == [encode(word.lstrip()), encode(" " + word.lstrip())] and found[0] != found[1]
        assert [BYTE_LEVEL.decode(ids) for ids in found] == [word.lstrip(), " " + word.lstrip()]
    same = tokenizers.Tokenizer(models.WordLevel({"the": 3, "?": 0}, unk_token="?"))
    same.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer(same).encode_word("the") == [[3]]


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


def test_names_of_transformers_tokenizers():
    tokenizer = Tokenizer(alphabet_model.backend(), special_tokens={"eos_token": EOS})
    assert len(tokenizer) == len(tokenizer.get_vocab()) == VOCABULARY - 1 and tokenizer.get_vocab()[EOS] == SPECIALS[EOS]
    assert tokenizer("ab") == {"input_ids": [97, 98], "attention_mask": [1, 1]}
    assert tokenizer(["a", "bc"]) == {"input_ids": [[97], [98, 99]], "attention_mask": [[1], [1, 1]]}
    assert tokenizer.tokenize("ab") == ["a", "b"] and tokenizer.convert_ids_to_tokens([97, 10**6]) == ["a", ""]
    assert tokenizer.convert_tokens_to_ids(["a", "no such"]) == [97, None]
    assert tokenizer.eos_token == EOS and tokenizer.bos_token is None and tokenizer.pad_token is tokenizer.pad_token_id is None
    assert tokenizer.all_special_ids == sorted(SPECIALS.values()) and tokenizer.all_special_tokens[0] == EOS
    assert tokenizer.is_special(EOS) and not tokenizer.is_special("a") and not tokenizer.is_special("no such")
    with pytest.raises(TypeError, match="must be a list of tokens"):
        tokenizer.convert_tokens_to_ids("a")


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
