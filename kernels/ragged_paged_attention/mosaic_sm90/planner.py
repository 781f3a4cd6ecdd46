"""The planner of one compiled shape for the Hopper kernel, and the WorkList that its programs read."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from kernels import gpu
from kernels.ragged_paged_attention.mosaic_sm90.tiles import Tiles, choose_tiles
from kernels.ragged_paged_attention.work_planner import WorkPlanner


class Planner(WorkPlanner):
    """The planner of one compiled shape for the Hopper kernel."""

    tiles: Tiles

    @classmethod
    def make(
        cls,
        *,
        max_q_len: int,
        num_query_heads: int,  # N
        num_kv_heads: int,  # K
        head_dim: int,  # H
        num_ctas: int | None = None,
        tiles: Tiles | None = None,
        **sizes: Any,
    ) -> Planner:
        """Arguments as `WorkPlanner.make`. num_ctas: None is one for each SM of the device. tiles: None chooses them for it.

        Raises ValueError for tiles that need more shared memory than there is.
        """
        if tiles is None:
            group = num_query_heads // num_kv_heads
            tiles = choose_tiles(head_dim=head_dim, group=group, max_q_len=max_q_len, device_kind=gpu.device_kind())
        return super().make(
            max_q_len=max_q_len,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_ctas=gpu.num_sms() if num_ctas is None else num_ctas,
            tiles=tiles,
            **sizes,
        )

    def check_smem(self, head_dim: int) -> None:
        self.tiles.check_smem(head_dim)

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
