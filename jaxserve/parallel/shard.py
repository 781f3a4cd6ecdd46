"""What code that runs on one device of several asks of the others, inside `shard_map`.

A layer, a head or a sampler is written for one device's part, and says with a `Shard` where parts meet. `ALONE` stands for a
device that has the whole: its methods return what they are given, and nothing is added to the program.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kernels.all_reduce import all_reduce


@dataclass(frozen=True)
class Shard:
    """One device of `size` along the mesh's `axis`. all_reduce: the backend of its sums (kernels/all_reduce). whole_sums: no device
    has a part of a matrix product's sums: matrices are cut along their columns alone, so that no float is summed over devices.
    groups: in which the devices attend, the first size / groups of them in the first. A step's rows are as many equal parts, and
    each group attends for its own; all else is computed of all rows."""

    axis: str | None = None
    size: int = 1
    all_reduce: str = "xla"
    whole_sums: bool = False
    groups: int = 1

    @property
    def is_alone(self) -> bool:
        return self.axis is None

    def start(self, count: int) -> jax.Array | int:
        """Where this device's `count` entries begin among those of all."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * count

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over all devices."""
        return x if self.axis is None else all_reduce(x, axis=self.axis, num_devices=self.size, backend=self.all_reduce)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest of all devices."""
        return x if self.axis is None else lax.pmax(x, self.axis)

    def any(self, x: jax.Array) -> jax.Array:
        """bool: whether it is true on any device."""
        return x if self.axis is None else lax.pmax(x.astype(jnp.int32), self.axis) > 0

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """The parts of all devices, one after the other along an axis."""
        return x if self.axis is None else lax.all_gather(x, self.axis, axis=axis, tiled=True)

    def columns(self, x: jax.Array, count: int | None = None) -> jax.Array:  # [..., n] -> [..., count]
        """Where sums are whole, the columns of all devices' x, the first `count` of them. Else x."""
        if not self.whole_sums:
            return x
        return self.gather(x, x.ndim - 1)[..., :count]

    def product(self, y: jax.Array, num_columns: int) -> jax.Array:
        """[..., num_columns] of a product with this device's part of a matrix: summed over all devices, or, where sums are whole,
        their columns side by side."""
        return self.columns(y, num_columns) if self.whole_sums else self.sum(y)

    def own_rows(self, x: jax.Array) -> jax.Array:  # [T, ...] -> [T / groups, ...]
        """The part of x that belongs to this device's group, of an x that every device has."""
        if self.groups == 1:
            return x
        count = x.shape[0] // self.groups
        return lax.dynamic_slice_in_dim(x, self._group * count, count)

    def sum_rows(self, y: jax.Array) -> jax.Array:  # [T / groups, D] -> [T, D]
        """The rows of all groups, each summed over the devices of its group. It is one sum over all devices, to which those of the
        other groups add zeros: a row's floats are summed as in any other group."""
        if self.groups == 1:
            return self.sum(y)
        is_own = jnp.arange(self.groups)[:, None, None] == self._group  # one command, where an update of zeros is two
        return self.sum(jnp.where(is_own, y, jnp.zeros((), y.dtype)).reshape(-1, y.shape[1]))

    @property
    def _group(self) -> jax.Array:
        return lax.axis_index(self.axis or "") // (self.size // self.groups)

    def only(self, x: jax.Array) -> jax.Array:  # floats
        """The x of the one device where it is not 0 (each element may be another's), to the last bit: it is summed as integers, in
        which -0 is not 0."""
        if self.axis is None:
            return x
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
        return lax.bitcast_convert_type(self.sum(bits), jnp.float32).astype(x.dtype)

    def own(self, ids: jax.Array, count: int) -> jax.Array:
        """ids among the `count` entries of this device: from 0, and `count` (past the end) for an entry of another's."""
        if self.axis is None:
            return ids
        own = ids - self.start(count)
        return jnp.where((own >= 0) & (own < count), own, count)

    def ids(self, count: int) -> jax.Array:  # i32[count]
        """The numbers of this device's `count` entries among those of all."""
        ids = jnp.arange(count, dtype=jnp.int32)
        return ids if self.axis is None else ids + self.start(count)

    def part(self, x: jax.Array, axis: int, count: int) -> jax.Array:
        """This device's `count` entries of an x that every device has; zeros past its end."""
        if self.axis is None:
            return x
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, count * self.size - x.shape[axis])
        return lax.dynamic_slice_in_dim(jnp.pad(x, padding), self.start(count), count, axis)

    def pick(self, x: jax.Array, ids: jax.Array) -> jax.Array:  # f32[R, n], i32[R, k] -> f32[R, k]
        """k entries of each row of an x whose last axis lies one part after the other on the devices."""
        if self.axis is None:
            return jnp.take_along_axis(x, ids, 1)
        own, n = self.own(ids, x.shape[1]), x.shape[1]
        found = jnp.take_along_axis(x, jnp.minimum(own, n - 1), 1)
        return self.only(jnp.where(own < n, found, 0))

    def look_up(self, table: jax.Array, ids: jax.Array) -> jax.Array:  # [n, D], i32[...] -> [..., D]
        """Rows of a table whose parts lie one after the other on the devices."""
        if self.axis is None:
            return table[ids]
        return self.only(table.at[self.own(ids, len(table))].get(mode="fill", fill_value=0))


ALONE = Shard()
