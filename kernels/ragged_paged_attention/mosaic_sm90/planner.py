"""A Planner of one compiled shape, and the WorkList that its programs read.

The host calls `Planner.plan` before a step; one list may serve several steps. The compiled step calls `Planner.work`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

from kernels import gpu
from kernels.ragged_paged_attention import work_list
from kernels.ragged_paged_attention.mosaic_sm90.tiles import Tiles, choose_tiles
from kernels.ragged_paged_attention.work_list import WorkShape


@dataclasses.dataclass(frozen=True)
class Planner:
    """The work lists of one compiled shape: `shape` says how large they are, `tiles` how the kernel runs them."""

    shape: WorkShape
    tiles: Tiles

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
        sliding_window: int | None = None,
        split_q_len: int = 1,
        num_ctas: int | None = None,
        tiles: Tiles | None = None,
    ) -> Planner:
        """The planner of q [T, N, H] and page_table [S, P].

        Args:
            split_q_len: most query tokens of a sequence whose KV may be split over CTAs: 1 + drafts.
            num_ctas: thread blocks of the persistent kernel; None is one for each SM of the device.
            tiles: None chooses them for the device.
        """
        G = num_query_heads // num_kv_heads
        if tiles is None:
            tiles = choose_tiles(head_dim=head_dim, group=G, max_q_len=max_q_len, device_kind=gpu.device_kind())
        shape = WorkShape(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            max_q_len=max_q_len,
            num_kv_heads=num_kv_heads,
            max_kv_len=max_kv_len,
            num_ctas=gpu.num_sms() if num_ctas is None else num_ctas,
            tile_tokens=tiles.tile_tokens(G, max_q_len),
            split_q_len=min(split_q_len, tiles.consumer_tokens(G, max_q_len)),
            chunk=tiles.chunk,
            sliding_window=sliding_window,
        )
        planner = cls(shape, tiles)
        planner.check_smem(head_dim)
        return planner

    def check_smem(self, head_dim: int) -> None:
        """ValueError if a CTA of these tiles needs more shared memory than there is."""
        self.tiles.check_smem(head_dim, splits=self.shape.num_slots > 0)

    @property
    def size(self) -> int:
        """int32s of a step's work list."""
        return self.shape.size

    def plan(self, q_lens: Any, kv_lens: Any, *, least_kv_lens: Any = None, out: np.ndarray | None = None) -> np.ndarray:
        """work_list.plan: on the host. i32[size]."""
        return work_list.plan(self.shape, q_lens, kv_lens, least_kv_lens=least_kv_lens, out=out)

    def work(self, packed: jax.Array) -> WorkList:
        """The work list that `plan` made, i32[size], for `ragged_paged_attention(work=...)`."""
        return WorkList(packed, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkList:
    """One step's work list on the device."""

    backend: ClassVar[str] = "mosaic_sm90"  # whose plan this is

    packed: jax.Array  # i32[planner.size]
    planner: Planner = dataclasses.field(metadata={"static": True})
