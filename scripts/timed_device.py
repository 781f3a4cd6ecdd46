"""A device that takes the time of a step and computes nothing: what the host does beside one can be measured without it.

It stands in for an engine's Runner. A step occupies it for `body` seconds, then, once its masks are there, for `head` seconds, and
samples what it is told to; the host's own work is the engine's, real and on the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxserve.batch import StepInputs
from jaxserve.sampling_rows import SampledRows
from jaxserve.schedule import Schedule


@dataclass
class TimedDevice:
    """Takes an engine's runner's place; `next_tokens(schedule)` gives i32[n], a token for each entry that samples.

    late: of each step with masks, the seconds that its head waited for them after its body was done.
    """

    engine: Any
    body: float
    head: float
    next_tokens: Callable[[Schedule], np.ndarray]
    late: list[float] = field(default_factory=list)
    has_weights = True
    weights_version = 0

    def __post_init__(self):
        self.programs, self.score_rows = self.engine.runner.programs, self.engine.runner.score_rows
        self._free = 0.0  # when all that was dispatched is done
        self._schedule: Any = None
        scheduler = self.engine.scheduler
        plain = scheduler.schedule

        def schedule() -> Schedule | None:
            self._schedule = plain()
            return self._schedule

        scheduler.schedule, self.engine.runner = schedule, self

    def dispatch(self, inputs: StepInputs, masks: Callable[[], np.ndarray] | None = None) -> Any:
        schedule = self._schedule
        done = max(time.perf_counter(), self._free) + self.body
        if inputs.head_rows:
            allowed = None
            if masks is not None:
                allowed = masks()
                now = time.perf_counter()
                self.late.append(max(0.0, now - done))
                done = max(done, now)
            tokens = self.next_tokens(schedule)
            if allowed is not None:
                sampling = [r for r, samples in zip(schedule.requests, schedule.samples, strict=True) if samples]
                known = np.array([r.num_foretold > 0 for r in sampling])  # what these sample is dropped
                words = allowed[np.arange(len(tokens)), tokens // 32]
                assert (known | (words >> tokens % 32 & 1 != 0)).all(), "the next tokens are not what the grammars allow"
            done += self.head
        else:
            tokens = np.zeros(0, np.int32)
        self._free = done
        return SimpleNamespace(done=done, tokens=tokens)

    def reset(self) -> None:
        """Nothing is kept from step to step."""

    def fetch(self, handle: Any) -> SampledRows:
        time.sleep(max(0.0, handle.done - time.perf_counter()))
        no = np.zeros(len(handle.tokens), bool)
        return SampledRows(handle.tokens, no, no)
