"""A model taken apart for compiled programs: its weights as a flat list, and its parts as functions of such lists.

Owns which weights a body takes and which a head. Knows nothing of steps, hosts or compilation.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxserve.batching.context import StepContext
from jaxserve.models import Decoder, ModelConfig, named_leaves
from jaxserve.models.layers import Fused, SwiGLU
from jaxserve.models.row_tiles import MapRows, whole
from jaxserve.models.shards import ModelShards, ShardedModel
from jaxserve.models.stages import stage_of
from jaxserve.parallel.shard import ALONE, Shard
from kernels.backends import ATTENTION, FUSED_MATMUL, ROTARY_WRITE
from kernels.fused_matmul import fused_matmul
from kernels.kv_cache import write_kv
from kernels.ragged_paged_attention import ragged_paged_attention
from kernels.rotary_write import rotary_write

HEAD_PATHS = ("final_norm/", "lm_head/")  # what the head reads of the model, beside a tied embedding


def weights_dtype(model: Decoder | ShardedModel) -> Any:
    """Of a model's weights and activations."""
    model = model.module if isinstance(model, ShardedModel) else model
    return jax.tree.leaves(nnx.state(model))[0].dtype


def _device_bytes(x: jax.ShapeDtypeStruct) -> int:
    """That one device holds of it."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


@dataclass(frozen=True)
class LayerKernels:
    """Backends of a layer's kernels beside its attention. moe: of kernels.grouped_matmul; "auto" where there are no experts.
    rotary: of kernels.rotary_write, beside an attention of ours. matmul: of kernels.fused_matmul. fuse_residuals: whether that also
    adds to the residual stream, where it is a kernel of ours: a matter of bits."""

    moe: str = "auto"
    rotary: str = "xla"
    matmul: str = "xla"
    fuse_residuals: bool = False

    @property
    def fused(self) -> Fused | None:
        """For a layer."""
        row = FUSED_MATMUL[self.matmul]
        if row.plain_xla:
            return None
        residuals = self.fuse_residuals or row.adds_residuals
        return Fused(functools.partial(fused_matmul, backend=self.matmul), residuals, row.any_layout)

    def fused_of(self, num_rows: jax.Array, map_rows: MapRows) -> Fused | None:
        """The same for rows of which those from num_rows on are padding. Tiles have rows of their own; so have groups of devices,
        which are counted one by one (i32[groups])."""
        fused = self.fused
        return fused if fused is None or map_rows is not whole or num_rows.ndim else fused.of_rows(num_rows)


class ModelFunctions:
    """A Flax module taken apart once: its weights as a flat list, and what runs with such lists.

    `nnx.jit` and graph definitions as arguments cost 0.5 to 11 ms of host time a call; a flat list into a plain jit costs 0.1.

    Of a `ShardedModel` the functions are one device's, to be traced inside `shard_map`; the weights are those of all devices.
    """

    def __init__(self, model: Decoder | ShardedModel, kernels: LayerKernels | None = None, map_rows: MapRows = whole):
        self.shards: ModelShards | None = model.shards if isinstance(model, ShardedModel) else None
        self.shard: Shard = ALONE if self.shards is None else self.shards.shard
        self.kernels: LayerKernels = kernels or LayerKernels()
        self.map_rows = map_rows  # how rows are computed
        module = model.module if isinstance(model, ShardedModel) else model
        graphdef, state = nnx.split(module)
        self.graphdef: nnx.GraphDef[Decoder] = graphdef
        weights, treedef = jax.tree.flatten(state)
        self.treedef: Any = treedef
        self.paths: list[str] = list(named_leaves(module))
        self.weights: list[Any] = weights
        if isinstance(model, ShardedModel):
            self.weights = [model.weights[path] for path in self.paths]
        self.model_config: ModelConfig = model.config
        self.dtype: Any = weights_dtype(model)
        self.plain: list[jax.ShapeDtypeStruct] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights]  # as one device's
        self.abstract: list[jax.ShapeDtypeStruct] = self.plain  # as programs take them
        if self.shards is not None:
            form = {"dtype": self.dtype, "transposed": module.is_transposed}
            plain, cut = self.shards.plain(**form), self.shards.abstract(**form)
            self.plain, self.abstract = [plain[path] for path in self.paths], [cut[path] for path in self.paths]
        tied = module.lm_head is None
        head = HEAD_PATHS + (("embed_tokens/",) if tied else ())
        self.head_indices: list[int] = [i for i, p in enumerate(self.paths) if p.startswith(head)]
        self.body_indices: list[int] = [i for i, p in enumerate(self.paths) if not p.startswith(HEAD_PATHS)]
        self.layers: range = range(self.model_config.num_layers)  # that are run
        self.is_first: bool = True  # whether it begins with the embedding
        self.is_last: bool = True  # whether it has the hidden rows that heads take
        self.draft: Any = None  # what drafts for this model, as draft_functions.TakenApart
        self.mesh: Mesh | None = None if self.shards is None else self.shards.meshes[0]
        self._layer_functions: dict[Any, Callable] = {}

    @property
    def by_path(self) -> dict[str, jax.ShapeDtypeStruct]:
        """{path: weight} as programs take them, abstract."""
        return dict(zip(self.paths, self.abstract, strict=True))

    @property
    def num_bytes(self) -> int:
        """Of the weights that are run, on one device."""
        return sum(_device_bytes(self.abstract[i]) for i in {*self.body_indices, *self.head_indices})

    @property
    def stages(self) -> list[ModelFunctions]:
        """The functions of each stage of a pipeline: of its own layers and weights, which stay in one list. Of one stage: self."""
        if self.shards is None or len(self.shards.meshes) == 1:
            return [self]
        return [self._stage(i, self.shards) for i in range(len(self.shards.meshes))]

    def _stage(self, number: int, shards: ModelShards) -> ModelFunctions:
        stage = copy.copy(self)
        stage._layer_functions = {}
        stage.layers, stage.mesh = shards.layers[number], shards.meshes[number]
        stage.is_first, stage.is_last = number == 0, number == len(shards.meshes) - 1
        stage.body_indices = [i for i in self.body_indices if stage_of(self.paths[i], shards.layers) == number]
        stage.head_indices = self.head_indices if stage.is_last else []
        stage.abstract = list(self.abstract)
        for i in stage.head_indices:  # a tied embedding's copy too
            leaf = self.abstract[i]
            sharding = NamedSharding(stage.mesh, leaf.sharding.spec)
            stage.abstract[i] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return stage

    def module(self, indices: Sequence[int], weights: Sequence[jax.Array]) -> Any:
        """The module with these weights in place; the others are abstract and must not be used."""
        full: list[Any] = list(self.abstract)
        for i, weight in zip(indices, weights, strict=True):
            full[i] = weight
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, full))

    def layer_rows(self, attention: str, *, sparse: bool) -> MapRows:
        """How a layer computes rows: as they are where each of its kernels gives a row bits of its own. attention: the backend."""
        exact = ATTENTION[attention].row_exact and ROTARY_WRITE[self.kernels.rotary].row_exact and not sparse
        return whole if exact and self.is_row_exact else self.map_rows

    @property
    def is_row_exact(self) -> bool:
        """Whether matmuls, the head's too, give a row bits that depend on it alone."""
        return FUSED_MATMUL[self.kernels.matmul].row_exact and self.shards is None

    def layer(self, layer: Any, x: jax.Array, rope: Any, kv: jax.Array, context: StepContext) -> tuple[jax.Array, jax.Array]:
        """One decoder layer over paged KV, as a call of an inner jit: layers of one structure are traced and lowered once."""
        graphdef, state = nnx.split(layer)
        weights, treedef = jax.tree.flatten(state)
        kernels = self.kernels
        if graphdef not in self._layer_functions:

            def run_layer(weights, x, rope, kv, context):
                layer = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
                attend = functools.partial(attend_paged, layer.sliding_window, kv, context)
                heads = functools.partial(_attend_heads, kernels.rotary, layer.sliding_window, kv, context)
                map_rows = self.layer_rows(context.backend, sparse=not isinstance(layer.mlp, SwiGLU))
                return layer(
                    x,
                    rope,
                    attend,
                    num_tokens=context.num_tokens,
                    moe_backend=kernels.moe,
                    map_rows=map_rows,
                    shard=self.shard,
                    fused=kernels.fused_of(context.num_tokens, map_rows),
                    attend_heads=None if kernels.rotary == "xla" or ATTENTION[context.backend].plain_xla else heads,
                )

            self._layer_functions[graphdef] = jax.jit(run_layer)
        return self._layer_functions[graphdef](weights, x, rope, kv, context)


def attend_paged(
    sliding_window: int | None, kv: jax.Array, context: StepContext, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes this step's keys and values, then attends over the pages."""
    return _attend_pages(sliding_window, write_kv(kv, k, v, context.slot_mapping), context, q)


def _attend_heads(
    backend: str, sliding_window: int | None, kv: jax.Array, context: StepContext, qkv: jax.Array, rope: Any, norms: Any
) -> tuple[jax.Array, jax.Array]:
    """The same from heads as they are projected. backend: of kernels.rotary_write."""
    q_scale, k_scale, eps = norms or (None, None, 0.0)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "eps": eps}
    cos, sin = rope
    q, kv = rotary_write(qkv, kv, cos, sin, context.slot_mapping, **scales, backend=backend)
    return _attend_pages(sliding_window, kv, context, q)


def _attend_pages(sliding_window: int | None, kv: jax.Array, context: StepContext, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    o = ragged_paged_attention(
        q,
        kv,
        context.page_table,
        context.cu_q_lens,
        context.kv_lens,
        sliding_window=sliding_window,
        max_q_len=context.max_q_len,
        backend=context.backend,
        work=context.work[str(sliding_window)] if isinstance(context.work, dict) else context.work,
    )
    return o, kv
