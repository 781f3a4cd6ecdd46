"""The planner of one compiled shape: its work lists, for the tiles of a Mosaic kernel.

The host calls `WorkPlanner.plan` before a step; one list may serve several steps. Where only the device knows the lengths, the
program calls `WorkPlanner.plan_decodes`. A kernel's own planner chooses tiles and has `work`, which the compiled step calls.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self

import jax
import numpy as np

from kernels.ragged_paged_attention import decode_plan, work_list
from kernels.ragged_paged_attention.work_list import WorkShape


class PlannedTiles(Protocol):
    """What the work lists depend on of a kernel's tiles."""

    @property
    def chunk(self) -> int:
        """Positions between softmax restarts."""
        ...

    def tile_tokens(self, group: int, max_q_len: int) -> int:
        """Query tokens of a tile, for `group` query heads a KV head."""
        ...

    def consumer_tokens(self, group: int, max_q_len: int) -> int:
        """Query tokens of one consumer's rows."""
        ...


@dataclasses.dataclass(frozen=True)
class WorkPlanner:
    """The work lists of one compiled shape: `shape` says how large they are, `tiles` how the kernel runs them."""

    shape: WorkShape
    tiles: Any  # PlannedTiles, of the kernel's own class

    @classmethod
    def make(
        cls,
        *,
        num_tokens: int,  # T
        num_seqs: int,  # S
        max_q_len: int,
        num_query_heads: int,  # N
        num_kv_heads: int,  # K
        head_dim: int,  # H
        max_kv_len: int,  # P * page_size
        num_ctas: int,
        tiles: PlannedTiles,
        sliding_window: int | None = None,
        split_q_len: int = 1,
    ) -> Self:
        """The planner of q [T, N, H] and page_table [S, P].

        Args:
            num_ctas: thread blocks of the persistent kernel.
            split_q_len: most query tokens of a sequence whose KV may be split over CTAs: 1 + drafts.
        """
        G = num_query_heads // num_kv_heads
        shape = WorkShape(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            max_q_len=max_q_len,
            num_kv_heads=num_kv_heads,
            max_kv_len=max_kv_len,
            num_ctas=num_ctas,
            tile_tokens=tiles.tile_tokens(G, max_q_len),
            split_q_len=min(split_q_len, tiles.consumer_tokens(G, max_q_len)),
            chunk=tiles.chunk,
            sliding_window=sliding_window,
        )
        planner = cls(shape, tiles)
        planner.check_smem(head_dim)
        return planner

    def check_smem(self, head_dim: int) -> None:
        """ValueError if a CTA of these tiles needs more shared memory than the device has."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """int32s of a step's work list."""
        return self.shape.size

    def plan(self, q_lens: Any, kv_lens: Any, *, least_kv_lens: Any = None, out: np.ndarray | None = None) -> np.ndarray:
        """work_list.plan: on the host. i32[size]."""
        return work_list.plan(self.shape, q_lens, kv_lens, least_kv_lens=least_kv_lens, out=out)

    def plan_decodes(self, kv_lens: jax.Array, least_kv_lens: jax.Array | None = None) -> jax.Array:  # i32[S] -> i32[size]
        """decode_plan.plan_decodes: on the device, inside a program."""
        return decode_plan.plan_decodes(self.shape, kv_lens, least_kv_lens)
