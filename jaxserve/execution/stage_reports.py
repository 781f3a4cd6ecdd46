"""What stages on other hosts make of steps, as host 0 learns of it: it has no device of theirs to ask.

Owns the reports: who sends one, the threads that wait for what is to be reported, and what stands for an array until it has come.
Arrays that no host but 0 needs never pass through here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.hosts.group import HostGroup

# The number, the stage, and its arrays. Steps have the numbers from 1 on, and pages that were taken those from -1 down.
Report = tuple[int, int, list[np.ndarray]]


def reporter_of(mesh: Mesh) -> int | None:
    """The host that tells host 0 of this stage; None: host 0 has a device of it."""
    first = min(d.process_index for d in mesh.devices.flat)
    return None if first == 0 else first


class ReportedArray:
    """An array of another host's, which is there when that host has said so: as much of a jax.Array as who fetches needs."""

    def __init__(self):
        self._come = threading.Event()
        self._value: np.ndarray | None = None

    def come(self, value: np.ndarray) -> None:
        """It is here."""
        self._value = value
        self._come.set()

    def is_ready(self) -> bool:
        """Whether it is here."""
        return self._come.is_set()

    def block_until_ready(self) -> ReportedArray:
        """Waits until it is here."""
        self._come.wait()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._come.wait()
        assert self._value is not None
        return np.array(self._value, dtype, copy=copy)


Result = jax.Array | ReportedArray  # what a step brings: of this host's devices, or of another host's


class StageReports:
    """The reports of one process: those that it owes to host 0, or, of host 0, those that it gets."""

    def __init__(self, hosts: HostGroup, stages: Sequence[Mesh]):
        self._hosts = hosts
        self._reporters = [reporter_of(mesh) for mesh in stages]
        self._lock = threading.Lock()
        self._awaited: dict[tuple[int, int], list[ReportedArray]] = {}
        self._queues: dict[int, queue.SimpleQueue] = {}  # of the stages that this process reports
        for stage, reporter in enumerate(self._reporters):
            if reporter == hosts.host_id:
                self._queues[stage] = queue.SimpleQueue()
                threading.Thread(target=self._send, args=(stage,), name=f"jaxserve-report-{stage}", daemon=True).start()
        if hosts.leads:
            hosts.on_reports(self._take)

    def report(self, step: int, stage: int, arrays: Sequence[Result], *, with_values: bool) -> None:
        """Tells host 0 when these are ready, if it is this process that does. with_values: what is in them too."""
        if stage in self._queues:
            self._queues[stage].put((step, arrays, with_values))

    def expected(self, step: int, stage: int, count: int) -> list[ReportedArray] | None:
        """On host 0: so many arrays of a stage that another host reports. None: host 0 has them itself, or this is another host,
        which hears of none."""
        if self._reporters[stage] is None or not self._hosts.leads:
            return None
        with self._lock:
            if (step, stage) in self._awaited:  # they have come
                return self._awaited.pop((step, stage))
            self._awaited[step, stage] = [ReportedArray() for _ in range(count)]
            return self._awaited[step, stage]

    def _take(self, report: Report) -> None:
        step, stage, values = report
        with self._lock:
            arrays = self._awaited.pop((step, stage), None)
            if arrays is None:  # nobody has asked yet
                arrays = self._awaited[step, stage] = [ReportedArray() for _ in values]
        for array, value in zip(arrays, values, strict=True):
            array.come(value)

    def _send(self, stage: int) -> None:
        while True:
            step, arrays, with_values = self._queues[stage].get()
            try:
                values = [np.asarray(array) if with_values else _ready(array) for array in arrays]
                self._hosts.report((step, stage, values))
            except Exception as error:
                self._hosts.broke_off(error, f"broke off in step {step} of stage {stage} ({error!r})")
                return


def _ready(array: Result) -> np.ndarray:
    array.block_until_ready()
    return np.zeros(0)
