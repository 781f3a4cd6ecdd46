"""A request's edits of its logits, as int32 rows: written on the host at each admission, and kept on the device until the next.

Owns the meaning of each column, and the numpy side of it. Penalties, logit_bias, allowed_token_ids and bad words are too large to
be sent with every step. They also depend on the row's tokens, which the device has before the host. The device therefore holds a
table of edits and a history of token ids, with one row of each for a sequence. logprob_token_ids edit nothing, but are as large,
and lie in the same row. float32 values travel as their bits. Knows nothing of jax: logit_edits.py is the device's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, SamplingParams

# Kinds of edit, bits of rows.EDITS: a row of the table is read only where its bit says that it was written.
PENALTIES, BIAS, ALLOWED, BAD_WORDS = 1, 2, 4, 8
LOGPROB_IDS = 16  # no edit: the row has ids whose log-probabilities are asked for
ALL_EDITS = PENALTIES | BIAS | ALLOWED | BAD_WORDS

# Columns of an edit row.
PRESENCE, FREQUENCY, REPETITION = 0, 1, 2  # float32 bits
NUM_PROMPT = 3  # how many tokens of the history are the prompt
BIAS_IDS = 4  # -1 where there is none
BIAS_VALUES = BIAS_IDS + MAX_LOGIT_BIAS  # float32 bits
WORDS = BIAS_VALUES + MAX_LOGIT_BIAS  # MAX_BAD_WORDS sequences of MAX_BAD_WORD_TOKENS ids, ending at the right; -1 before
GIVEN_IDS = WORDS + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS  # of log-probabilities; 0 where there is none
ALLOWED_BITS = GIVEN_IDS + MAX_LOGPROB_TOKEN_IDS  # a bit a token id: id % 32 of the word at id // 32


def kinds_of(params: SamplingParams) -> int:
    """Which kinds of edit a request asks for, and LOGPROB_IDS if it gives ids; 0 for most: the row is not read."""
    asked = {
        PENALTIES: params.penalises,
        BIAS: params.logit_bias is not None,
        ALLOWED: params.allowed_token_ids is not None,
        BAD_WORDS: params.bad_words_token_ids is not None,
        LOGPROB_IDS: params.logprob_token_ids is not None,
    }
    return sum(kind for kind, wanted in asked.items() if wanted)


def num_mask_words(vocab_size: int) -> int:
    """int32 words of a bit set of token ids: a request's allowed ones, or a grammar's mask."""
    return -(-vocab_size // 32)


@dataclass(frozen=True)
class EditLayout:
    """The shapes of one engine's rows: `history` i32[max_model_len] and `edits` i32[num_columns] each."""

    max_model_len: int
    vocab_size: int

    @property
    def num_columns(self) -> int:
        return ALLOWED_BITS + num_mask_words(self.vocab_size)

    @property
    def row_bytes(self) -> int:
        """Device memory of one sequence's history and edits."""
        return 4 * (self.max_model_len + self.num_columns)

    @property
    def nothing(self) -> np.ndarray:
        """A packed row whose index is past the end of the state, so that it is dropped; for warm-up."""
        return self._write(np.iinfo(np.int32).max, [], np.zeros(self.num_columns, np.int32))

    def pack(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> np.ndarray:
        """i32[1 + max_model_len + num_columns]: the sequence row, all of its tokens known so far, its edits."""
        edits = np.zeros(self.num_columns, np.int32)
        edits[NUM_PROMPT] = num_prompt_tokens
        penalties = [params.presence_penalty, params.frequency_penalty, params.repetition_penalty]
        edits[PRESENCE : REPETITION + 1] = np.array(penalties, np.float32).view(np.int32)
        bias = params.logit_bias or {}
        edits[BIAS_IDS:BIAS_VALUES] = -1
        edits[BIAS_IDS : BIAS_IDS + len(bias)] = list(bias)
        edits[BIAS_VALUES : BIAS_VALUES + len(bias)] = np.array(list(bias.values()), np.float32).view(np.int32)
        edits[WORDS:GIVEN_IDS] = -1
        words = edits[WORDS:GIVEN_IDS].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        for i, ids in enumerate(params.bad_words_token_ids or ()):
            words[i, MAX_BAD_WORD_TOKENS - len(ids) :] = ids
        given = params.logprob_token_ids or ()
        edits[GIVEN_IDS : GIVEN_IDS + len(given)] = given
        if params.allowed_token_ids is not None:
            allowed = np.zeros(32 * (self.num_columns - ALLOWED_BITS), np.uint8)
            allowed[list(params.allowed_token_ids)] = 1
            edits[ALLOWED_BITS:] = np.packbits(allowed, bitorder="little").view("<i4")
        return self._write(row, token_ids, edits)

    def _write(self, row: int, token_ids: Sequence[int], edits: np.ndarray) -> np.ndarray:
        history = np.zeros(self.max_model_len, np.int32)
        history[: len(token_ids)] = token_ids
        return np.concatenate([np.array([row], np.int32), history, edits])
