"""What models and heads that draft have in common: weights of their own, and the ends of a draft.

Owns a head taken apart for programs, the sizes of the pages of one that attends, and how a draft is chosen from logits and given to
the rows that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.execution.draft_pages import DraftPages, LastRows
from jaxserve.models import ModelConfig
from jaxserve.models.layers import Fused
from jaxserve.sampling import sampler
from jaxserve.sampling.sampler import SamplingRows
from jaxserve.speculative.proposer import DRAFT_STREAM, NO_DRAFT
from kernels.backends import current_platform
from kernels.kv_cache import write_kv

UNROLLED_LAYERS = 128  # of all drafts of a loop's turn: a layer more takes 0.5 to 1 s of a processor to compile


class TakenApart(Protocol):
    """What drafts, as a flat list of weights: a ModelFunctions, or the HeadFunctions of a head."""

    model_config: Any  # ModelConfig: what its attention is; None: it has none
    weights: list[Any]
    abstract: list[jax.ShapeDtypeStruct]
    dtype: Any

    @property
    def num_bytes(self) -> int: ...


class HeadFunctions[Head: nnx.Module]:
    """A head of a target taken apart: its weights as a flat list, and the module with such a list in it. config: the head's own.
    model_config: of the layer in which it attends, None if it does not. fused: what computes its matmuls; None: XLA."""

    def __init__(self, head: Head, config: Any, model_config: ModelConfig | None, fused: Fused | None = None):
        graphdef, state = nnx.split(head)
        weights, treedef = jax.tree.flatten(state)
        self.graphdef: nnx.GraphDef[Head] = graphdef
        self.treedef: Any = treedef
        self.weights: list[Any] = weights
        self.abstract: list[jax.ShapeDtypeStruct] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights]
        self.config = config
        self._fused = fused
        self.model_config: ModelConfig | None = model_config
        self.dtype: Any = next(x.dtype for x in self.abstract if jnp.issubdtype(x.dtype, jnp.floating))

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(x.size * x.dtype.itemsize for x in self.abstract)

    def fused_of(self, num_rows: jax.Array) -> Fused | None:  # i32[]
        """What computes the matmuls of rows of which those from num_rows on are padding; None: XLA."""
        return None if self._fused is None else self._fused.of_rows(num_rows)

    def module(self, weights: list[jax.Array]) -> Head:
        """The head with these weights."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))


class WithWeights:
    """Of a proposer with weights of its own."""

    functions: Any  # TakenApart
    shared: Any = ()  # as Proposer's
    hidden_layers: Any = ()

    @property
    def weights(self) -> list[Any]:
        return self.functions.weights

    @property
    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        return self.functions.abstract


class WithPages(WithWeights):
    """Of one that attends."""

    pages: Any  # DraftPages

    @property
    def num_drafts(self) -> int:
        return self.pages.num_drafts

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers."""
        return kv_bytes(self.functions, 1, self.pages.page_size)


def in_turn(draft: Callable[..., Any], carry: Any, num_drafts: int, num_layers: int) -> tuple[Any, Any]:
    """lax.scan of `draft` over 0, 1, ... num_drafts - 1, each of which runs so many layers.

    On a GPU unrolled, as far as that is not too much to compile: then the drafts are commands of the head's own CUDA graph. XLA
    puts no `while` there unless it is told to, and no card has run ours so.
    """
    unroll = max(1, UNROLLED_LAYERS // num_layers) if current_platform() == "gpu" else 1
    return lax.scan(draft, carry, jnp.arange(num_drafts, dtype=jnp.int32), unroll=min(unroll, num_drafts))


def choose(
    logits: jax.Array, rows: SamplingRows, draws: bool, ids: jax.Array | None = None, vocab_size: int = 0
) -> tuple[jax.Array, jax.Array | None]:  # f32[B, n] -> i32[B], f32[B, V]
    """A draft of each row, and what it was drawn from where drafts are drawn.

    ids: i32[n], ascending: the tokens of the vocabulary that the logits are of; None: all. What is drawn is what would be if the
    others had logits of -inf: sums of weights run in the vocabulary's order, and of equal logits the lower id comes first.
    """
    if ids is not None:
        place = jnp.minimum(jnp.searchsorted(ids, rows.suppress_ids, method="scan_unrolled"), len(ids) - 1).astype(jnp.int32)
        rows = replace(rows, suppress_ids=jnp.where(ids[place] == rows.suppress_ids, place, -1))
    probs = None
    if draws:
        tokens, probs = sampler.draw_with_probs(logits, rows, DRAFT_STREAM)
    else:
        tokens = sampler.sample(logits, rows).tokens
    if ids is None:
        return tokens, probs
    if probs is not None:
        probs = jnp.zeros((len(probs), vocab_size), probs.dtype).at[:, ids].set(probs)
    return ids[tokens], probs


def spread(
    last: LastRows,
    drafts: jax.Array,  # i32[K, B]
    probs: jax.Array | None,  # f32[K, B, V]
    R: int,
) -> tuple[jax.Array, jax.Array | None]:  # i32[R, K], f32[R, K, V]
    """The drafts at the rows of the head that they belong to. What stands at rows that end no sequence is not used."""
    spread_drafts = jnp.full((R, len(drafts)), NO_DRAFT, jnp.int32).at[last.order].set(drafts.T)
    if probs is None:
        return spread_drafts, None
    probs = probs.swapaxes(0, 1)
    return spread_drafts, jnp.zeros((R, *probs.shape[1:]), probs.dtype).at[last.order].set(probs)


def kv_bytes(functions: TakenApart, num_pages: int, page_size: int) -> int:
    """Of so many pages in all layers; 0 of what does not attend."""
    config = functions.model_config
    if config is None:
        return 0
    return (
        config.num_layers * num_pages * 2 * config.num_kv_heads * page_size * config.head_dim * jnp.dtype(functions.dtype).itemsize
    )


def blank(kv: jax.Array, slots: jax.Array) -> jax.Array:  # [total, 2, K, page_size, H], i32[T]
    """Keys and values of zero at these slots: what is not known."""
    zeros = jnp.zeros((len(slots), kv.shape[2], kv.shape[4]), kv.dtype)
    return write_kv(kv, zeros, zeros, slots)


def new_pages(functions: TakenApart, pages: DraftPages) -> list[jax.Array]:
    """Pages of zeros, an array a layer."""
    config = functions.model_config
    shape = pages.total, 2, config.num_kv_heads, pages.page_size, config.head_dim
    return [jnp.zeros(shape, functions.dtype) for _ in range(config.num_layers)]
