"""Schedule -> StepInputs: the one place where a step's host arrays are built.

A step uploads one int32 array. StepLayout says which slice of it holds what; pack() fills it (numpy, on the host), unpack()
takes it apart (inside the compiled step). What a row of the device-resident state already holds is not sent again: a decode's token
and position come from there, and of the page table only the entries that changed travel. Knows nothing of models or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.batching.work_lists import WorkLists
from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling.edit_rows import EditLayout, kinds_of

if TYPE_CHECKING:
    from jaxserve.request import Request
    from jaxserve.scheduling.schedule import Schedule

# A token id or start that the device knows: the row's last sampled token, the row's number of computed tokens. Below it, as a token
# id, the row's drafts: FROM_DEVICE - 1 is the first.
FROM_DEVICE = -1


@dataclass(frozen=True)
class StepLayout:
    """Where each field lies in the packed int32 array of one bucket.

    T tokens, S sequences, R = max_head_rows logits rows, U page-table updates. The first U that a step needs travel in the array,
    any further ones (long prefix hits) in update batches of their own before it. Padding: tokens 0, sequence rows max_num_seqs
    (past the state's end, so that writes drop), q_lens 0, page updates to row max_num_seqs, head rows to sequence row max_num_seqs.

    planners: by sliding window of the model's layers, what plans the step's attention on the host (a `Planner` of the kernels);
    none where the backend plans on the device.
    """

    bucket: Bucket
    max_num_seqs: int
    page_size: int
    max_head_rows: int
    planners: Mapping[int | None, Any] = field(default_factory=dict, hash=False)

    @cached_property
    def num_updates(self) -> int:
        """U: a step's own tokens touch at most this many new pages."""
        return self.bucket.seqs + self.bucket.tokens // self.page_size

    @cached_property
    def fields(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """name -> (where it lies, shape), in order."""
        T, S, R = self.bucket.tokens, self.bucket.seqs, self.max_head_rows
        shapes = {
            "token_ids": (T,),
            "seq_rows": (S,),
            "q_lens": (S,),
            "starts": (S,),
            "page_updates": (self.num_updates, 3),
            "head_tokens": (R,),  # index among the step's T tokens of each logits row
            "head_rows": (R,),  # the sequence row that each logits row samples for
            "sampling": (R, sampling_rows.NUM_COLUMNS),
        }
        shapes |= {name: (planner.size,) for name, planner in self.work.values()}
        fields, offset = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            fields[name] = (slice(offset, offset + size), shape)
            offset += size
        return fields

    @cached_property
    def work(self) -> dict[int | None, tuple[str, Any]]:
        """sliding window -> (the field that holds its layers' work list, its planner)."""
        return {window: (f"work_{window}", planner) for window, planner in self.planners.items()}

    @cached_property
    def size(self) -> int:
        return max(where.stop for where, _ in self.fields.values())

    @cached_property
    def padding(self) -> np.ndarray:
        """i32[size]: a step of nothing; the template that pack() copies."""
        packed = np.zeros(self.size, np.int32)
        views = self.unpack(packed)
        views["seq_rows"][:] = self.max_num_seqs
        views["page_updates"][:] = (self.max_num_seqs, 0, 0)
        views["head_rows"][:] = self.max_num_seqs
        return packed

    def unpack(self, packed: Any) -> dict[str, Any]:
        """The fields of a packed array, numpy (views) or traced."""
        return {name: packed[where].reshape(shape) for name, (where, shape) in self.fields.items()}


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, ready to dispatch. `extra_page_updates` i32[m, 3] and `edit_rows` must reach the device before the step itself."""

    bucket: Bucket
    packed: np.ndarray  # i32[layout.size]
    head_rows: int  # logits rows of the head program; 0: no sequence samples, no head runs
    num_samples: int
    with_logprobs: bool
    extra_page_updates: np.ndarray
    edit_rows: list[np.ndarray]  # as EditLayout.pack makes them, one for each newly admitted request that edits its logits
    num_tokens: int
    score_rows: list[np.ndarray] = field(default_factory=list)  # as prompt_scores.pack_spans makes them


class BatchPacker:
    """Packs schedules into the buckets of one plan.

    Owns the host mirror of every row's sampling parameters, written once for each owner of the row.

    keeps_history: every row's tokens are to be on the device, and not only those that edits of its logits look back on.
    """

    def __init__(
        self,
        plan: BucketPlan,
        layouts: Mapping[Bucket, StepLayout],
        max_num_seqs: int,
        edit_layout: EditLayout,
        *,
        keeps_history: bool = False,
    ):
        self.plan = plan
        self.layouts = layouts
        self.edit_layout = edit_layout
        self.keeps_history = keeps_history
        self.work_lists: WorkLists = WorkLists()
        self._edit_rows: list[np.ndarray] = []  # of newcomers since the last `pack`
        self.sampling: np.ndarray = np.zeros((max_num_seqs, sampling_rows.NUM_COLUMNS), np.int32)
        self.wants_logprobs: np.ndarray = np.zeros(max_num_seqs, bool)
        self._generations = np.full(max_num_seqs, -1, np.int64)  # whose parameters each row of the mirror holds

    def newcomers(self, schedule: Schedule) -> list[Request]:
        """The requests of this schedule whose row has a new owner since it was last packed; their sampling parameters are now in
        the mirror, and their edits, if any, go with the next `pack`. Call it once a schedule, before `pack`."""
        new = np.flatnonzero(self._generations[schedule.rows] != schedule.generations)
        for i in new:
            request, row = schedule.requests[i], int(schedule.rows[i])
            self._generations[row] = schedule.generations[i]
            self.wants_logprobs[row] = request.params.logprobs is not None
            sampling_rows.write_row(
                self.sampling,
                row,
                request.params,
                seed=request.seed,
                sample_index=request.sample_index,
                num_prompt_tokens=request.num_prompt_tokens,
                suppress_ids=request.stop_ids,
            )
            if self.keeps_history or kinds_of(request.params):
                self._edit_rows.append(self.edit_layout.pack(row, request.params, request.token_ids, request.num_prompt_tokens))
        return [schedule.requests[i] for i in new]

    def resend_edits(self, request: Request) -> None:
        """Tokens of the request became known that no head samples: its history, if it has one, goes with the next `pack`."""
        if (self.keeps_history or kinds_of(request.params)) and request.row >= 0:
            row = self.edit_layout.pack(request.row, request.params, request.token_ids, request.num_prompt_tokens)
            self._edit_rows.append(row)

    def pack(self, schedule: Schedule) -> StepInputs:
        """The host arrays of one schedule, in the cheapest bucket that holds it."""
        n, d = schedule.num_seqs, schedule.num_decodes
        bucket = self.plan.select(schedule.num_tokens, n, schedule.max_q_len)
        layout = self.layouts[bucket]
        packed = layout.padding.copy()
        view = layout.unpack(packed)
        view["seq_rows"][:n] = schedule.rows
        view["q_lens"][:n] = schedule.q_lens
        view["starts"][:d] = FROM_DEVICE
        view["starts"][d:n] = schedule.starts[d:]
        self._pack_tokens(view["token_ids"], schedule)

        if layout.planners:
            self.work_lists.fill(layout, view, schedule)

        updates, extra = schedule.page_updates[: layout.num_updates], schedule.page_updates[layout.num_updates :]
        view["page_updates"][: len(updates)] = updates

        edit_rows, self._edit_rows = self._edit_rows, []
        tokens, rows = head_rows(schedule)
        r = len(rows)
        view["head_tokens"][:r] = tokens
        view["head_rows"][:r] = rows
        view["sampling"][:r] = self.sampling[rows]
        return StepInputs(
            bucket=bucket,
            packed=packed,
            head_rows=self.plan.select_head_rows(r) if r else 0,
            num_samples=r,
            with_logprobs=bool(self.wants_logprobs[rows].any()),
            extra_page_updates=extra,
            edit_rows=edit_rows,
            num_tokens=schedule.num_tokens,
        )

    @staticmethod
    def _pack_tokens(token_ids: np.ndarray, schedule: Schedule) -> None:
        """Decodes read the device's last sampled token and its drafts; chunks bring theirs."""
        d = schedule.num_decodes
        at = d + schedule.num_drafts
        token_ids[:at] = FROM_DEVICE
        if schedule.num_drafts:
            q_lens = schedule.q_lens[:d]
            token_ids[:at] -= np.arange(at, dtype=np.int32) - np.repeat(np.cumsum(q_lens) - q_lens, q_lens)
        for i in range(d, schedule.num_seqs):
            q_len, start = int(schedule.q_lens[i]), int(schedule.starts[i])
            token_ids[at : at + q_len] = schedule.requests[i].token_ids[start : start + q_len]
            at += q_len
        assert at == schedule.num_tokens


def head_rows(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:  # intp[r], intp[r]
    """The tokens of a step that get logits, by index, and the sequence row of each: the last one of what samples, and of a decode
    its drafts too, one after the other."""
    ends, rows = np.cumsum(schedule.q_lens) - 1, schedule.rows
    if not schedule.samples.all():
        ends, rows = ends[schedule.samples], rows[schedule.samples]
    if not schedule.num_drafts:
        return ends, rows
    counts = num_head_rows(schedule)
    firsts = np.cumsum(counts) - counts
    return np.repeat(ends + 1 - counts - firsts, counts) + np.arange(counts.sum()), np.repeat(rows, counts)


def num_head_rows(schedule: Schedule) -> np.ndarray:  # intp[number of entries that sample]
    """The logits rows of each entry that samples."""
    counts = np.ones(schedule.num_seqs, np.intp)
    counts[: schedule.num_decodes] = schedule.q_lens[: schedule.num_decodes]
    return counts[schedule.samples]
