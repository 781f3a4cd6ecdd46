"""Schedule -> StepInputs: the one place where a step's host arrays are built. Knows nothing of models or kernels."""

from __future__ import annotations

from collections.abc import Mapping
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


class BatchPacker:
    """Packs schedules into the buckets of one plan.

    Owns the host mirror of every row's sampling parameters, written once for each owner of the row.

    keeps_history: every row's tokens are to be on the device, and not only those that edits of its logits look back on.
    sends_tokens: decodes bring their tokens, which are known: of a pipeline, which takes a micro-batch back before its requests are
      in another one, and whose first stage has not sampled them.
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
    ):
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
        tokens, rows = schedule.logits_rows.tokens, schedule.logits_rows.rows
        r = len(rows)
        view["logits_tokens"][:r] = tokens
        view["logits_rows"][:r] = rows
        view["sampling"][:r] = self.sampling[rows]
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
        )

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
            token_ids[:at] -= np.arange(at, dtype=np.int32) - np.repeat(np.cumsum(q_lens) - q_lens, q_lens)
        for i in range(d, schedule.num_seqs):
            q_len, start = int(schedule.q_lens[i]), int(schedule.starts[i])
            token_ids[at : at + q_len] = schedule.requests[i].token_ids[start : start + q_len]
            at += q_len
        assert at == schedule.num_tokens
