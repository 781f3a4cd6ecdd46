"""What makes drafts: the one interface between a method of speculation and the step. Knows no method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

NO_DRAFT = -1  # a draft that is none: no sampled token equals it, so that it never stands


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What a head knows when it has sampled. R of its rows, one of which ends each sequence; the others' drafts are not used.

    hidden is what the row's logits were made of, the target's last hidden state before its final norm: what draft heads read.
    """

    seq_rows: jax.Array  # i32[R]: the sequence row of each; S for padding
    num_tokens: jax.Array  # i32[R]: the sequence's tokens, the one just sampled included
    history: jax.Array  # i32[S, L]: token ids of each sequence; past num_tokens anything
    hidden: jax.Array  # [R, D]


class Proposer(Protocol):
    """Proposes what follows the tokens that a head has just sampled. Traced inside the head, so that the next step can be
    dispatched before anything is fetched.

    It is enough for proposals that are point masses and follow from tokens or a row's last hidden state. What a draft model or
    draft heads will need beside it: to return the probabilities that its drafts were drawn with (rejection.draw_token takes them,
    but the head passes none yet), the sampling rows to draw with, and the hidden rows of prompts that its own KV is made of.
    """

    @property
    def num_drafts(self) -> int:
        """K: drafts that it proposes a sequence."""
        ...

    def init_state(self) -> Any:
        """What it keeps on the device, as a pytree of arrays: a draft model's weights and pages; () for nothing."""
        ...

    def propose(self, state: Any, seen: Seen) -> tuple[Any, jax.Array]:
        """(the state, which is donated; i32[R, K]: each row's drafts, the next token's first, NO_DRAFT where there is none)."""
        ...
