"""A draft model: a smaller decoder of the target's vocabulary, which runs ahead of it (Leviathan et al., 2211.17192; Chen et al.,
2302.01318).

Owns how it keeps up with the target, in every body, and how it goes on from there, in every head. KV of refused drafts is
overwritten when other tokens come to their positions, as in the target's own pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batching.context import StepContext
from jaxserve.execution.draft_pages import DraftPages, LastRows
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.models import ModelConfig
from jaxserve.sampling import sampler
from jaxserve.sampling.sampler import SamplingRows
from jaxserve.speculative.proposer import DRAFT_STREAM, NO_DRAFT, Ran, Seen


class TakenApart(Protocol):
    """What drafts, as far as its pages go: a ModelFunctions, or an EagleFunctions."""

    model_config: ModelConfig
    dtype: Any


@dataclass(frozen=True, eq=False)
class DraftModel:
    """Proposes what a decoder of its own says.

    draws: whether drafts are drawn with random numbers of their own, for rejection sampling. Otherwise each is what the target
    would sample there if it had the draft's logits, its random number included, so that alike models say alike.
    """

    functions: ModelFunctions  # of the draft
    pages: DraftPages
    draws: bool

    @property
    def num_drafts(self) -> int:
        return self.pages.num_drafts

    @property
    def weights(self) -> list[Any]:
        return self.functions.weights

    @property
    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        return self.functions.abstract

    @property
    def shared(self) -> tuple[()]:
        return ()

    @property
    def hidden_layers(self) -> tuple[()]:
        return ()

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers."""
        return kv_bytes(self.functions, 1, self.pages.page_size)

    def init_state(self) -> list[jax.Array]:  # a layer: [total pages, 2, K, page_size, H]
        return new_pages(self.functions, self.pages)

    def read_body(self, weights: list[jax.Array], state: list[jax.Array], ran: Ran) -> list[jax.Array]:
        _, kv_pages = self._run(weights, state, ran.tokens, self.pages.of_body(ran.context))
        return kv_pages

    def _run(
        self, weights: list[jax.Array], kv_pages: list[jax.Array], tokens: jax.Array, context: StepContext
    ) -> tuple[jax.Array, list[jax.Array]]:
        """([T, D]: the last hidden states, the pages with the tokens' keys and values)."""
        functions = self.functions
        model = functions.module(range(len(weights)), weights)
        x, rope, written = model.embed(tokens), model.rope(context.positions), []
        for layer, kv in zip(model.layers, kv_pages, strict=True):
            x, kv = functions.layer(layer, x, rope, kv, context)
            written.append(kv)
        return x, written

    def propose(
        self, weights: list[jax.Array], state: list[jax.Array], seen: Seen
    ) -> tuple[list[jax.Array], jax.Array, jax.Array | None]:
        last = LastRows.of(seen)
        is_real = last.seq_rows < len(seen.history)
        kv_pages, table = self.pages.branch(state, seen.page_table, last.seq_rows, last.positions)

        def draft(carry: tuple[Any, jax.Array], j: jax.Array) -> tuple[tuple[Any, jax.Array], Any]:
            kv_pages, tokens = carry
            positions = jnp.where(is_real, last.positions + j, 0)
            hidden, kv_pages = self._run(weights, kv_pages, tokens, self.pages.of_drafts(table, is_real, positions))
            logits = self.functions.module(range(len(weights)), weights).normed_logits(hidden, self.functions.kernels.fused)
            tokens, probs = choose(logits, replace(last.sampling, position=positions + 1), self.draws)
            return (kv_pages, tokens), (tokens, probs)

        (kv_pages, _), (drafts, probs) = lax.scan(draft, (kv_pages, last.tokens), jnp.arange(self.num_drafts, dtype=jnp.int32))
        return kv_pages, *spread(last, drafts, probs, len(seen.seq_rows))


def choose(logits: jax.Array, rows: SamplingRows, draws: bool) -> tuple[jax.Array, jax.Array | None]:  # f32[B, V] -> i32[B]
    """A draft of each row, and what it was drawn from, f32[B, V], where drafts are drawn."""
    if draws:
        return sampler.draw_with_probs(logits, rows, DRAFT_STREAM)
    return sampler.sample(logits, rows).tokens, None


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
    """Of so many pages in all layers of a model."""
    config = functions.model_config
    return (
        config.num_layers * num_pages * 2 * config.num_kv_heads * page_size * config.head_dim * jnp.dtype(functions.dtype).itemsize
    )


def new_pages(functions: TakenApart, pages: DraftPages) -> list[jax.Array]:
    """Pages of zeros, an array a layer."""
    config = functions.model_config
    shape = pages.total, 2, config.num_kv_heads, pages.page_size, config.head_dim
    return [jnp.zeros(shape, functions.dtype) for _ in range(config.num_layers)]
