"""Where the tokens of a step stand: what a body unpacks of its upload for its layers, and for proposers that read them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "slot_mapping", "page_table", "cu_q_lens", "kv_lens", "work"],
    meta_fields=["max_q_len", "backend"],
)
@dataclass(frozen=True)
class StepContext:
    """What the layers of one step share."""

    positions: jax.Array  # i32[T]
    slot_mapping: jax.Array  # i32[T]
    page_table: jax.Array  # i32[S, P]
    cu_q_lens: jax.Array  # i32[S+1]
    kv_lens: jax.Array  # i32[S]
    work: Any  # the attention backend's plan: one for all layers, or {str(sliding window): one for its layers}
    max_q_len: int
    backend: str
