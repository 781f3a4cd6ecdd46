"""A device that takes the time of a step and computes nothing: what the host does beside one can be measured without it.

It stands in for the Runner of an engine's pipeline. A step occupies it for `body` seconds, then, once its masks are there, for
`head` seconds, and samples what it is told to; the host's own work is the engine's, real and on the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxserve.batching.layout import StepInputs
from jaxserve.sampling.rows import SampledRows
from jaxserve.scheduling.schedule import Schedule


@dataclass
class TimedDevice:
    """Takes the runner's place in an engine's pipeline.

    next_tokens: of a schedule, i32[n, 1 + 2K]: the tokens to come of each entry that samples, NO_DRAFT past the last of them. They
      are what it samples and what it proposes, so that all drafts stand.
    num_drafts: K, of an engine that speculates.
    late: of each step with masks, the seconds that its head waited for them after its body was done.
    """

    engine: Any
    body: float
    head: float
    next_tokens: Callable[[Schedule], np.ndarray]
    num_drafts: int = 0
    late: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.score_rows = self.engine.runner.score_rows
        self._free = 0.0  # when all that was dispatched is done
        self._schedule: Any = None
        scheduler = self.engine.scheduler
        plain = scheduler.schedule

        def schedule() -> Schedule | None:
            self._schedule = plain()
            return self._schedule

        scheduler.schedule, self.engine.pipeline.runner = schedule, self

    def dispatch_body(self, inputs: StepInputs) -> Any:
        return SimpleNamespace(inputs=inputs, done=max(time.perf_counter(), self._free) + self.body)

    def dispatch_head(self, body: Any, allowed: np.ndarray | None = None) -> Any:
        done = body.done
        if allowed is not None:
            now = time.perf_counter()
            self.late.append(max(0.0, now - done))
            done = max(done, now)
        sampled = self._sample(self._schedule, allowed)
        self._free = done + (self.head if body.inputs.head_rows else 0.0)
        return SimpleNamespace(done=self._free, sampled=sampled)

    def _sample(self, schedule: Schedule, allowed: np.ndarray | None) -> SampledRows:
        """An entry's first row samples its next token, the row of each draft the token after that draft."""
        from jaxserve.speculative.proposer import NO_DRAFT

        logits = schedule.logits_rows
        entry = np.repeat(np.arange(len(logits.entries)), logits.counts)
        place = np.arange(len(entry)) - np.repeat(logits.firsts, logits.counts)
        to_come = self.next_tokens(schedule)[entry[:, None], place[:, None] + np.arange(1 + self.num_drafts)]  # i32[R, 1 + K]
        tokens, drafts = np.maximum(to_come[:, 0], 0), to_come[:, 1:]
        delivered = (place == 0) | (to_come[:, 0] != NO_DRAFT)  # behind the last token there was no draft to verify
        if allowed is not None:
            sampling = [r for r, samples in zip(schedule.requests, schedule.samples, strict=True) if samples]
            known = np.array([r.num_forced_in_flight > 0 for r in sampling])[entry]  # what these sample is dropped
            words = allowed[np.arange(len(tokens)), tokens // 32]
            assert (known | ~delivered | (words >> tokens % 32 & 1 != 0)).all(), "the next tokens are not what the grammars allow"
        no = np.zeros(len(tokens), bool)
        return SampledRows(tokens, no, no, delivered=delivered, drafts=drafts)

    def fetch(self, handle: Any) -> SampledRows:
        time.sleep(max(0.0, handle.done - time.perf_counter()))
        return handle.sampled
