"""A draft model: a smaller decoder of the target's vocabulary, which runs ahead of it (Leviathan et al., 2211.17192; Chen et al.,
2302.01318).

Owns how it keeps up with the target, in every body, and how it goes on from there, in every head. KV of refused drafts is
overwritten when other tokens come to their positions, as in the target's own pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.batching.context import StepContext
from jaxserve.execution.draft_functions import WithPages, blank, choose, in_turn, new_pages, spread
from jaxserve.execution.draft_pages import DraftPages, LastRows
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.speculative.proposer import Ran, Seen


@dataclass(frozen=True, eq=False)
class DraftModel(WithPages):
    """Proposes what a decoder of its own says.

    draws: whether drafts are drawn with random numbers of their own, for rejection sampling. Otherwise each is what the target
    would sample there if it had the draft's logits, its random number included, so that alike models say alike.
    """

    functions: ModelFunctions  # of the draft
    pages: DraftPages
    draws: bool

    def init_state(self) -> list[jax.Array]:  # a layer: [total pages, 2, K, page_size, H]
        return new_pages(self.functions, self.pages)

    def read_body(self, weights: list[jax.Array], state: list[jax.Array], ran: Ran) -> list[jax.Array]:
        _, kv_pages = self._run(weights, state, ran.tokens, self.pages.of_body(ran.context, ran.work))
        return kv_pages

    def skip_body(self, state: list[jax.Array], seq_rows: jax.Array, context: StepContext) -> list[jax.Array]:
        slots = self.pages.slots_of_body(context)
        return [blank(kv, slots) for kv in state]

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
        kv_pages, table = self.pages.branch(state, seen.page_table, last.seq_rows, last.positions)
        work = self.pages.plan_drafts(table, last.is_real, last.positions)
        fused = self.functions.kernels.fused_of(last.num_real, self.functions.map_rows)

        def draft(carry: tuple[Any, jax.Array], j: jax.Array) -> tuple[tuple[Any, jax.Array], Any]:
            kv_pages, tokens = carry
            positions = jnp.where(last.is_real, last.positions + j, 0)
            hidden, kv_pages = self._run(weights, kv_pages, tokens, self.pages.of_drafts(table, last.is_real, positions, work))
            logits = self.functions.module(range(len(weights)), weights).normed_logits(hidden, fused)
            tokens, probs = choose(logits, replace(last.sampling, position=positions + 1), self.draws)
            return (kv_pages, tokens), (tokens, probs)

        num_layers = self.functions.model_config.num_layers
        (kv_pages, _), (drafts, probs) = in_turn(draft, (kv_pages, last.tokens), self.num_drafts, num_layers)
        return kv_pages, *spread(last, drafts, probs, len(seen.seq_rows))
