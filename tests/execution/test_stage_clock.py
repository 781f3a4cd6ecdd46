"""The times of a pipeline's stages: what is counted piece by piece is what is counted at once."""

import threading
import time
from dataclasses import astuple

import numpy as np
import pytest

from jaxserve.execution import stage_clock
from jaxserve.execution.stage_clock import StageClock
from jaxserve.scheduling.bubbles import bubbles


class Result:
    """Ready when it is told."""

    def __init__(self):
        self.done = threading.Event()

    def block_until_ready(self):
        assert self.done.wait(10)


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def finish(clock: StageClock, result: Result, stage: int) -> None:
    before = len(clock._ends[stage])
    result.done.set()
    wait_for(lambda: len(clock._ends[stage]) > before)


def test_two_stages_by_hand():
    """Two micro-batches: the second stage waits for each, the first one for none but what the host is late."""
    clock = StageClock(2)
    first, second = [Result(), Result()], [Result(), Result()]
    start = time.monotonic()
    clock.watch(first, start, True)  # pyright: ignore[reportArgumentType]
    clock.watch(second, start, False)  # pyright: ignore[reportArgumentType]
    for result, stage in ((first[0], 0), (second[0], 0), (first[1], 1), (second[1], 1)):
        time.sleep(0.02)
        finish(clock, result, stage)
    starts, seconds, prefills = clock._times()
    assert prefills.tolist() == [True, False] and starts[0, 0] == starts.min() == start
    assert starts[1, 0] == starts[0, 1] == starts[0, 0] + seconds[0, 0], "at once, when the first is done"
    assert starts[1, 1] == pytest.approx(starts[0, 1] + seconds[0, 1], abs=1e-9)
    lost = clock.bubbles
    assert lost.pb1 == lost.pb2 == lost.pb3 == lost.idle == lost.send == 0 and lost.busy == pytest.approx(seconds.sum())
    clock.close()


def test_what_is_added_up_on_the_way_is_the_whole(monkeypatch):
    rng = np.random.default_rng(2)
    n, stages = 60, 3
    monkeypatch.setattr(stage_clock, "FOLD", 10**9)
    whole, parts = StageClock(stages), StageClock(stages)
    now = np.cumsum(rng.random(n))
    for i in range(n):
        ends, prompts = now[i] + np.cumsum(rng.random(stages) * 3), bool(rng.random() < 0.5)
        for clock in (whole, parts):
            for stage in range(stages):
                last = clock._ends[stage][-1] if clock._ends[stage] else 0.0
                clock._ends[stage].append(max(last, ends[stage]))
            clock._dispatched.append(now[i])
            clock._prefills.append(prompts)
        if i % 11 == 7:
            parts._fold()
    assert len(parts._prefills) < n == len(whole._prefills)
    assert astuple(parts.bubbles) == pytest.approx(astuple(whole.bubbles)) and whole.bubbles.pb2 > 0
    starts, seconds, prefills = whole._times()
    spans = (starts[-1] + seconds[-1] - starts[0]).sum()
    assert sum(astuple(whole.bubbles)) == pytest.approx(spans), "every second is accounted for"
    assert astuple(bubbles(starts, seconds, np.zeros((n, 2)), prefills)) == astuple(whole.bubbles)
