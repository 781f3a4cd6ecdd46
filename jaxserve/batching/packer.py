"""Schedule -> StepInputs: the one place where a step's host arrays are built. Knows nothing of models or kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.batching.layout import FROM_DEVICE, StepInputs, StepLayout
from jaxserve.batching.work_lists import WorkLists
from jaxserve.buckets.plan import Bucket
from jaxserve.request import Request
from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling.edit_rows import EditLayout, kinds_of
from jaxserve.scheduling.schedule import Schedule


class ShapeChoice(Protocol):
    """Which of the compiled shapes a step takes: a BucketPlan, or its part that is compiled so far."""

    def select(self, num_tokens: int, num_seqs: int, max_q_len: int) -> Bucket:
        """As `BucketPlan.select`."""
        ...

    def select_head(self, num_rows: int, with_logprobs: bool) -> tuple[int, bool]:
        """As `BucketPlan.select_head`."""
        ...


@dataclass(frozen=True, slots=True)
class _Groups:
    """How a schedule is shared out over groups of devices. n entries."""

    of: np.ndarray  # intp[n]: the group of each entry
    ranks: np.ndarray  # intp[n]: its place among those of its group
    starts: np.ndarray  # intp[n]: where its tokens begin among those of its group
    max_seqs: int  # of a group
    max_tokens: int

    @classmethod
    def share(cls, schedule: Schedule, num_groups: int, rows_per_group: int) -> _Groups:
        of = schedule.rows // rows_per_group
        ranks, starts, sizes = np.zeros(len(of), np.intp), np.zeros(len(of), np.intp), np.zeros(num_groups, np.intp)
        for group in range(num_groups):
            own = np.flatnonzero(of == group)
            ends = schedule.q_lens[own].cumsum()
            ranks[own], starts[own] = np.arange(len(own)), ends - schedule.q_lens[own]
            sizes[group] = ends[-1] if len(own) else 0
        return cls(of, ranks, starts, int(np.bincount(of, minlength=num_groups).max()), int(sizes.max()))


class BatchPacker:
    """Packs schedules into the buckets of one plan.

    Owns the host mirror of every row's sampling parameters, written once for each owner of the row.

    keeps_history: every row's tokens are to be on the device, and not only those that edits of its logits look back on.
    sends_tokens: decodes bring their tokens, which are known: of a pipeline, which takes a micro-batch back before its requests are
      in another one, and whose first stage has not sampled them.
    num_groups: of devices, in which they attend.
    drafts: i32[max_num_seqs, K]: of each row, where the host makes them; None: the device does.
    """

    def __init__(
        self,
        plan: ShapeChoice,
        layouts: Mapping[Bucket, StepLayout],
        max_num_seqs: int,
        edit_layout: EditLayout,
        *,
        keeps_history: bool = False,
        sends_tokens: bool = False,
        num_groups: int = 1,
        drafts: np.ndarray | None = None,
    ):
        self.num_groups = num_groups
        self.drafts = drafts
        self.plan = plan
        self.layouts = layouts
        self.edit_layout = edit_layout
        self.keeps_history = keeps_history
        self.sends_tokens = sends_tokens
        self.work_lists: WorkLists = WorkLists()
        self._edit_rows: list[np.ndarray] = []  # of newcomers since the last `pack`
        self.sampling: np.ndarray = np.zeros((max_num_seqs, sampling_rows.NUM_COLUMNS), np.int32)
        self.wants_logprobs: np.ndarray = np.zeros(max_num_seqs, bool)
        self._generations = np.full(max_num_seqs, -1, np.int64)  # whose parameters each row of the mirror holds

    def newcomers(self, schedule: Schedule) -> list[Request]:
        """The requests of this schedule whose row has a new owner since it was last packed; their sampling parameters are now in
        the mirror, and their edits, if any, go with the next `pack`. Call it once a schedule, before `pack`."""
        (new,) = (self._generations[schedule.rows] != schedule.generations).nonzero()
        for i in new:
            request, row = schedule.requests[i], int(schedule.rows[i])
            self._generations[row] = schedule.generations[i]
            self.wants_logprobs[row] = request.params.returns_logprobs
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
        n, d, groups, starts = schedule.num_seqs, schedule.num_decodes, None, None
        if self.num_groups == 1:
            bucket = self.plan.select(schedule.num_tokens, n, schedule.max_q_len)
        else:
            groups = _Groups.share(schedule, self.num_groups, len(self.sampling) // self.num_groups)
            demand = self.num_groups * groups.max_tokens, self.num_groups * groups.max_seqs
            bucket = self.plan.select(*demand, schedule.max_q_len)
        layout = self.layouts[bucket]
        packed = layout.padding.copy()
        view = layout.unpack(packed)
        if groups is None:
            view["seq_rows"][:n] = schedule.rows
            view["q_lens"][:n] = schedule.q_lens
            view["starts"][:d] = FROM_DEVICE
            view["starts"][d:n] = schedule.starts[d:]
            self._pack_tokens(view["token_ids"], schedule)
        else:
            starts = self._pack_groups(layout, view, schedule, groups)

        if layout.lists:
            self.work_lists.fill(layout, view, schedule, None if groups is None else groups.of)

        updates, extra = schedule.page_updates[: layout.num_updates], schedule.page_updates[layout.num_updates :]
        view["page_updates"][: len(updates)] = updates

        edit_rows, self._edit_rows = self._edit_rows, []
        tokens, rows = schedule.logits_rows.tokens, schedule.logits_rows.rows
        if starts is not None:
            entries = schedule.logits_rows.entries
            tokens = starts[entries] + schedule.q_lens[entries] - 1
        r = len(rows)
        view["logits_tokens"][:r] = tokens
        view["logits_rows"][:r] = rows
        self.sampling.take(rows, 0, view["sampling"][:r], "clip")  # in place; all are in range
        with_logprobs = bool(self.wants_logprobs[rows].any())
        head_rows, with_logprobs = self.plan.select_head(r, with_logprobs) if r else (0, False)
        return StepInputs(
            bucket=bucket,
            packed=packed,
            head_rows=head_rows,
            num_samples=r,
            with_logprobs=with_logprobs,
            extra_page_updates=extra,
            edit_rows=edit_rows,
            num_tokens=schedule.num_tokens,
            token_starts=starts,
        )

    @staticmethod
    def _pack_groups(layout: StepLayout, view: dict[str, np.ndarray], schedule: Schedule, groups: _Groups) -> np.ndarray:
        """Writes tokens and sequences into the part of each entry's group. Returns where each entry's tokens begin, intp[n]."""
        part, d = layout.bucket.part(layout.num_groups), schedule.num_decodes
        assert not schedule.num_drafts, "drafts in groups"
        seqs, starts = groups.of * part.seqs + groups.ranks, groups.of * part.tokens + groups.starts
        view["seq_rows"][seqs] = schedule.rows
        view["q_lens"][seqs] = schedule.q_lens
        view["starts"][seqs[:d]] = FROM_DEVICE
        view["starts"][seqs[d:]] = schedule.starts[d:]
        view["token_ids"][starts[:d]] = FROM_DEVICE
        for i in range(d, schedule.num_seqs):
            at, q_len, first = int(starts[i]), int(schedule.q_lens[i]), int(schedule.starts[i])
            view["token_ids"][at : at + q_len] = schedule.requests[i].token_ids[first : first + q_len]
        return starts

    def _pack_tokens(self, token_ids: np.ndarray, schedule: Schedule) -> None:
        """Decodes read the device's last sampled token and its drafts, unless they are sent; chunks bring theirs."""
        d = schedule.num_decodes
        at = d + schedule.num_drafts
        if self.sends_tokens:
            token_ids[:d] = [r.token_ids[start] for r, start in zip(schedule.requests[:d], schedule.starts[:d], strict=True)]
        else:
            token_ids[:at] = FROM_DEVICE
        if schedule.num_drafts:
            q_lens = schedule.q_lens[:d]
            places = np.arange(at, dtype=np.int32) - np.repeat(np.cumsum(q_lens) - q_lens, q_lens)
            token_ids[:at] -= places
            if self.drafts is not None:
                drafts = self.drafts[np.repeat(schedule.rows[:d], q_lens), np.maximum(places - 1, 0)]
                token_ids[:at] = np.where((places > 0) & (drafts >= 0), drafts, token_ids[:at])
        for i in range(d, schedule.num_seqs):
            q_len, start = int(schedule.q_lens[i]), int(schedule.starts[i])
            token_ids[at : at + q_len] = schedule.requests[i].token_ids[start : start + q_len]
            at += q_len
        assert at == schedule.num_tokens
