"""The bytes behind the tokens of a byte-level vocabulary.

Owns GPT-2's alphabet, in which such a vocabulary writes the 256 bytes as printable characters.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import tokenizers
from tokenizers import decoders, pre_tokenizers

_NFC_SHRINKS = 4  # times, at most, in bytes (3.5 in Unicode 15: U+212A, which is "K" again, and marks that join a letter)


class TokenBytes(dict[int, bytes]):
    """token id -> bytes of a byte-level vocabulary, filled as ids are met. Skipped and unknown ids have none."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Collection[int]):
        super().__init__(dict.fromkeys(skipped, b""))
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            self[token_id] = token.translate(_ALPHABET).encode("latin-1")
        except UnicodeEncodeError:  # an added token with a character outside the byte alphabet stands for its own UTF-8
            self[token_id] = token.encode("utf-8")
        return self[token_id]


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether each token stands for bytes of its own, whatever its neighbours are."""
    return isinstance(backend.decoder, decoders.ByteLevel)


def max_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """The most bytes of a text that one token can stand for, before normalisation; None where there is no such bound.

    The bound is known for byte-level vocabularies whose other parts drop nothing.
    """
    stages = [json.loads(stage.__getstate__()) for stage in (backend.normalizer, backend.pre_tokenizer) if stage]
    parts = [part for stage in stages for part in stage.get("normalizers") or stage.get("pretokenizers") or [stage]]
    kinds = {part["type"] for part in parts}
    added, vocab = backend.get_added_tokens_decoder().values(), backend.get_vocab(with_added_tokens=False)
    if (
        not is_byte_level(backend)
        or not kinds <= {"NFC", "Split", "Digits", "ByteLevel"}
        or any(part.get("behavior") == "Removed" for part in parts)
        or any(token.lstrip or token.rstrip for token in added)  # swallow the blanks beside them
        or not {letter for letter in pre_tokenizers.ByteLevel.alphabet() if _is_utf8(letter)} <= vocab.keys()
    ):
        return None
    longest = max([*map(len, vocab), *(len(token.content.encode()) for token in added)])  # a letter stands for a byte
    return longest * (_NFC_SHRINKS if "NFC" in kinds else 1)


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's characters for the 256 bytes, as a translation from character to byte; other Latin-1 characters leave Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # stand for themselves
    others = [byte for byte in range(256) if byte not in printable]  # are written from U+0100 on
    return dict.fromkeys(others, 0xFFFF) | {0x100 + n: byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _is_utf8(letter: str) -> bool:
    """Whether the byte that a letter of the byte alphabet stands for is one that UTF-8 has."""
    byte = ord(letter.translate(_ALPHABET))
    return byte < 0xF5 and byte not in (0xC0, 0xC1)
