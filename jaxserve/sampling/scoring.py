"""Log-probabilities and ranks of given tokens, from hidden rows and the head's weight.

Owns how much of the logits exists at once. On a CPU the vocabulary is taken in blocks, whose logits stay in its cache, with a
running maximum and sum of exponentials (Milakov and Gimelshein, arXiv:1805.02867). As one array the logits would be written to
memory and read three times, which takes as long as the matmul. On other devices they are one array, [C, V], since a CUDA graph
holds no loop. Knows nothing of prompts, steps or modules.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.layers import vocabulary_logits
from jaxserve.sampling.sampler import BLOCK, TokenLogprobs, token_logprobs, unsigned_zero

SCORED_AT_ONCE = 2048  # vocabulary entries whose logits a CPU holds at once; a multiple of BLOCK


def score(
    x: jax.Array,  # [C, D], normed
    weight: jax.Array,  # [V, D] or [D, V]
    vocab_axis: int,  # which of the weight's is V
    tokens: jax.Array,  # i32[C]
    with_top: jax.Array,  # bool[]
    *,
    max_logprobs: int,
) -> TokenLogprobs:
    """Log-probability and rank of each token by its own row and, if with_top, the likeliest tokens (without it they are not valid).

    Values are computed as `sampler.sample` does, except that exponentials are float32: a prompt has many tokens, and no draw
    depends on the last bit here. A row's values depend neither on other rows nor on with_top.
    """
    n = min(max_logprobs, weight.shape[vocab_axis])
    at_once = partial(_score_at_once, vocab_axis=vocab_axis, n=n)
    if weight.shape[vocab_axis] <= SCORED_AT_ONCE:
        return at_once(x, weight, tokens, with_top)
    in_blocks = partial(_score_in_blocks, vocab_axis=vocab_axis, n=n)
    return lax.platform_dependent(x, weight, tokens, with_top, cpu=in_blocks, default=at_once)


def pack_scored(scored: TokenLogprobs) -> jax.Array:  # i32[C, 2 + 2N]
    """One array to fetch; `rows.unpack_scored` reads it."""
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    columns = [bits(scored.logprobs)[:, None], scored.ranks[:, None], scored.top_ids, bits(scored.top_logprobs)]
    return jnp.concatenate(columns, axis=1)


def _score_at_once(
    x: jax.Array, weight: jax.Array, tokens: jax.Array, with_top: jax.Array, *, vocab_axis: int, n: int
) -> TokenLogprobs:
    logits = vocabulary_logits(x, weight, vocab_axis)
    return token_logprobs(logits, tokens, n, with_top=with_top, dtype=jnp.float32)


def _score_in_blocks(
    x: jax.Array, weight: jax.Array, tokens: jax.Array, with_top: jax.Array, *, vocab_axis: int, n: int
) -> TokenLogprobs:
    C, V, block = len(tokens), weight.shape[vocab_axis], SCORED_AT_ONCE
    assert C <= block, "more tokens than a block has entries"
    # Ranks need the tokens' own logits first. A product in the shape of a block gives the same bits as the block itself will.
    own = jnp.take(weight, jnp.resize(tokens, (block,)), axis=vocab_axis, mode="clip")
    chosen = jnp.diagonal(vocabulary_logits(x, own, vocab_axis))[:, None]

    def add_block(state: tuple[jax.Array, ...], i: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        highest, mass, ahead, values, value_ids = state
        start = jnp.minimum(i * block, V - block)  # the last block begins among the entries of the one before it
        ids = start + jnp.arange(block, dtype=jnp.int32)
        logits = vocabulary_logits(x, lax.dynamic_slice_in_dim(weight, start, block, vocab_axis), vocab_axis)
        logits = jnp.where(ids >= i * block, logits, -jnp.inf)
        before, highest = highest, jnp.maximum(highest, logits.max(-1))
        masses = jnp.exp(logits - highest[:, None]).reshape(C, -1, BLOCK).sum(-1)
        mass = mass * jnp.exp(before - highest) + masses.sum(-1)
        ahead += ((logits > chosen) | ((logits == chosen) & (ids < tokens[:, None]))).sum(-1, dtype=jnp.int32)

        def merge() -> tuple[jax.Array, jax.Array]:  # the leaders so far come first, so that among equals the lower id leads
            merged, place = lax.top_k(jnp.concatenate([values, unsigned_zero(logits)], axis=1), n)
            old_ids = jnp.take_along_axis(value_ids, jnp.minimum(place, n - 1), axis=1)
            return merged, jnp.where(place < n, old_ids, start + place - n)

        values, value_ids = lax.cond(with_top, merge, lambda: (values, value_ids))
        return (highest, mass, ahead, values, value_ids), None

    lowest = jnp.finfo(jnp.float32).min  # finite, so that no difference to it is NaN
    zeros, none = jnp.zeros(C, jnp.int32), jnp.full((C, n), -jnp.inf)
    state = jnp.full(C, lowest), jnp.zeros(C, jnp.float32), zeros, none, jnp.zeros((C, n), jnp.int32)
    state, _ = lax.scan(add_block, state, jnp.arange(-(-V // block), dtype=jnp.int32))
    highest, mass, ahead, values, value_ids = state
    log_mass = jnp.log(mass)
    return TokenLogprobs(
        logprobs=chosen[:, 0] - highest - log_mass,
        ranks=1 + ahead,
        top_ids=value_ids,
        top_logprobs=values - highest[:, None] - log_mass[:, None],
    )
