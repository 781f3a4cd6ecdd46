"""When each stage of a pipeline had done each micro-batch, and what time stages lost to waiting.

Owns a thread for each stage, which waits for the stage's results in their order. A stage is taken to begin a micro-batch as soon as
the stage before has done it and its own last one is done, so that a send counts with the stage that receives.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Sequence

import numpy as np

from jaxserve.execution.stage_reports import Result
from jaxserve.scheduling.bubbles import Bubbles, bubbles

FOLD = 4096  # micro-batches whose times are kept before they are added up
CLOSE_SECONDS = 1.0


class StageClock:
    """The times of a pipeline's stages. One thread calls `watch` and reads `bubbles`."""

    def __init__(self, num_stages: int):
        self.num_stages = num_stages
        self._lock = threading.Lock()
        self._queues: list[queue.SimpleQueue] = []
        self._threads: list[threading.Thread] = []
        self._counted = Bubbles(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._forget()

    def _forget(self) -> None:
        self._num_before = 0  # of the kept micro-batches: those counted
        self._dispatched: list[float] = []
        self._prefills: list[bool] = []
        self._ends: list[list[float]] = [[] for _ in range(self.num_stages)]

    def watch(self, results: Sequence[Result], dispatched_at: float, has_prompts: bool) -> None:
        """A micro-batch is on its way. results: what each stage makes of it; dispatched_at: seconds of time.monotonic; has_prompts:
        whether it holds tokens of prompts."""
        if not self._queues:
            self._start()
        with self._lock:
            ends = self._ends
            self._dispatched.append(dispatched_at)
            self._prefills.append(has_prompts)
        for each, result, stage in zip(self._queues, results, ends, strict=True):
            each.put((result, stage))
        if len(self._dispatched) >= FOLD:
            self._fold()

    def _start(self) -> None:
        self._queues = [queue.SimpleQueue() for _ in range(self.num_stages)]
        for i, each in enumerate(self._queues):
            self._threads.append(threading.Thread(target=self._wait, args=(each,), name=f"jaxserve-stage-{i}", daemon=True))
            self._threads[-1].start()
        atexit.register(self.close)  # a thread that comes back from XLA while the interpreter goes would crash it

    def _wait(self, results: queue.SimpleQueue) -> None:
        while (item := results.get()) is not None:
            result, ends = item
            try:
                result.block_until_ready()
            except Exception:  # the step broke off, which whoever fetches it is told
                pass
            now = time.monotonic()
            with self._lock:
                ends.append(now)

    @property
    def bubbles(self) -> Bubbles:
        """Of the micro-batches that every stage has done, in seconds. `send` is 0: see above."""
        return self._counted + self._account(*self._times())

    def _times(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(starts f64[n, stages], seconds f64[n, stages], prefills bool[n]) of those kept that every stage has done."""
        with self._lock:
            n = min(map(len, self._ends))
            ends = np.array([stage[:n] for stage in self._ends]).reshape(self.num_stages, n).T
            arrives, prefills = np.array(self._dispatched[:n]), np.array(self._prefills[:n], bool)
        starts = np.empty_like(ends)
        for stage in range(self.num_stages):
            free = np.concatenate([[-np.inf], ends[:-1, stage]])[:n]
            starts[:, stage] = np.minimum(np.maximum(arrives, free), ends[:, stage])
            arrives = ends[:, stage]
        return starts, ends - starts, prefills

    def _account(self, starts: np.ndarray, seconds: np.ndarray, prefills: np.ndarray) -> Bubbles:
        return bubbles(starts, seconds, np.zeros((len(starts), self.num_stages - 1)), prefills, self._num_before)

    def _fold(self) -> None:
        """Adds up what is done, and keeps what the next micro-batches look back on."""
        times = self._times()
        n, keep = len(times[0]), self.num_stages
        if n <= keep:
            return
        self._counted += self._account(*times)
        with self._lock:
            for kept in (self._dispatched, self._prefills, *self._ends):
                del kept[: n - keep]
        self._num_before = keep

    def reset(self) -> None:
        """Forgets the micro-batches that are not counted: a step broke off, and what follows it is another run."""
        self._counted = self.bubbles
        with self._lock:
            self._forget()  # results under way go to lists that nobody reads

    def close(self) -> None:
        """Ends the threads. Results that do not come, of hosts that are lost, are waited for CLOSE_SECONDS."""
        for each in self._queues:
            each.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._queues, self._threads = [], []
        atexit.unregister(self.close)
