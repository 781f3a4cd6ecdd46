"""What sampling asks of all devices, where each has a part of the vocabulary: the parts lie one after the other, in whole blocks.

Owns the joins: the best of all, the likeliest of all, the entry at which a sum of weights passes a target. No device sees another's
logits but for the few likeliest. Every join gives each device the same answer, and with equal logits that of one device that has
them all: sums are of integers, ties go to the lower id.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.parallel.shard import Shard


def best(
    highest: jax.Array,  # f32[R]: of this device's entries
    ids: jax.Array,  # i32[R]: the first that is that high, among this device's
    bad: jax.Array,  # bool[R]
    count: int,  # entries of a device
    shard: Shard,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same three of all devices: the highest, the lowest id that is that high, whether any is bad. One exchange."""
    if shard.is_alone:
        return highest, ids, bad
    bits = lax.bitcast_convert_type(highest, jnp.int32)
    parts = shard.gather(jnp.stack([bits, ids + shard.start(count), bad.astype(jnp.int32)])[None], 0)  # [devices, 3, R]
    values = lax.bitcast_convert_type(parts[:, 0], jnp.float32)
    first = jnp.argmax(values, 0)[None]
    return values.max(0), jnp.take_along_axis(parts[:, 1], first, 0)[0], parts[:, 2].any(0)


def likeliest(
    values: jax.Array,  # f32[R, n]: this device's, highest first, of equals the lower id first; 0 has no sign
    ids: jax.Array,  # i32[R, n]: among this device's
    others: tuple[jax.Array, ...],  # [R, n] each: what else belongs to these entries
    n: int,
    count: int,  # entries of a device
    shard: Shard,
) -> tuple[jax.Array, ...]:
    """(values, ids, *others) of the n highest of all devices, in that order."""
    if shard.is_alone:
        return values, ids, *others
    parts = [shard.gather(x, 1) for x in (values, ids + shard.start(count), *others)]
    values, place = lax.top_k(parts[0], n)  # of equals the first comes first: a lower device's, which has the lower ids
    return values, *(jnp.take_along_axis(part, place, 1) for part in parts[1:])


def split_target(
    total: jax.Array,  # i64[R]: of this device's weights
    target: jax.Array,  # i64[R]: a place in the sum of all devices' weights, one after the other
    shard: Shard,
) -> tuple[jax.Array, jax.Array]:  # i64[R], bool[R]
    """The target's place among this device's weights, 0 for a place that is not, and whether it is."""
    if shard.is_alone:
        return target, jnp.ones(target.shape, bool)
    totals = shard.gather(total[None], 0)
    device = jnp.arange(shard.size)[:, None]
    target = target - jnp.where(device < lax.axis_index(shard.axis or ""), totals, 0).sum(0)
    mine = (target >= 0) & (target < total)
    return jnp.where(mine, target, 0), mine


def as_ordered(x: jax.Array) -> jax.Array:  # f32[...] -> i32[...]
    """Integers in the order of x; 0 has no sign. `from_ordered` is the way back."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def from_ordered(keys: jax.Array) -> jax.Array:  # i32[...] -> f32[...]
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ 0x7FFFFFFF, keys), jnp.float32)


def threshold(
    keys: jax.Array,  # i32[R, n]: of this device's entries
    weights: jax.Array,  # integers [R, n]
    target: jax.Array,  # i64[R]
    shard: Shard,
) -> tuple[jax.Array, jax.Array]:  # i32[R], i64[R]
    """(the key at which the weights' sum from the highest key down passes the target, the sum of those above it): a bisection over
    the 2**32 keys, whose every step sums over all devices. Where all weights together do not pass the target, the lowest key."""

    def above(key: jax.Array) -> jax.Array:
        """The sum of weights whose key is at least this."""
        return shard.sum(jnp.where(keys >= key[:, None].astype(jnp.int32), weights, 0).sum(1, dtype=jnp.int64))

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # what is at least `low` passes, what is at least `high` does not
        middle = (low + high) // 2
        passes = above(middle) > target
        return jnp.where(passes, middle, low), jnp.where(passes, high, middle)

    least, most = -(2**31), 2**31 - 1
    key, _ = lax.fori_loop(0, 32, halve, (jnp.full_like(target, least), jnp.full_like(target, most)))
    return key.astype(jnp.int32), above(jnp.minimum(key + 1, most))
