"""What came of each request and of each step, written down as a replay goes on.

Owns the arrays behind ServedTimes, DemandLog and Replay's columns, compact enough for a day of traffic. Knows no clock and no
scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.buckets.padding import PaddingAccount
from jaxserve.buckets.plan import Bucket
from jaxserve.scheduling.demand import COLUMNS, DemandLog, StepDemand
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import Workload


class RequestRecords:
    """When each request of a workload was sent, first scheduled, and got its first and last token; and all gaps between tokens.

    Rows are the workload's. progress: told how many requests ended, whenever some do. ValueError where the workload is not in the
    order of its arrivals.
    """

    def __init__(self, workload: Workload, progress: Callable[[int], object] | None = None):
        self.workload = workload
        self._progress = progress
        n = len(workload.requests)
        self.sent: np.ndarray = np.array([r.arrived_at for r in workload.requests])
        if (np.diff(self.sent) < 0).any():
            raise ValueError(f"workload {workload.name} is not in the order of its arrivals; see traffic.as_recorded")
        self.scheduled: np.ndarray = np.full(n, np.nan)
        self.first: np.ndarray = np.full(n, np.nan)
        self.last: np.ndarray = np.full(n, np.nan)
        self._gaps, self._gap_counts = array("d"), array("q")
        self.num_sent: int = 0
        self.num_ended: int = 0

    def schedule(self, rows: Sequence[int], start: float) -> None:
        """A step that begins at `start` holds chunks of these requests."""
        for row in rows:
            if np.isnan(self.scheduled[row]):
                self.scheduled[row] = start

    def begin_anew(self, rows: Sequence[int]) -> None:
        """These requests are sent again and begin anew; the gaps between tokens that they had remain."""
        self.num_sent -= len(rows)
        for times in (self.scheduled, self.first, self.last):
            times[list(rows)] = np.nan

    def end(self, num_requests: int) -> None:
        """So many requests have all their tokens."""
        self.num_ended += num_requests
        if num_requests and self._progress is not None:
            self._progress(num_requests)

    def take(
        self,
        rows: np.ndarray,  # intp[n], distinct
        now: float,
        before: float,  # when most of them got the token before
    ) -> None:
        """Each of these requests gets a token."""
        last = self.last[rows]
        self.last[rows] = now
        alike = int((last == before).sum())
        if alike:
            self._gaps.append(now - before)
            self._gap_counts.append(alike)
        if alike < len(rows):
            rows, last = rows[last != before], last[last != before]
            first = np.isnan(last)
            self.first[rows[first]] = now
            others = now - last[~first]
            self._gaps.extend(others.tolist())
            self._gap_counts.extend([1] * len(others))

    def take_run(
        self,
        rows: np.ndarray,  # intp[n], distinct
        times: Sequence[float],
    ) -> None:
        """Each of these requests, which have one, gets a token at each of these times but the first, where they got their last."""
        self._gaps.extend([b - a for a, b in zip(times, times[1:], strict=False)])
        self._gap_counts.extend([len(rows)] * (len(times) - 1))
        self.last[rows] = times[-1]

    def times(self, now: float | None = None) -> ServedTimes:
        """Gaps are rounded to a nanosecond, and counted.

        now: where the run is broken off, and the times are incomplete. Who waits is scheduled then, who has not been sent when it
        arrives, and the gaps to come are 0: no delay and no gap is longer than the whole run's, whose quantiles are therefore no
        less than these. first and last say nothing of requests without a token.
        """
        values, index = np.unique(np.round(np.frombuffer(self._gaps), 9), return_inverse=True)
        counts = np.bincount(index, weights=np.frombuffer(self._gap_counts, np.int64), minlength=len(values)).astype(np.int64)
        requests = self.workload.requests
        num_prompt, num_output = np.array([(r.num_prompt_tokens, r.num_output_tokens) for r in requests]).T
        if now is None:
            return ServedTimes(self.sent, self.first, self.last, num_prompt, num_output, values, counts, self.scheduled)
        to_come = int((num_output - 1).sum() - counts.sum())
        values, counts = np.concatenate([[0.0], values]), np.concatenate([[to_come], counts])
        soonest = np.where(np.arange(len(self.sent)) < self.num_sent, now, self.sent)
        scheduled, first, last = (np.where(np.isnan(t), soonest, t) for t in (self.scheduled, self.first, self.last))
        return ServedTimes(self.sent, first, last, num_prompt, num_output, values, counts, scheduled, complete=False)


class StepRecords:
    """The steps of one replica: what each asked for, its bucket, when it began and how long it took."""

    def __init__(self):
        self.padding: PaddingAccount = PaddingAccount()
        self.buckets: list[Bucket] = []
        self._demands, self._starts, self._seconds = array("q"), array("d"), array("d")

    def add(self, demand: StepDemand, bucket: Bucket, head_rows: int, start: float, seconds: float) -> None:
        """One step."""
        self._demands.extend(demand)
        self.buckets.append(bucket)
        self._starts.append(start)
        self._seconds.append(seconds)
        self.padding.add(bucket, demand.tokens, head_rows, demand.samples)

    def add_decodes(
        self,
        num_seqs: Sequence[int],  # [k], like buckets and head_rows
        kv_tokens: np.ndarray,  # i64[n, k]
        buckets: Sequence[Bucket],
        head_rows: Sequence[int],
        starts: Sequence[float],  # [n * k], like seconds
        seconds: Sequence[float],
    ) -> None:
        """n rounds of k steps that decode: step i of each is of num_seqs[i] decodes, in buckets[i]."""
        n = len(kv_tokens)
        demands = np.empty((*kv_tokens.shape, len(COLUMNS)), np.int64)
        demands[:] = [
            StepDemand(tokens=seqs, seqs=seqs, decodes=seqs, max_q_len=1, samples=seqs, kv_tokens=0, pairs=0) for seqs in num_seqs
        ]
        demands[:, :, COLUMNS.index("kv_tokens")] = kv_tokens
        self._demands.frombytes(demands.tobytes())
        self.buckets += [*buckets] * n
        self._starts.extend(starts)
        self._seconds.extend(seconds)
        for seqs, bucket, rows in zip(num_seqs, buckets, head_rows, strict=True):
            self.padding.add(bucket, n * seqs, n * rows, n * seqs, num_steps=n)

    @property
    def demands(self) -> DemandLog:
        return DemandLog(*np.frombuffer(self._demands, np.int64).reshape(-1, len(COLUMNS)).T)

    @property
    def starts(self) -> np.ndarray:
        """f64[n]"""
        return np.array(self._starts)

    @property
    def seconds(self) -> np.ndarray:
        """f64[n]"""
        return np.array(self._seconds)
