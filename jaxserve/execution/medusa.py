"""Medusa heads as a proposer: one pass over the hidden rows that a step's logits were made of, with no KV and in one go."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxserve.execution.draft_functions import HeadFunctions, WithWeights, choose, spread
from jaxserve.execution.draft_pages import LastRows
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.models.medusa import MedusaHeads
from jaxserve.speculative.proposer import Seen

FINAL_NORM = "final_norm/scale"


@dataclass(frozen=True, eq=False)
class Medusa(WithWeights):
    """Proposes what Medusa heads say, the first `num_drafts` of them. draws: as DraftModel's; each draft is then drawn apart from
    those before it."""

    functions: HeadFunctions[MedusaHeads]
    target: ModelFunctions
    num_drafts: int
    draws: bool
    page_bytes = 0

    @property
    def shared(self) -> list[int]:
        """The target's weights that it takes: the final norm."""
        return [self.target.paths.index(FINAL_NORM)]

    def init_state(self) -> tuple[()]:
        return ()

    def propose(self, weights: list[jax.Array], state: tuple[()], seen: Seen) -> tuple[tuple[()], jax.Array, jax.Array | None]:
        n, last = len(self.weights), LastRows.of(seen)
        heads, V = self.functions.module(weights[:n]), self.target.model_config.vocab_size
        ids = None if heads.draft_ids is None else heads.draft_ids[...]
        fused = self.functions.fused_of(last.num_real)
        drafts, probs = [], []
        with jax.named_scope("medusa"):
            x = self.target.module(self.shared, weights[n:]).final_norm(seen.hidden[last.order])
            for j in range(self.num_drafts):
                rows = replace(last.sampling, position=last.positions + 1 + j)
                tokens, drawn_from = choose(heads.logits(j, x, fused), rows, self.draws, ids, V)
                drafts.append(tokens)
                probs.append(drawn_from)
        return state, *spread(last, jnp.stack(drafts), jnp.stack(probs) if self.draws else None, len(seen.seq_rows))
