"""Which drafts of a step stand, from what was sampled after each: pure functions over a head's rows, traced inside it.

A sequence's logits rows stand one after the other: that of its last token, then that of each draft. Knows no model or proposer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.speculative.proposer import NO_DRAFT


def follows(seq_rows: jax.Array) -> jax.Array:  # i32[R] -> bool[R]
    """Whether a row is a draft's: its sequence is that of the row before."""
    return jnp.concatenate([jnp.zeros(1, bool), seq_rows[1:] == seq_rows[:-1]])


def drafts_after(is_draft: jax.Array, tokens: jax.Array) -> jax.Array:  # bool[R], i32[R] -> i32[R]
    """The draft of the token that each row samples; NO_DRAFT for a sequence's last."""
    none = jnp.full(1, NO_DRAFT, jnp.int32)
    return jnp.concatenate([jnp.where(is_draft, tokens, NO_DRAFT)[1:], none])


def probs_after(
    is_draft: jax.Array,  # bool[R]
    seq_rows: jax.Array,  # i32[R]
    probs: jax.Array,  # f32[S, K, V]: what each sequence's drafts were drawn with
) -> jax.Array:  # f32[R, V]
    """What `drafts_after` was drawn with; nothing of meaning where that is none."""
    place = jnp.minimum(jnp.arange(len(seq_rows), dtype=jnp.int32) - first_rows(is_draft), probs.shape[1] - 1)
    return probs.at[seq_rows, place].get(mode="fill", fill_value=0)


def first_rows(is_draft: jax.Array) -> jax.Array:  # bool[R] -> i32[R]
    """The first logits row of each row's sequence."""
    return lax.cummax(jnp.where(is_draft, 0, jnp.arange(len(is_draft), dtype=jnp.int32)))


def delivered(
    is_draft: jax.Array,  # bool[R]
    drafts: jax.Array,  # i32[R]: the input token of each row; read where is_draft
    sampled: jax.Array,  # i32[R]
    bad: jax.Array,  # bool[R]: rows whose sample means nothing
) -> jax.Array:  # bool[R]
    """Whether a row's sample is an output token: all drafts up to its own equal what was sampled before them.

    A bad row after a draft is left out as if the draft had been refused: the sequence comes to that position again, first in line.
    """
    before = jnp.concatenate([sampled[:1], sampled[:-1]])
    refused = is_draft & ((drafts != before) | bad)
    total = jnp.cumsum(refused, dtype=jnp.int32)
    return total == total[first_rows(is_draft)]


def last_delivered(is_draft: jax.Array, delivered: jax.Array) -> jax.Array:  # bool[R], bool[R] -> bool[R]
    """The one row of each sequence whose sample is its last token now."""
    goes_on = jnp.concatenate([(is_draft & delivered)[1:], jnp.zeros(1, bool)])
    return delivered & ~goes_on
