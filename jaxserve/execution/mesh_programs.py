"""How a program of one device runs on all devices of a mesh, and where its arguments and results lie there.

Owns the one `shard_map` of each program. Arguments lie where their shardings say, and whole on every device where they have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.device_state import DeviceState
from jaxserve.parallel.mesh import AXIS

REPLICATED = PartitionSpec()
KV_HEADS = PartitionSpec(None, None, AXIS)  # of KV pages, [num_pages, 2, K, page_size, H]
MOVED_HEADS = PartitionSpec(None, None, None, AXIS)  # of pages on their way to the host or from there, [N, L, 2, K, page_size, H]


def run_on_mesh(function: Callable[..., Any], mesh: Mesh, args: tuple[Any, ...], results: Any) -> Callable[..., Any]:
    """`function` on every device, with its part of each of the abstract `args`. results: their PartitionSpecs."""
    in_specs = jax.tree.map(_spec, args)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=results, check_vma=False)


def on_mesh(args: Any, mesh: Mesh) -> Any:
    """The abstract `args` with a sharding each."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, _spec(x))), args)


def last_axis_on_mesh(x: Any, mesh: Mesh) -> Any:
    """The abstract x, cut along its last axis."""
    spec = PartitionSpec(*[None] * (len(x.shape) - 1), AXIS)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _spec(x: Any) -> PartitionSpec:
    return REPLICATED if x.sharding is None else x.sharding.spec


def moved_pages_on_mesh(pages: Any, mesh: Mesh) -> Any:
    """The abstract pages, [N, L, 2, K, page_size, H], cut along their heads."""
    return jax.ShapeDtypeStruct(pages.shape, pages.dtype, sharding=NamedSharding(mesh, MOVED_HEADS))


def state_specs() -> Any:
    """Where a DeviceState lies: KV pages by their heads, all else on every device. Also that of a tree of which it is a prefix."""
    pages: Any = KV_HEADS
    rest: Any = REPLICATED
    return DeviceState(kv_pages=pages, step_hidden=rest, rows=rest)


def state_on_mesh(state: DeviceState, mesh: Mesh) -> DeviceState:
    """The abstract state with its shardings."""
    rest = on_mesh(DeviceState([], state.step_hidden, state.rows), mesh)
    sharding = NamedSharding(mesh, KV_HEADS)
    pages: list[Any] = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in state.kv_pages]
    return DeviceState(pages, rest.step_hidden, rest.rows)
