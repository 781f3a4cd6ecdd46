"""Token ids to text as they come: `IncrementalDetokenizer`.

Owns what is held back of a text until it is certain. Knows nothing of requests or stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxserve.text.tokenizer import Tokenizer

_MAX_HELD_TOKENS = 8  # text that ends in U+FFFD waits for this many tokens; a character has at most 4 bytes


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text as they come, never splitting a character.

    The pieces, with what `flush` returns, add up to what the tokens add to the text of the prompt. For a byte-level vocabulary that
    is `tokenizer.decode` of the tokens, and each step decodes just the new token's bytes. Other vocabularies decode a window of
    tokens again each step, because there a token's text depends on the one before (Text Generation Inference's algorithm).

    Args:
      tokenizer: whose ids these are.
      prompt_ids: the tokens before the first; the text of a word-initial token can depend on them.
      skip_special_tokens: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._stream = (_ByteStream if tokenizer.is_byte_level else _WindowStream)(tokenizer, prompt_ids, skip_special_tokens)

    def step(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come; "" while a character is incomplete."""
        return self._stream.step(token_id)

    def flush(self) -> str:
        """What was held back, at the end of the sequence: an incomplete character comes out as U+FFFD."""
        return self._stream.flush()


class _ByteStream:
    """Byte-level vocabularies: the text is the UTF-8 decoding of the tokens' bytes, whatever came before them."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool):
        self._bytes = tokenizer.token_bytes(skip_special_tokens)
        self._rest = b""  # the first bytes of a character that is not complete

    def step(self, token_id: int) -> str:
        data = self._rest + self._bytes[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)  # what codecs' incremental decoder calls, at half its cost
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


class _WindowStream:
    """Any vocabulary: what tokens add to the decoding of those before them, which are the last ones that gave text."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._before = self._kept(prompt_ids)  # their text is out
        self._pending: list[int] = []  # their text is not
        self._text_before = self._decode(self._before)

    def step(self, token_id: int) -> str:
        self._pending += self._kept([token_id])
        piece = self._new_text()
        if not piece or (piece.endswith("\ufffd") and len(self._pending) < _MAX_HELD_TOKENS):
            return ""
        self._before, self._pending = self._pending, []
        self._text_before = self._decode(self._before)
        return piece

    def flush(self) -> str:
        piece, self._pending = self._new_text(), []
        return piece

    def _new_text(self) -> str:
        return self._decode(self._before + self._pending)[len(self._text_before) :]

    def _kept(self, token_ids: Sequence[int]) -> list[int]:
        return [i for i in token_ids if not (self._skip and i in self._tokenizer.special_ids)]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
