"""A model over the devices of a mesh, or of several: what one device computes with, and how each weight is cut.

Owns the numbers behind models/shard_rules.py. A query head lies beside the key and value head that it reads. Where there are more
devices than KV heads, these are repeated; where sizes do not divide, there are heads, experts and entries of the vocabulary made
of zeros, which add nothing. Knows nothing of engines or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from checkpoints.weights import Cut
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder, named_leaves, transpose_kernels
from jaxserve.models.shard_rules import Rule, rule_of
from jaxserve.models.stages import stage_layers, stage_of
from jaxserve.parallel.layout import Layout
from jaxserve.parallel.mesh import AXIS
from jaxserve.parallel.shard import ALONE, Shard

VOCAB_BLOCK = 128  # a device's part of the vocabulary is a multiple of it, as sampling takes the vocabulary in such blocks


@dataclass(frozen=True)
class HeadPlaces:
    """Which heads each device has, -1 for one of zeros: device i the i-th part of each array."""

    queries: np.ndarray  # i64[query heads of all devices]; of equally many for each place of kv, in its order
    kv: np.ndarray  # i64[KV heads of all devices]


def place_heads(num_heads: int, num_kv_heads: int, num_devices: int) -> HeadPlaces:
    """Whole groups of heads on each device while there are KV heads for all; else each KV head as often as it takes, its query
    heads shared out over its copies."""
    N, K, n = num_heads, num_kv_heads, num_devices
    copies = 1 if K >= n else math.lcm(K, n) // K
    kv = np.repeat(np.arange(K), copies)
    kv = np.concatenate([kv, np.full(-len(kv) % n, -1)])
    group = N // K
    share = -(-group // copies)
    queries = np.full((len(kv), share), -1)
    for k in range(K):
        heads = np.full(copies * share, -1)
        heads[:group] = np.arange(k * group, (k + 1) * group)
        queries[kv == k] = heads.reshape(copies, share)
    return HeadPlaces(queries.reshape(-1), kv)


def _entries(heads: np.ndarray, size: int, first: int = 0) -> np.ndarray:
    """Of [..., heads]: the entries of each head, `size` of them; the first head's begin at `first`."""
    entries = first + heads[..., None] * size + np.arange(size)
    return np.where(heads[..., None] < 0, -1, entries).reshape(*heads.shape[:-1], -1)


