"""Decoding piece by piece: the pieces of any ids add up to the whole text, in whole characters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.small_tokenizers import BYTE_FALLBACK, BYTE_LEVEL, SPECIALS, pieces

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
