"""Log-probabilities and ranks of given tokens, from hidden rows and the head's weight.

Owns how much of the logits exists at once. On a CPU the vocabulary is taken in blocks, whose logits stay in its cache, with the
highest logit and the sum of exponentials of each 128 entries, put together at the end. As one array the logits would be written to
memory and read three times, which takes as long as the matmul. On other devices they are one array, [C, V], since a CUDA graph
holds no loop. Knows nothing of prompts, steps or modules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.layers import vocabulary_logits
from jaxserve.parallel.shard import ALONE, Shard
from jaxserve.sampling import across_shards
from jaxserve.sampling.sampler import BLOCK, TokenLogprobs, log_of_mass, token_logprobs, unsigned_zero

SCORED_AT_ONCE = 2048  # vocabulary entries whose logits a CPU holds at once; a multiple of BLOCK
LARGE_VOCABULARY = 16 * SCORED_AT_ONCE  # from here on a device has so many entries, of up to 16 devices


def score(
    x: jax.Array,  # [C, D], normed
    weight: jax.Array,  # [V, D] or [D, V]
    vocab_axis: int,  # which of the weight's is V
    tokens: jax.Array,  # i32[C]
    with_top: jax.Array,  # bool[]
    *,
    max_logprobs: int,
    vocab_size: int | None = None,
    one_shape: bool = False,
    shard: Shard = ALONE,
) -> TokenLogprobs:
    """Log-probability and rank of each token by its own row and, if with_top, the likeliest tokens (without it they are not valid).

    Values are computed as `sampler.sample` does, except that exponentials are float32: a prompt has many tokens, and no draw
    depends on the last bit here. A row's values depend neither on other rows nor on with_top.

    one_shape: on a CPU, blocks are as large whatever part of the vocabulary a device has, so that bits do not depend on it.
    shard: the device, where each has a part of the vocabulary: `weight` is its part, of whole BLOCKs, and what is past vocab_size
      in all of them counts as none.
    """
    vocabulary = weight.shape[vocab_axis] * shard.size if vocab_size is None else vocab_size
    how = {"vocab_axis": vocab_axis, "n": min(max_logprobs, vocabulary), "vocab_size": vocabulary, "shard": shard}
    at_once = partial(_score_at_once, **how)
    if weight.shape[vocab_axis] <= SCORED_AT_ONCE and not one_shape:
        return at_once(x, weight, tokens, with_top)
    block = BLOCK if one_shape and vocabulary < LARGE_VOCABULARY else SCORED_AT_ONCE
    in_blocks = partial(_score_in_blocks, block=block, **how)
    return lax.platform_dependent(x, weight, tokens, with_top, cpu=in_blocks, default=at_once)


def mask_past_end(logits: jax.Array, vocab_size: int, shard: Shard) -> jax.Array:
    """A device's part of the logits, -inf for entries that are past the vocabulary's end."""
    if shard.is_alone:
        return logits
    return jnp.where(shard.ids(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def pack_scored(scored: TokenLogprobs) -> jax.Array:  # i32[C, 2 + 2N]
    """One array to fetch; `rows.unpack_scored` reads it."""
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    columns = [bits(scored.logprobs)[:, None], scored.ranks[:, None], scored.top_ids, bits(scored.top_logprobs)]
    return jnp.concatenate(columns, axis=1)


def _score_at_once(
    x: jax.Array,
    weight: jax.Array,
    tokens: jax.Array,
    with_top: jax.Array,
    *,
    vocab_axis: int,
    n: int,
    vocab_size: int,
    shard: Shard,
) -> TokenLogprobs:
    logits = mask_past_end(vocabulary_logits(x, weight, vocab_axis), vocab_size, shard)
    return token_logprobs(logits, tokens, n, with_top=with_top, dtype=jnp.float32, shard=shard)


def _score_in_blocks(
    x: jax.Array,
    weight: jax.Array,
    tokens: jax.Array,
    with_top: jax.Array,
    *,
    vocab_axis: int,
    n: int,
    vocab_size: int,
    block: int,
    shard: Shard,
) -> TokenLogprobs:
    C, V = len(tokens), weight.shape[vocab_axis]
    assert C <= block, "more tokens than a block has entries"
    if block > V:
        weight = jnp.pad(weight, [(0, block - V if axis == vocab_axis else 0) for axis in range(2)])
    # Ranks need the tokens' own logits first. A product in the shape of a block gives the same bits as the block itself will.
    local = shard.own(tokens, V)
    own = jnp.take(weight, jnp.resize(local, (block,)), axis=vocab_axis, mode="clip")
    chosen = jnp.diagonal(vocabulary_logits(x, own, vocab_axis))
    chosen = (chosen if shard.is_alone else shard.only(jnp.where(local < V, chosen, 0)))[:, None]
    first = shard.start(V)  # of this device's entries

    def add_block(state: tuple[jax.Array, ...], i: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        ahead, values, value_ids = state
        start = jnp.minimum(i * block, max(V - block, 0))  # the last block begins among the entries of the one before it
        logits = vocabulary_logits(x, lax.dynamic_slice_in_dim(weight, start, block, vocab_axis), vocab_axis)
        if V > block and V % BLOCK:  # groups of BLOCK begin at its multiples in the last block too
            skip = (i * block - start) % BLOCK
            logits = lax.dynamic_slice_in_dim(jnp.pad(logits, ((0, 0), (0, BLOCK))), skip, block, 1)
            start = start + skip
        ids = start + jnp.arange(block, dtype=jnp.int32)
        logits = jnp.where((ids >= i * block) & (ids < V) & (first + ids < vocab_size), logits, -jnp.inf)
        ahead += ((logits > chosen) | ((logits == chosen) & (first + ids < tokens[:, None]))).sum(-1, dtype=jnp.int32)

        def merge() -> tuple[jax.Array, jax.Array]:  # the leaders so far come first, so that among equals the lower id leads
            merged, place = lax.top_k(jnp.concatenate([values, unsigned_zero(logits)], axis=1), n)
            old_ids = jnp.take_along_axis(value_ids, jnp.minimum(place, n - 1), axis=1)
            return merged, jnp.where(place < n, old_ids, start + place - n)

        values, value_ids = lax.cond(with_top, merge, lambda: (values, value_ids))
        groups = logits.reshape(C, -1, BLOCK)
        maxima = jnp.maximum(groups.max(-1), jnp.finfo(jnp.float32).min)  # finite, so that no difference to it is NaN
        return (ahead, values, value_ids), (maxima, jnp.exp(groups - maxima[:, :, None]).sum(-1))

    state = jnp.zeros(C, jnp.int32), jnp.full((C, n), -jnp.inf), jnp.zeros((C, n), jnp.int32)
    state, parts = lax.scan(add_block, state, jnp.arange(-(-V // block), dtype=jnp.int32))
    ahead, values, value_ids = state
    maxima, masses = (part.transpose(1, 0, 2).reshape(C, -1) for part in parts)
    highest = shard.max(maxima.max(-1))
    with jax.enable_x64(True):
        below = (maxima - highest[:, None]).astype(jnp.float64)
        log_mass = log_of_mass(masses.astype(jnp.float64) * jnp.exp(below), shard)
    values, value_ids = across_shards.likeliest(values, value_ids, (), n, V, shard)
    return TokenLogprobs(
        logprobs=chosen[:, 0] - highest - log_mass,
        ranks=1 + shard.sum(ahead),
        top_ids=value_ids,
        top_logprobs=values - highest[:, None] - log_mass[:, None],
    )
