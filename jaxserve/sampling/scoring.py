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
from jaxserve.parallel.shard import ALONE, Shard
from jaxserve.sampling import across_shards
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
    vocab_size: int | None = None,
    shard: Shard = ALONE,
) -> TokenLogprobs:
    """Log-probability and rank of each token by its own row and, if with_top, the likeliest tokens (without it they are not valid).

    Values are computed as `sampler.sample` does, except that exponentials are float32: a prompt has many tokens, and no draw
    depends on the last bit here. A row's values depend neither on other rows nor on with_top.

    shard: the device, where each has a part of the vocabulary: `weight` is its part, of whole BLOCKs, and what is past vocab_size
      in all of them counts as none.
    """
    vocabulary = weight.shape[vocab_axis] * shard.size if vocab_size is None else vocab_size
    how = {"vocab_axis": vocab_axis, "n": min(max_logprobs, vocabulary), "vocab_size": vocabulary, "shard": shard}
    at_once = partial(_score_at_once, **how)
    if weight.shape[vocab_axis] <= SCORED_AT_ONCE:
        return at_once(x, weight, tokens, with_top)
    in_blocks = partial(_score_in_blocks, **how)
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
    shard: Shard,
) -> TokenLogprobs:
    C, V, block = len(tokens), weight.shape[vocab_axis], SCORED_AT_ONCE
    assert C <= block, "more tokens than a block has entries"
    # Ranks need the tokens' own logits first. A product in the shape of a block gives the same bits as the block itself will.
    local = shard.own(tokens, V)
    own = jnp.take(weight, jnp.resize(local, (block,)), axis=vocab_axis, mode="clip")
    chosen = jnp.diagonal(vocabulary_logits(x, own, vocab_axis))
    chosen = (chosen if shard.is_alone else shard.sum(jnp.where(local < V, chosen, 0)))[:, None]
    first = shard.start(V)  # of this device's entries

    def add_block(state: tuple[jax.Array, ...], i: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        highest, mass, ahead, values, value_ids = state
        start = jnp.minimum(i * block, V - block)  # the last block begins among the entries of the one before it
        ids = start + jnp.arange(block, dtype=jnp.int32)
        logits = vocabulary_logits(x, lax.dynamic_slice_in_dim(weight, start, block, vocab_axis), vocab_axis)
        real = ids >= i * block
        logits = jnp.where(real if shard.is_alone else real & (first + ids < vocab_size), logits, -jnp.inf)
        before, highest = highest, jnp.maximum(highest, logits.max(-1))
        masses = jnp.exp(logits - highest[:, None]).reshape(C, -1, BLOCK).sum(-1)
        mass = mass * jnp.exp(before - highest) + masses.sum(-1)
        ahead += ((logits > chosen) | ((logits == chosen) & (first + ids < tokens[:, None]))).sum(-1, dtype=jnp.int32)

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
    part_highest, part_mass, ahead, values, value_ids = state
    highest, mass = shard.max(part_highest), part_mass
    if not shard.is_alone:
        mass = shard.sum_in_order(part_mass * jnp.exp(part_highest - highest))
        values, value_ids = across_shards.likeliest(values, value_ids, (), n, V, shard)
    log_mass = jnp.log(mass)
    return TokenLogprobs(
        logprobs=chosen[:, 0] - highest - log_mass,
        ranks=1 + shard.sum(ahead),
        top_ids=value_ids,
        top_logprobs=values - highest[:, None] - log_mass[:, None],
    )
