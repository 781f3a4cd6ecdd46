"""What time the stages of a pipeline lose to waiting, by what made them wait.

Owns the account, of simulated pipelines and of an engine's. Knows nothing of schedulers or clocks.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np


@dataclass(frozen=True)
class Bubbles:
    """Seconds in which stages wait between two micro-batches, summed over stages, by what made them wait (Sarathi-Serve, section
    3.3): PB1 two micro-batches with prompt tokens take unlike times, PB2 one has them and the other has not, PB3 neither has (KV of
    unlike lengths, or stages of unlike work). send: the transfer between stages. idle: there was nothing to schedule. busy: stages
    compute."""

    pb1: float
    pb2: float
    pb3: float
    send: float
    idle: float
    busy: float

    def __add__(self, other: Bubbles) -> Bubbles:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Bubbles(*(mine + theirs for mine, theirs in pairs))

    @property
    def share(self) -> float:
        """Bubbles of all kinds over bubbles and work, sends and idle time left out; 0 before the first step."""
        lost = self.pb1 + self.pb2 + self.pb3
        return lost / (lost + self.busy) if lost else 0.0


def bubbles(
    starts: np.ndarray,  # f64[n, stages]
    seconds: np.ndarray,  # f64[n, stages]
    sends: np.ndarray,  # f64[n, stages - 1]
    prefills: np.ndarray,  # bool[n]: holds prompt tokens
    num_before: int = 0,
) -> Bubbles:
    """The account of a pipeline's gaps. The first stage waits for the return of the micro-batch as many before the next as there
    are stages, the others for the next one itself.

    num_before: so many of the first micro-batches are counted already, and only looked back on; as many as stages are enough.
    """
    n, num_stages = starts.shape
    ends = starts + seconds
    lost = [0.0, 0.0, 0.0]
    send = idle = 0.0
    if n > 1:
        returned, waited_for = np.full(n - 1, -np.inf), np.arange(1, n)
        if n > num_stages:
            returned[num_stages - 1 :] = ends[: n - num_stages, -1]
        # Nothing to schedule, though the first stage and a place in the pipeline were free.
        nothing = np.maximum(0.0, starts[1:, 0] - np.maximum(ends[:-1, 0], returned))
        for stage in range(num_stages):
            gaps = np.maximum(0.0, starts[1:, stage] - ends[:-1, stage])
            idling = np.minimum(gaps, nothing)
            gaps -= idling
            sending = np.minimum(gaps, sends[1:, stage - 1]) if stage else np.zeros(n - 1)
            cause = waited_for if stage else np.maximum(0, waited_for - num_stages)
            gaps[: max(0, num_before - 1)] = idling[: max(0, num_before - 1)] = sending[: max(0, num_before - 1)] = 0
            kinds = 2 - prefills[:-1].astype(int) - prefills[cause]
            for kind in range(3):
                lost[kind] += float((gaps - sending)[kinds == kind].sum())
            send, idle = send + float(sending.sum()), idle + float(idling.sum())
    return Bubbles(lost[0], lost[1], lost[2], send, idle, float(seconds[num_before:].sum()))
