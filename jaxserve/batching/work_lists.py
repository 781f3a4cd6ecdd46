"""Attention's work lists from step to step.

Owns when a list is planned anew. A list may be planned for more KV than there is: the kernel clips it by the device's own
lengths, and where sequences are cut changes no bit (kernels.ragged_paged_attention.work_list). So steps of decodes are planned some
tokens ahead, and as long as the batch stays as it is their list is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.batching.layout import StepLayout
from jaxserve.buckets.plan import Bucket
from jaxserve.scheduling.schedule import Schedule

# Tokens. A list then serves 17 steps of decodes (fewer with drafts), so that a plan costs little; each sequence is taken for at
# most so much longer than it is, and one that ends so shortly before a chunk's end may be given an item of no KV.
AHEAD = 16


@dataclass(frozen=True)
class _Planned:
    """What lists were planned for."""

    q_lens: np.ndarray  # i32[n]
    kv_lens: np.ndarray  # i32[n]; upper bounds
    least_kv_lens: np.ndarray  # i32[n]; lower bounds
    lists: dict[str, np.ndarray]  # the layout's field -> i32[its planner's size]

    def serves(self, q_lens: np.ndarray, kv_lens: np.ndarray, least_kv_lens: np.ndarray) -> bool:
        """Whether these lengths are within the bounds. None is far below its upper one then, or the load would be uneven: the two
        bounds lie AHEAD tokens, and the drafts in flight, apart."""
        if len(q_lens) != len(self.q_lens):
            return False
        within = (kv_lens <= self.kv_lens).all() and (least_kv_lens >= self.least_kv_lens).all()
        return bool(within and (q_lens == self.q_lens).all())


class WorkLists:
    """The work lists of one packer's steps, of every bucket (and group of devices) the last one planned."""

    def __init__(self):
        self._planned: dict[tuple[Bucket, int], _Planned] = {}
        self.num_planned: int = 0  # times that lists were planned and not copied

    def fill(
        self,
        layout: StepLayout,
        view: dict[str, np.ndarray],
        schedule: Schedule,
        groups: np.ndarray | None = None,  # intp[n]: of each entry
    ) -> None:
        """Writes the lists of a schedule into the fields of its packed array (`view`), which are zeros so far; of devices that
        attend in groups, a list for each."""
        q_lens = schedule.q_lens
        kv_lens, least = schedule.starts + q_lens, schedule.least_starts + q_lens
        ahead = schedule.num_decodes == schedule.num_seqs
        if groups is None:
            self._fill((layout.bucket, 0), layout, view, (q_lens, kv_lens, least), ahead=ahead)
            return
        for group in range(layout.num_groups):
            own, part = groups == group, {name: view[name][group] for name in layout.lists}
            lens = q_lens[own], kv_lens[own], least[own]
            if own.any():  # a list of zeros has no work
                self._fill((layout.bucket, group), layout, part, lens, ahead=ahead)

    def _fill(
        self,
        key: tuple[Bucket, int],
        layout: StepLayout,
        view: dict[str, np.ndarray],
        lens: tuple[np.ndarray, np.ndarray, np.ndarray],  # of queries, of KV at most and at least, i32[n] each
        *,
        ahead: bool,
    ) -> None:
        q_lens, kv_lens, least = lens
        planned = self._planned.get(key) if ahead else None
        if planned is not None and planned.serves(q_lens, kv_lens, least):
            for name, made in planned.lists.items():
                view[name][:] = made
            return
        self.num_planned += 1
        if ahead:
            longest = min(planner.shape.max_kv_len for planner in layout.lists.values())
            kv_lens = np.minimum(kv_lens + AHEAD, longest)
        for name, planner in layout.lists.items():
            planner.plan(q_lens, kv_lens, least_kv_lens=least, out=view[name])
        if ahead:
            lists = {name: view[name].copy() for name in layout.lists}
            self._planned[key] = _Planned(q_lens.copy(), kv_lens, least, lists)