def local_config(config: ModelConfig, num_devices: int, attention_groups: int = 1) -> ModelConfig:
    """What one device computes with: its heads, its columns of the MLP, its part of the vocabulary. The experts are those of the
    router, all of them; their weights are a device's own. attention_groups: each has all heads, cut over its devices.

    Raises:
      ValueError: what must divide does not: intermediate_size where layers are dense.
    """
    F, n = config.intermediate_size, num_devices
    if n == 1:
        return config
    if F % n and len(config.sparse_layers) < config.num_layers:
        raise ValueError(f"tensor_parallel_size={n} must divide the model's intermediate_size={F}")
    attending = n // attention_groups
    heads = place_heads(config.num_heads, config.num_kv_heads, attending)
    return replace(
        config,
        num_heads=len(heads.queries) // attending,
        num_kv_heads=len(heads.kv) // attending,
        intermediate_size=F // n,
        vocab_size=-(-config.vocab_size // (VOCAB_BLOCK * n)) * VOCAB_BLOCK,
    )


class ModelShards:
    """How a model lies on a mesh, or on one for each stage of a pipeline.

    all_reduce: the backend of sums over a mesh. whole_sums, groups: as `Shard`'s; each group has a copy of the attention's weights,
    cut over its devices. later: the meshes of the stages behind the first, as large as `mesh`. Each stage's weights are cut over
    its own.

    Raises ValueError as `local_config` and `stage_layers`.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        all_reduce: str = "xla",
        *,
        whole_sums: bool = False,
        groups: int = 1,
        later: Sequence[Mesh] = (),
    ):
        self.config: ModelConfig = config
        self.meshes: tuple[Mesh, ...] = (mesh, *later)
        self.layers: tuple[range, ...] = stage_layers(config.num_layers, len(self.meshes))  # of each stage
        self.size: int = mesh.size  # of a stage
        self.shard: Shard = ALONE if mesh.size == 1 else Shard(AXIS, mesh.size, all_reduce, whole_sums, groups)
        self.local: ModelConfig = local_config(config, mesh.size, groups)  # what one device computes with
        heads = place_heads(config.num_heads, config.num_kv_heads, mesh.size // groups)
        self._heads = HeadPlaces(np.tile(heads.queries, groups), np.tile(heads.kv, groups))

    @property
    def num_devices(self) -> int:
        """Of all stages."""
        return self.size * len(self.meshes)

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary on all devices, those of zeros included."""
        return self.local.vocab_size * self.size

    def rule(self, path: str, num_axes: int) -> Rule:
        """Of models/shard_rules.py."""
        return rule_of(path, num_axes, whole_sums=self.shard.whole_sums)

    def layout(self, path: str, num_axes: int) -> Layout:
        """How the weight `path` is cut."""
        rule = self.rule(path, num_axes)
        if rule == "replicated" or self.size == 1:
            return Layout()
        if rule == "experts":
            return Layout(0, self._padded(self.config.num_experts))
        turned = path.endswith(("/weight", "/embedding"))
        columns = num_axes - 1 if not turned else 0
        rows = 0 if not turned else 1
        places: dict[str, tuple[int, Callable[[], np.ndarray]]] = {
            "qkv": (columns, self._qkv_columns),
            "gate_up": (columns, self._gate_up_columns),
            "row": (rows, self._attention_rows if "/attention/" in path else lambda: np.arange(self.config.intermediate_size)),
            "output": (columns, lambda: self._padded(self.config.hidden_size)),
            "vocab": (columns, self._vocabulary),
        }
        axis, make = places[rule]
        return Layout(axis, make())

    def kv_heads(self, axis: int, *, of_group: bool = False) -> Layout:
        """How KV is cut whose heads lie along `axis`: over all devices, on which each group has all heads, or over one group's."""
        places = self._heads.kv
        if of_group:
            places = places[: len(places) // self.shard.groups]
        return Layout() if self.size == 1 else Layout(axis, places)

    def cut(self, path: str, num_axes: int, stacked: bool) -> Cut | None:
        """The layout as a checkpoint's loader takes it, None for what every device has. stacked: all experts are in one tensor."""
        layout = self.layout(path, num_axes)
        if layout.axis is None:
            return None
        rule = self.rule(path, num_axes)
        stored = 1 if rule == "row" else 0  # of [out, in], or of [V, D]
        return Cut(layout.axis, layout.places, None if rule == "experts" and not stacked else stored)

    def _qkv_columns(self) -> np.ndarray:
        N, K, H = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        queries, kv = self._heads.queries.reshape(self.size, -1), self._heads.kv.reshape(self.size, -1)
        parts = [_entries(queries, H), _entries(kv, H, N * H), _entries(kv, H, (N + K) * H)]
        return np.concatenate(parts, axis=1).reshape(-1)

    def _gate_up_columns(self) -> np.ndarray:
        gate = np.arange(self.config.intermediate_size).reshape(self.size, -1)
        return np.concatenate([gate, gate + self.config.intermediate_size], axis=1).reshape(-1)

    def _attention_rows(self) -> np.ndarray:
        return _entries(self._heads.queries, self.config.head_dim)

    def _vocabulary(self) -> np.ndarray:
        ids = np.arange(self.vocab_size)
        return np.where(ids < self.config.vocab_size, ids, -1)

    def _padded(self, count: int) -> np.ndarray:
        return np.concatenate([np.arange(count), np.full(-count % self.size, -1)])

    def mesh_of(self, path: str) -> Mesh:
        """The devices that hold the weight `path`."""
        return self.meshes[stage_of(path, self.layers)]

    def sharding(self, path: str, layout: Layout) -> NamedSharding:
        """Of the weight `path`, cut."""
        return NamedSharding(self.mesh_of(path), layout.spec)

    def module(self, dtype: Any, *, transposed: bool) -> Decoder:
        """The decoder that one device runs, abstract."""
        module = Decoder.abstract(self.local, dtype)
        if self.shard.whole_sums:
            queries = self._heads.queries
            for layer in module.layers:
                layer.attention.group_size = self.config.num_heads // self.config.num_kv_heads
                layer.attention.query_places = tuple(np.argsort(queries, stable=True)[(queries < 0).sum() :].tolist())
        return transpose_kernels(module) if transposed else module

    def plain(self, dtype: Any, *, transposed: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """{path: shape and dtype} of the whole model's weights, as one device would hold them."""
        module = Decoder.abstract(self.config, dtype)
        return named_leaves(transpose_kernels(module) if transposed else module)

    def spread(self, plain: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """The uncut weights with a sharding each: in equal parts along the axis that is cut, or whole where that has none."""
        found = {}
        for path, leaf in plain.items():
            axis = self.layout(path, len(leaf.shape)).axis
            even = Layout(axis) if axis is not None and leaf.shape[axis] % self.size == 0 else Layout()
            found[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding(path, even))
        return found

    def abstract(self, dtype: Any, *, transposed: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """{path: shape, dtype and sharding} of the cut weights, those of all devices together."""
        cut = {}
        for path, leaf in self.plain(dtype, transposed=transposed).items():
            layout = self.layout(path, len(leaf.shape))
            cut[path] = jax.ShapeDtypeStruct(layout.shape(leaf.shape), leaf.dtype, sharding=self.sharding(path, layout))
        return cut


@dataclass(frozen=True)
class ShardedModel:
    """A decoder whose weights lie on the devices of a mesh."""

    shards: ModelShards
    module: Decoder  # one device's, abstract
    weights: Mapping[str, Any]  # {path: cut array}, or its shape, dtype and sharding

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return self.shards.config
