"""Edits of logits that depend on a sequence's tokens, or list token ids: penalties, bias, allowed ids, bad words.

Owns their arithmetic on the device, and the history of tokens. edit_rows.py has the columns of a row. Knows nothing of models,
draws or schedules. Everything here is a pure function, traced inside a larger jitted program.

The order is vLLM's: logit_bias, then repetition, frequency and presence penalties, then the masks, which set -inf. Masks commute,
so their own order does not matter.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.row_tiles import MapRows, whole
from jaxserve.parallel.shard import ALONE, Shard
from jaxserve.sampling import edit_rows as layout
from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

_IN_PROMPT = 2**30  # added to a token's count in the output if the prompt has the token
_FIRST_SPAN = 1024  # tokens of a history that are always counted; later spans, each twice as long, only if a sequence reaches them


def remember(
    history: jax.Array,  # i32[S, L]
    seq_rows: jax.Array,  # i32[R]; S or more for padding
    positions: jax.Array,  # i32[R]
    tokens: jax.Array,  # i32[R]
) -> jax.Array:  # i32[S, L]
    """The history with each row's token at its position."""
    return history.at[seq_rows, positions].set(tokens, mode="drop")


def edit(
    logits: jax.Array,  # f32[R, V]
    kinds: jax.Array,  # i32[R]; bits of edit_rows: which edits each row asks for
    seq_rows: jax.Array,  # i32[R]: where each row's edits and history lie
    positions: jax.Array,  # i32[R]; of the token being sampled: the history holds those before it
    table: jax.Array,  # i32[S, edit_rows.EditLayout.num_columns]
    history: jax.Array,  # i32[S, L]
    map_rows: MapRows = whole,
    shard: Shard = ALONE,
) -> jax.Array:  # f32[R, V]
    """The logits with each row's edits applied. Rows without edits are unchanged. A kind of edit that no row has is skipped.

    map_rows: how penalties are computed. The other edits are exact in any shape: a bias is one addition, and masks set -inf.
    shard: the device, where each has a part of the vocabulary, a multiple of 32; `logits` is its part.
    """
    rows = table.at[seq_rows].get(mode="fill", fill_value=0)

    def apply(kind: int, function, logits: jax.Array) -> jax.Array:
        wanted = (kinds & kind) != 0
        return lax.cond(wanted.any(), partial(function, wanted=wanted, rows=rows, shard=shard), lambda x: x, logits)

    logits = apply(layout.BIAS, _add_bias, logits)
    looking_back = {"seq_rows": seq_rows, "positions": positions, "history": history}
    logits = apply(layout.PENALTIES, partial(_penalise, map_rows=map_rows, **looking_back), logits)
    logits = apply(layout.ALLOWED, _forbid_others, logits)
    return apply(layout.BAD_WORDS, partial(_forbid_last_of_words, **looking_back), logits)


def _real(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.float32)


def _row_numbers(logits: jax.Array) -> jax.Array:  # i32[R, 1]
    return jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]


def _add_bias(logits: jax.Array, *, wanted: jax.Array, rows: jax.Array, shard: Shard) -> jax.Array:
    ids, values = rows[:, layout.BIAS_IDS : layout.BIAS_VALUES], _real(rows[:, layout.BIAS_VALUES : layout.WORDS])
    V = logits.shape[1]
    ids = jnp.where(wanted[:, None] & (ids >= 0), shard.own(ids, V), V)  # past the end: dropped
    return logits.at[_row_numbers(logits), ids].add(values, mode="drop")


def _penalise(
    logits: jax.Array,
    *,
    wanted: jax.Array,
    rows: jax.Array,
    seq_rows: jax.Array,
    positions: jax.Array,
    history: jax.Array,
    map_rows: MapRows = whole,
    shard: Shard = ALONE,
) -> jax.Array:
    """Applies the three penalties to the tokens that occurred, in rows that want it."""
    counts = _count(logits.shape, wanted, seq_rows, rows[:, layout.NUM_PROMPT], positions, history, shard)
    penalties = [_real(rows[:, i]) for i in (layout.PRESENCE, layout.FREQUENCY, layout.REPETITION)]
    return jnp.where(wanted[:, None], map_rows(_penalise_counted, logits, counts, *penalties), logits)


