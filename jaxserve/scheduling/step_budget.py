"""The token budget of one step, chosen so that the decodes in it wait no longer than an objective allows.

Owns that choice, which follows from predicted step times. The scheduler asks for it while it composes a step. A step whose decodes
have long KV has less time left for prompts, one with few decodes has more. A fixed budget would have to fit the slowest step.
"""

from __future__ import annotations

import numpy as np

from jaxserve.buckets.plan import BucketPlan
from jaxserve.buckets.unpadded import UnpaddedPlan
from jaxserve.step_times.fitted import StepTimes


class StepBudget:
    """Chooses how many tokens a step may hold.

    Args:
      step_times: predicts how long a step takes.
      plan: the buckets that steps run in. A budget is always the tokens of a mixed bucket, so a step that uses it has no padding.
      objective: seconds that a step with decodes may take.
      max_num_seqs, max_num_batched_tokens: the scheduler's limits.
      every_step: the objective also applies to steps without decodes. In a pipeline, decodes of other steps wait behind them.

    Raises:
      ValueError: the objective is not above 0, or a bucket lies beyond what was profiled.
    """

    def __init__(
        self,
        step_times: StepTimes,
        plan: BucketPlan | UnpaddedPlan,
        objective: float,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        every_step: bool = False,
    ):
        if not objective > 0:
            raise ValueError(f"tbt_slo_ms={1e3 * objective:g} must be above 0")
        buckets = [b for b in plan.buckets if b.is_mixed and b.seqs >= min(b.tokens, max_num_seqs)]
        self.objective = objective
        self.every_step = every_step
        self.page_size: int = step_times.page_size
        self.window: int | None = step_times.window
        self.tokens: np.ndarray = np.array([min(b.tokens, max_num_batched_tokens) for b in buckets])
        self._base, self._per_kv_token, self._per_pair = np.stack([step_times.coefficients(b) for b in buckets], axis=1)
        heads = [step_times.head_seconds(rows) for rows in plan.head_rows]
        self._head_rows, self._head_seconds = np.array(plan.head_rows), np.array(heads)

    def choose(
        self,
        starts: np.ndarray,  # i32[n]: positions of the decodes in the step
        chunk_start: int,  # where the first chunk that may join them starts in its prompt
    ) -> int:
        """The most tokens of a step with these decodes, which it includes. Where no bucket meets the objective, it is the smallest
        bucket that holds the decodes and one token more, so that prompts never starve."""
        n, seconds = len(starts), self._seconds(starts, chunk_start)
        good = np.flatnonzero((seconds <= self.objective) & (self.tokens > n))
        if len(good):
            return int(self.tokens[good[-1]])
        larger = np.flatnonzero(self.tokens > n)
        return int(self.tokens[larger[0]]) if len(larger) else int(self.tokens[-1])

    def _seconds(self, starts: np.ndarray, chunk_start: int) -> np.ndarray:
        """f64[budgets]: predicted seconds of a step with these decodes and a chunk that fills it up to each budget."""
        n = len(starts)
        chunks = np.maximum(0, self.tokens - n)
        seen = chunk_start + (chunks + 1) / 2  # keys that a query of the chunk attends to, on average
        if self.window is not None:
            starts, seen = np.minimum(starts, self.window - 1), np.minimum(seen, self.window)
        kv_tokens = int((starts // self.page_size + 1).sum()) * self.page_size
        head = self._head_seconds[min(np.searchsorted(self._head_rows, n + 1), len(self._head_rows) - 1)]
        return head + self._base + self._per_kv_token * kv_tokens + self._per_pair * (chunks * seen)

    def least(self) -> tuple[int, float]:
        """(budget, seconds) of the fastest step with one decode and a chunk. No objective below these seconds can be met."""
        seconds = self._seconds(np.zeros(1, int), 0)
        return int(self.tokens[seconds.argmin()]), float(seconds.min())
