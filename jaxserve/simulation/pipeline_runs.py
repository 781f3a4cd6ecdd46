"""Rounds of a pipeline that are certain before they are scheduled: every micro-batch in flight, all decodes, comes back and goes
out again as it was.

Owns when the next n rounds are known to be that and nothing else, and when each stage begins each of their turns (one micro-batch,
once down the stages). Whom a turn serves and what its steps cost is pipeline.py's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jaxserve.scheduling.schedule import Schedule
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.simulation.decode_runs import num_certain_steps


def num_certain_rounds(scheduler: Scheduler, in_flight: Sequence[Schedule]) -> int:
    """How often the micro-batches in flight will all be scheduled again just as they are, unless a request is added or one of them
    is back before the one ahead of it is on its way; 0 if that isn't sure.

    Whoever runs must have a decode in one of them. There may be fewer of them than stages: who could make up another can't join.
    """
    if not in_flight or any(schedule.num_decodes < schedule.num_seqs for schedule in in_flight):
        return 0
    n = num_certain_steps(scheduler, 1)
    assert not n or sum(schedule.num_seqs for schedule in in_flight) == scheduler.num_running, "one in flight was preempted"
    return n


def time_turns(
    now: float,
    until: float,
    free: Sequence[float],  # [stages]: when each has ended what it was sent
    returns: Sequence[float],  # [k]: when each micro-batch in flight is back
    seconds: Sequence[Sequence[float]],  # [turns][stages], micro-batch after micro-batch, round after round
    sends: Sequence[Sequence[float]],  # [k][stages - 1]
    host_seconds: float,
) -> tuple[list[list[float]], list[float]]:
    """(starts [n][stages], returns [n]) of the next n turns: of those in `seconds`, as many as are scheduled one micro-batch at a
    time and before `until`."""
    free, flying = list(free), deque(returns)
    sends = [[*between, 0.0] for between in sends]
    starts, back = [], []
    for turn, times in enumerate(seconds):
        now = max(now, flying.popleft())
        if now >= until or flying and flying[0] <= now:
            break  # a request may come; or two are back, and are one micro-batch from then on
        arrives, begun = now + host_seconds, []
        for i, send in enumerate(sends[turn % len(sends)]):
            start = max(arrives, free[i])
            free[i] = start + times[i]
            arrives = free[i] + send
            begun.append(start)
        now = free[0]
        flying.append(free[-1])
        starts.append(begun)
        back.append(free[-1])
    return starts, back
