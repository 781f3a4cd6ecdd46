"""Puts weights that are in memory onto the devices of a mesh, and takes them back as one device would hold them.

Owns when a trainer's array is used as it lies. models/adoption.py says which arrays a weight is made of.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.adoption import Fitted, fit, made_of
from jaxserve.models.decoder import Decoder, named_leaves
from jaxserve.models.shards import ModelShards, ShardedModel
from jaxserve.parallel.mesh import is_here, spans_hosts

logger: logging.Logger = logging.getLogger("jaxserve")


def shard_model(model: Decoder, shards: ModelShards) -> ShardedModel:
    """The model of one device, on a mesh: its weights are cut one at a time and stay where they are."""
    leaves = named_leaves(model)
    dtype, transposed = next(iter(leaves.values())).dtype, model.is_transposed
    plain = shards.plain(dtype, transposed=transposed)
    weights = dict(zip(plain, place_cut(fit(model, model.config, plain), shards), strict=True))
    return ShardedModel(shards, shards.module(dtype, transposed=transposed), weights)


def transpose_sharded(model: ShardedModel) -> ShardedModel:
    """The model with its dense kernels laid out as `transpose_kernels` does; those that lie so already are shared."""
    if model.module.is_transposed:
        return model
    shards, weights = model.shards, {}
    dtype = next(iter(model.weights.values())).dtype
    for path, leaf in shards.plain(dtype, transposed=True).items():
        weights[path] = model.weights.get(path)
        if weights[path] is None and not is_here(shards.mesh_of(path)):
            weights[path] = _elsewhere(leaf.shape, leaf.dtype, shards, path)
        elif weights[path] is None:
            turn = jax.jit(jnp.transpose, out_shardings=shards.sharding(path, shards.layout(path, len(leaf.shape))))
            weights[path] = turn(model.weights[path.removesuffix("weight") + "kernel"])
    return ShardedModel(shards, shards.module(dtype, transposed=True), weights)


def place_cut(fitted: Sequence[Fitted], shards: ModelShards) -> Iterator[jax.Array]:
    """Yields each weight as the mesh's devices hold it: the trainer's own array where that lies so, else a new one. How many were
    new is logged."""
    num_new = 0
    for leaf in fitted:
        layout = shards.layout(leaf.path, len(leaf.target.shape))
        sharding = shards.sharding(leaf.path, layout)
        if not is_here(shards.mesh_of(leaf.path)):
            yield _elsewhere(leaf.target.shape, leaf.target.dtype, shards, leaf.path)
            continue
        only = leaf.arrays[0]
        fits = leaf.is_as_given and layout.is_plain and isinstance(only, jax.Array)
        if fits and only.sharding.is_equivalent_to(sharding, only.ndim):
            yield only
            continue
        num_new += 1
        if spans_hosts(shards.mesh_of(leaf.path)):  # where jax.device_put of what one process has would ask all processes
            leaf = replace(leaf, arrays=[x if _is_of_several(x) else np.asarray(x) for x in leaf.arrays])
        if all(isinstance(x, np.ndarray) for x in leaf.arrays):
            made = made_of(leaf.arrays, tuple(leaf.shapes), tuple(leaf.turned), leaf.target_turned, leaf.target.dtype, np)
            host = layout.cut(made)
            yield jax.make_array_from_callback(host.shape, sharding, lambda index, host=host: host[index])
        else:
            arrays = [_on_mesh(x, shards.mesh_of(leaf.path)) for x in leaf.arrays]
            how = (tuple(leaf.shapes), tuple(leaf.turned), leaf.target_turned, leaf.target.dtype, layout.axis, sharding)
            yield _cutter(*how)(arrays, None if layout.is_plain else layout.filled)
    if num_new:
        logger.info("%d of %d weights were copied to lie as %d devices need them", num_new, len(fitted), shards.num_devices)


def _elsewhere(plain: tuple[int, ...], dtype: Any, shards: ModelShards, path: str) -> jax.Array:
    """The weight as a process knows it that has none of the devices of its stage: all but the values. plain: its shape, uncut."""
    layout = shards.layout(path, len(plain))
    return jax.make_array_from_single_device_arrays(layout.shape(plain), shards.sharding(path, layout), [], dtype=dtype)


@functools.lru_cache(maxsize=256)  # of a model's distinct weights
def _cutter(shapes: Any, turned: Any, target_turned: bool, dtype: Any, axis: int | None, sharding: NamedSharding) -> Any:
    def cut(arrays: list[jax.Array], places: jax.Array | None) -> jax.Array:
        made = made_of(arrays, shapes, turned, target_turned, dtype)
        return made if places is None else jnp.take(made, places, axis=axis, mode="fill", fill_value=0)

    return jax.jit(cut, out_shardings=sharding)


def _is_of_several(x: Any) -> bool:
    """Whether several processes have parts of it."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _on_mesh(x: Any, mesh: Mesh) -> jax.Array:
    """x on the mesh's devices: in parts as it lies, if it lies on them, else whole on each."""
    spec = PartitionSpec()
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
        theirs = x.sharding.mesh
        if isinstance(theirs, Mesh) and list(theirs.devices.flat) == list(mesh.devices.flat):
            spec = PartitionSpec(*(_ours(entry, mesh.axis_names) for entry in x.sharding.spec))
    return jax.device_put(x, NamedSharding(mesh, spec))


def _ours(entry: Any, axes: Sequence[str]) -> Any:
    """An entry of a PartitionSpec without the axes of one device that our mesh does not have."""
    names = [name for name in (entry if isinstance(entry, tuple) else (entry,)) if name in axes]
    return names[0] if names else None


def matching(model: ShardedModel, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """The model's cut weights, in the order of `abstract`. ValueError where they are not of its shapes, dtypes and shardings."""
    for path, wanted in abstract.items():
        found = model.weights.get(path)
        if found is None or (found.shape, found.dtype) != (wanted.shape, wanted.dtype) or not _lies_as(found, wanted):
            here = f"{wanted.dtype}{list(wanted.shape)}, {wanted.sharding}"
            raise ValueError(
                f"these weights are cut for other devices or another model: {path} is {_shown(found)}, not {here}: read them with "
                "this engine's read_weights, or give them uncut"
            )
    return [model.weights[path] for path in abstract]


def _lies_as(x: jax.Array, wanted: jax.ShapeDtypeStruct) -> bool:
    return x.sharding == wanted.sharding or wanted.sharding is not None and x.sharding.is_equivalent_to(wanted.sharding, x.ndim)


def _shown(x: jax.Array | None) -> str:
    return "missing" if x is None else f"{x.dtype}{list(x.shape)}, {x.sharding}"


def plain_weights(model: ShardedModel) -> Iterator[tuple[str, np.ndarray]]:
    """(path, the weight as one device would hold it), on the host and one at a time: for saving. NotImplementedError if other
    processes have parts of it."""
    for path, weight in model.weights.items():
        if not weight.is_fully_addressable:
            raise NotImplementedError(f"{path} lies on devices of other processes too: convert the files that the hosts have read")
        yield path, model.shards.layout(path, weight.ndim).joined(np.asarray(weight))