def _penalise_counted(
    logits: jax.Array,  # f32[R, V]
    counts: jax.Array,  # i32[R, V], as _count makes them
    presence: jax.Array,  # f32[R]
    frequency: jax.Array,  # f32[R]
    repetition: jax.Array,  # f32[R]
) -> jax.Array:  # f32[R, V]
    """Repetition, of a token in prompt or output: a positive logit is divided by it, another multiplied. Frequency: subtracted once
    for each occurrence in the output. Presence: subtracted once if there is any."""
    presence, frequency, repetition = presence[:, None], frequency[:, None], repetition[:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    edited = jnp.where(counts > 0, scaled, logits)
    in_output = counts & (_IN_PROMPT - 1)
    return edited - frequency * in_output.astype(jnp.float32) - jnp.where(in_output > 0, presence, 0.0)


def _count(
    shape: tuple[int, ...],  # (R, V)
    wanted: jax.Array,  # bool[R]; the others' counts are 0
    seq_rows: jax.Array,  # i32[R]
    num_prompt: jax.Array,  # i32[R]
    positions: jax.Array,  # i32[R]
    history: jax.Array,  # i32[S, L]
    shard: Shard,
) -> jax.Array:  # i32[R, V]
    """How often each token occurs in a row's output, plus _IN_PROMPT where its prompt has it.

    The history is counted in spans, and spans that no row reaches are skipped. Shapes are static so, and the work is at most twice
    what the longest row needs. Within a span the prompt is marked (by a maximum) before the output is counted (by a sum).
    """
    (R, V), L = shape, history.shape[1]
    numbers = jnp.arange(R, dtype=jnp.int32)[:, None]
    longest = jnp.where(wanted, positions, 0).max()

    def count_span(counts: jax.Array, start: int, end: int) -> jax.Array:
        at = jnp.arange(start, end, dtype=jnp.int32)[None]
        ids = shard.own(history.at[seq_rows[:, None], at].get(mode="fill", fill_value=0), V)
        of_prompt = wanted[:, None] & (at < num_prompt[:, None])
        of_output = wanted[:, None] & (at >= num_prompt[:, None]) & (at < positions[:, None])
        counts = counts.at[numbers, jnp.where(of_prompt, ids, V)].max(_IN_PROMPT, mode="drop")
        return counts.at[numbers, jnp.where(of_output, ids, V)].add(1, mode="drop")

    counts, start, end = jnp.zeros((R, V), jnp.int32), 0, min(_FIRST_SPAN, L)
    while start < L:
        span = partial(count_span, start=start, end=end)
        counts = span(counts) if not start else lax.cond(longest > start, span, lambda x: x, counts)
        start, end = end, min(2 * end, L)
    return counts


def given_ids(
    kinds: jax.Array,  # i32[R]; bits of edit_rows
    seq_rows: jax.Array,  # i32[R]
    table: jax.Array,  # i32[S, edit_rows.EditLayout.num_columns]
) -> jax.Array:  # i32[R, MAX_LOGPROB_TOKEN_IDS]
    """The token ids whose log-probabilities each row asks for, then 0; all 0 in rows that ask for none."""
    rows = table[:, layout.GIVEN_IDS : layout.ALLOWED_BITS].at[seq_rows].get(mode="fill", fill_value=0)
    return jnp.where((kinds & layout.LOGPROB_IDS)[:, None] != 0, rows, 0)


def apply_masks(
    logits: jax.Array,  # f32[R, V]
    masks: jax.Array,  # i32[R, ceil(V / 32)]: bit v % 32 of word v // 32 says whether token v may be sampled
) -> jax.Array:  # f32[R, V]
    """The logits, -inf where the mask has a 0."""
    R, V = logits.shape
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return jnp.where(bits.reshape(R, -1)[:, :V] == 1, logits, -jnp.inf)


def _forbid_others(logits: jax.Array, *, wanted: jax.Array, rows: jax.Array, shard: Shard) -> jax.Array:
    """Forbids all ids that are not in a row's bit set of allowed ones."""
    allowed = shard.part(rows[:, layout.ALLOWED_BITS :], 1, layout.num_mask_words(logits.shape[1]))
    return apply_masks(logits, jnp.where(wanted[:, None], allowed, -1))


def _forbid_last_of_words(
    logits: jax.Array,
    *,
    wanted: jax.Array,
    rows: jax.Array,
    seq_rows: jax.Array,
    positions: jax.Array,
    history: jax.Array,
    shard: Shard,
) -> jax.Array:
    """Forbids the last token of each bad word whose earlier tokens are the end of the output."""
    words = rows[:, layout.WORDS : layout.GIVEN_IDS].reshape(-1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
    before = positions[:, None] + jnp.arange(1 - MAX_BAD_WORD_TOKENS, 0, dtype=jnp.int32)
    in_output = before >= rows[:, layout.NUM_PROMPT, None]
    tail = history.at[seq_rows[:, None], jnp.maximum(before, 0)].get(mode="fill", fill_value=0)
    tail = jnp.where(in_output, tail, -2)  # matches no token of a word: a prompt's tokens are no part of one
    begin, last = words[:, :, :-1], words[:, :, -1]
    complete = ((begin < 0) | (begin == tail[:, None])).all(-1)
    V = logits.shape[1]
    ids = jnp.where(wanted[:, None] & complete & (last >= 0), shard.own(last, V), V)
    return logits.at[_row_numbers(logits), ids].set(-jnp.inf, mode="drop")
