"""Step times of Yi-34B on two A100s as Sarathi-Serve's artifact measured them: the model's, and what its steps took beyond those.

Owns that sum. It shows what a figure would be with the published system's steps and our scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxserve.buckets.plan import Bucket
from jaxserve.step_times.analytic import AnalyticStepTimes
from scripts.reproduce.published import DECODE_MS, PREFILL_MS


@dataclass(frozen=True)
class MeasuredSteps:
    """StepTimes: the model's seconds and an excess of the step's shape, between measured ones by interpolation. Of decodes by their
    number (at 1k of KV each; what more KV takes is the model's), of every other step as of a prompt with as many tokens."""

    model: AnalyticStepTimes

    @property
    def page_size(self) -> int:
        return self.model.page_size

    @property
    def host_seconds(self) -> float:
        return self.model.host_seconds

    @property
    def window(self) -> int | None:
        return self.model.window

    @cached_property
    def _excess(self) -> dict[bool, tuple[list[int], list[float]]]:
        """Of decodes (True) and of prompts: sizes, and seconds beyond the model's."""
        decodes = [DECODE_MS[n] / 1e3 - self.model.seconds(Bucket(n, n, 1), n, 1024 * n, 0) for n in DECODE_MS]
        prompts = [ms / 1e3 - self.model.seconds(Bucket(n, 1, n), 1, 0, n * (n + 1) / 2) for n, ms in PREFILL_MS.items()]
        return {True: (list(DECODE_MS), decodes), False: (list(PREFILL_MS), prompts)}

    def excess(self, bucket: Bucket) -> float:
        """Seconds; that of the nearest measured size outside of them."""
        return float(np.interp(bucket.tokens, *self._excess[bucket.max_q_len == 1]))

    def coefficients(self, bucket: Bucket) -> np.ndarray:
        return self.model.coefficients(bucket) + [self.excess(bucket), 0.0, 0.0]

    def body_seconds(self, bucket: Bucket, kv_tokens: Any = 0, pairs: Any = 0) -> Any:
        return self.model.body_seconds(bucket, kv_tokens, pairs) + self.excess(bucket)

    def head_seconds(self, rows: int) -> float:
        return self.model.head_seconds(rows)

    def seconds(self, bucket: Bucket, head_rows: int, kv_tokens: float, pairs: float) -> float:
        return float(self.body_seconds(bucket, kv_tokens, pairs)) + self.head_seconds(head_rows)
