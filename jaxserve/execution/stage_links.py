"""From the devices of one stage of a pipeline to those of another: device i of the one sends to device i of the other.

Owns how arrays travel: by `jax.device_put` where each sender and its receiver are of one process, and else by a program of one
collective permute, which every process that has a device of either stage dispatches, in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.programs import gpu_compiler_options
from jaxserve.parallel.mesh import AXIS, is_here

LINK_OPTIONS = gpu_compiler_options("bucket", several_hosts=True)  # of XLA for GPUs
_ENDS = "ends"  # of the mesh of both stages: who sends, who receives


class StageLink:
    """Between two stages of as many devices. What passes lies on the second as on the first."""

    def __init__(self, source: Mesh, target: Mesh):
        self._source, self._target = source, target
        self._mesh = Mesh(np.stack([source.devices, target.devices]), (_ENDS, AXIS), axis_types=(AxisType.Auto,) * 2)
        self._pairs = dict(zip(source.devices.flat, target.devices.flat, strict=True))
        self._across = any(a.process_index != b.process_index for a, b in self._pairs.items())
        self.is_here: bool = is_here(self._mesh)  # whether this process has a device of either stage
        self._compiled: dict[jax.ShapeDtypeStruct, Any] = {}
        self._compiling = threading.Lock()
        self._nothing: dict[jax.ShapeDtypeStruct, dict[Any, jax.Array]] = {}  # what each receiving device gives

    def has(self, like: jax.ShapeDtypeStruct) -> bool:
        """Whether nothing is left to be compiled for arrays like this one."""
        return not self._across or like in self._compiled

    def compile(self, like: jax.ShapeDtypeStruct) -> None:
        """Compiles what passes arrays of this shape, dtype and sharding, which may name either stage's mesh."""
        with self._compiling:
            if self.has(like):
                return
            permute, joined = self.program(like)
            options = LINK_OPTIONS if jax.default_backend() == "gpu" else None
            self._compiled[like] = jax.jit(permute).lower(joined).compile(compiler_options=options)

    def program(self, like: jax.ShapeDtypeStruct) -> tuple[Callable[[jax.Array], jax.Array], jax.ShapeDtypeStruct]:
        """What passes arrays like this one between processes, and its abstract argument: one collective permute."""
        joined = self._joined(like)
        spec = joined.sharding.spec  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        return jax.shard_map(_to_second, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False), joined

    def connect(self) -> None:
        """The first transfer, of nothing: processes wait for one another there, and the libraries of collectives do so for 30 s at
        most. All of them call it when all are here."""
        if self._across:
            like = jax.ShapeDtypeStruct((1, 1), np.float32)
            zeros = np.zeros((1, 1), np.float32)
            where = NamedSharding(self._source, PartitionSpec())
            x = jax.make_array_from_callback((1, 1), where, lambda index: zeros[index]) if is_here(self._source) else None
            self.send(x, like)

    def send(self, x: jax.Array | None, like: jax.ShapeDtypeStruct) -> jax.Array | None:
        """x on the second stage, without waiting. x may be None where this process has no device of the first, and what returns is
        None where it has none of the second. like: x, abstract."""
        if not self._across:
            assert x is not None
            where = NamedSharding(self._target, _spec(like))
            if x.is_fully_addressable:
                return jax.device_put(x, where)
            parts = [jax.device_put(shard.data, self._pairs[shard.device]) for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(like.shape, where, parts)
        self.compile(like)
        shards = {} if x is None else {shard.device: shard.data for shard in x.addressable_shards}
        if like not in self._nothing:
            self._nothing[like] = self._zeros(like)
        shards = self._nothing[like] | shards
        joined = self._joined(like)
        given = [shards[d] for d in self._mesh.local_devices]
        sent = self._compiled[like](jax.make_array_from_single_device_arrays(joined.shape, joined.sharding, given))
        if not is_here(self._target):
            return None
        ours = set(self._target.local_devices)
        parts = [shard.data for shard in sent.addressable_shards if shard.device in ours]
        return jax.make_array_from_single_device_arrays(like.shape, NamedSharding(self._target, _spec(like)), parts)

    def _joined(self, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Of both stages as one array: theirs one behind the other along the first axis."""
        first, *rest = (*_spec(like), *[None] * (len(like.shape) - len(_spec(like))))
        spec = PartitionSpec(_ENDS if first is None else (_ENDS, first), *rest)
        shape = (2 * like.shape[0], *like.shape[1:])
        return jax.ShapeDtypeStruct(shape, like.dtype, sharding=NamedSharding(self._mesh, spec))

    def _zeros(self, like: jax.ShapeDtypeStruct) -> dict[Any, jax.Array]:
        shape = NamedSharding(self._target, _spec(like)).shard_shape(like.shape)
        return {d: jax.device_put(np.zeros(shape, like.dtype), d) for d in self._target.local_devices}


def _to_second(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, _ENDS, [(0, 1)])


def _spec(like: jax.ShapeDtypeStruct) -> PartitionSpec:
    return PartitionSpec() if like.sharding is None else like.sharding.spec
