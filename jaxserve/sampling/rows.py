"""The int32 arrays that cross between host and device for sampling: one row a sequence, each way.

Owns the meaning of each column, and the numpy side of both arrays. `write_row` turns a request's SamplingParams into a row, once,
at admission; only POSITION changes from step to step. `unpack_sampled` reads what comes back. float32 values travel as their bits.
Knows nothing of jax: sampler.py is the device's side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sampling.edit_rows import kinds_of
from jaxserve.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_SUPPRESSED_IDS, SamplingParams

# Columns of a request's row. A row of zeros is greedy and has no options, so padding rows can stay zero.
TEMPERATURE, TOP_P, MIN_P = 0, 1, 2  # float32 bits
TOP_K = 3
SEED_LOW, SEED_HIGH = 4, 5  # the 64-bit seed's words
SAMPLE_INDEX = 6
POSITION = 7  # of the token being sampled; the only column that varies by step
SUPPRESS_UNTIL = 8  # the suppressed ids are forbidden at positions below this
EDITS = 9  # bits of edit_rows: which kinds of edit the row's logits get, and whether ids are given
SUPPRESS_IDS = 10  # the first of MAX_SUPPRESSED_IDS columns; -1 where there is none
NUM_COLUMNS = SUPPRESS_IDS + MAX_SUPPRESSED_IDS

# Columns of a sampled row; those from LOGPROB on exist only where logprobs were compiled in.
TOKEN, FLAGS, LOGPROB, RANK, TOP_IDS = 0, 1, 2, 3, 4  # then N ids, N float32 log-probabilities, and those of the given ids
FLAG_BAD_LOGITS, FLAG_BY_SORT, FLAG_DELIVERED = 1, 2, 4

GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def write_row(
    table: np.ndarray,  # i32[max_num_seqs, NUM_COLUMNS], written in place
    row: int,
    params: SamplingParams,
    *,
    seed: int,
    sample_index: int,
    num_prompt_tokens: int,
    suppress_ids: frozenset[int] = frozenset(),
) -> None:
    """Writes all columns of one request. POSITION is that of its first output token.

    seed: any 64-bit integer, signed or not. suppress_ids: the ids that `params.min_tokens` forbids at first (eos, stop ids).

    Raises:
      ValueError: min_tokens has more ids to hold back than a row has room for.
    """
    held = sorted(suppress_ids) if params.min_tokens else []
    if len(held) > MAX_SUPPRESSED_IDS:
        raise ValueError(
            f"min_tokens={params.min_tokens} would hold back {len(held)} stop ids and at most {MAX_SUPPRESSED_IDS} are "
            "supported: shorten stop_token_ids or leave min_tokens at 0"
        )
    temperature = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
    reals = np.array([min(temperature, _MAX_FLOAT32), params.top_p, params.min_p], np.float32)
    out = table[row]
    out[[TEMPERATURE, TOP_P, MIN_P]] = reals.view(np.int32)
    most = np.iinfo(np.int32).max
    out[TOP_K] = min(params.top_k, most)
    out[[SEED_LOW, SEED_HIGH]] = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32).view(np.int32)
    out[SAMPLE_INDEX] = sample_index
    out[POSITION] = num_prompt_tokens
    out[SUPPRESS_UNTIL] = min(num_prompt_tokens + params.min_tokens, most)
    out[EDITS] = kinds_of(params)
    out[SUPPRESS_IDS:] = -1
    out[SUPPRESS_IDS : SUPPRESS_IDS + len(held)] = held


@dataclass(frozen=True, slots=True)
class SampledRows:
    """A step's sampled tokens on the host: numpy, one entry a row. The five fields of log-probabilities are None where no request
    asked for them, the two of speculation where it is off or the head made no drafts."""

    tokens: np.ndarray  # i32[R]
    bad_logits: np.ndarray  # bool[R]: the logits have a NaN or +inf, or no finite value; the token is not valid then
    by_sort: np.ndarray  # bool[R]: the row needed the sort of the whole vocabulary
    logprobs: np.ndarray | None = None  # f32[R]
    ranks: np.ndarray | None = None  # i32[R]
    top_ids: np.ndarray | None = None  # i32[R, N]
    top_logprobs: np.ndarray | None = None  # f32[R, N]
    given: np.ndarray | None = None  # f32[R, MAX_LOGPROB_TOKEN_IDS]: of a request's logprob_token_ids, in their order
    delivered: np.ndarray | None = None  # bool[R]: all drafts up to the row's were accepted, so its token is an output
    drafts: np.ndarray | None = None  # i32[R, K]: proposed to follow the token, where it is its sequence's last; -1: none


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Log-probabilities of given tokens on the host: numpy, one entry a row."""

    logprobs: np.ndarray  # f32[C]
    ranks: np.ndarray  # i32[C]
    top_ids: np.ndarray  # i32[C, N]
    top_logprobs: np.ndarray  # f32[C, N]

    def __getitem__(self, rows: slice) -> ScoredRows:
        return ScoredRows(self.logprobs[rows], self.ranks[rows], self.top_ids[rows], self.top_logprobs[rows])


def unpack_scored(packed: np.ndarray) -> ScoredRows:
    """Views of `scoring.pack_scored`'s i32[C, 2 + 2N]."""
    n, reals = packed.shape[1] // 2 - 1, packed.view(np.float32)
    return ScoredRows(reals[:, 0], packed[:, 1], packed[:, 2 : 2 + n], reals[:, 2 + n :])


def unpack_sampled(packed: np.ndarray, num_drafts: int = 0) -> SampledRows:
    """Views of `sampler.pack_sampled`'s i32[R, 2] (no logprobs) or i32[R, 4 + 2N + MAX_LOGPROB_TOKEN_IDS]. num_drafts: K more
    columns, of a head that drafts."""
    if num_drafts:
        at = packed.shape[1] - num_drafts
        sampled = unpack_sampled(packed[:, :at])
        return replace(sampled, delivered=(packed[:, FLAGS] & FLAG_DELIVERED) != 0, drafts=packed[:, at:])
    flags = packed[:, FLAGS]
    bad, by_sort = (flags & FLAG_BAD_LOGITS) != 0, (flags & FLAG_BY_SORT) != 0
    if packed.shape[1] == LOGPROB:
        return SampledRows(packed[:, TOKEN], bad, by_sort)
    n = (packed.shape[1] - TOP_IDS - MAX_LOGPROB_TOKEN_IDS) // 2
    reals = packed.view(np.float32)
    return SampledRows(
        packed[:, TOKEN],
        bad,
        by_sort,
        logprobs=reals[:, LOGPROB],
        ranks=packed[:, RANK],
        top_ids=packed[:, TOP_IDS : TOP_IDS + n],
        top_logprobs=reals[:, TOP_IDS + n : TOP_IDS + 2 * n],
        given=reals[:, TOP_IDS + 2 * n :],
    )
