"""Where the tokens of a step stand: what a body unpacks of its upload for its layers, and for proposers that read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepContext:
    """What the layers of one step share. Where devices attend in groups, what attention takes is of the tokens and sequences of
    this device's group."""

    positions: jax.Array  # i32[T]
    slot_mapping: jax.Array  # i32[T]
    page_table: jax.Array  # i32[S, P]
    cu_q_lens: jax.Array  # i32[S+1]
    kv_lens: jax.Array  # i32[S]
    num_tokens: jax.Array  # i32[]; where devices attend in groups i32[groups], of each
    work: Any  # the attention backend's plan: one for all layers, or {str(sliding window): one for its layers}
    max_q_len: int = field(metadata={"static": True})
    backend: str = field(metadata={"static": True})
