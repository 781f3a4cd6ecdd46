"""Runs changed programs of one kernel on few batches, the quickest first, until one breaks.

A change is caught if a batch, in some schedule, breaks a rule or computes something wrong. A program that takes ten times as long
as the unchanged one, and more, is taken to hang: in time of the processor, whatever else the machine does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import signal
import time
from collections.abc import Iterator, Sequence

import numpy as np

from scripts.ptx.log import Log, batch_makers, digest_of, interpreter
from scripts.ptx.mutations import Mutation
from scripts.ptx.program import PtxError
from scripts.ptx.suite import AnyRun, Workload

SEEDS = (0, 1)  # schedules in which a mutation may be caught
ALL_SEEDS = (0, 1, 2, 3, 4)  # one of each kind: those that a claim of redundancy stands on
HANGS, LEAST = 10, 20.0  # times what the unchanged program takes, plus seconds of the processor


@dataclasses.dataclass(frozen=True)
class Tried:
    """A batch of the suite. reached: bool[instructions] of the unchanged kernel. seconds: of the processor that it took."""

    number: int
    reached: np.ndarray
    seconds: float


@dataclasses.dataclass(frozen=True)
class Trial:
    """One kernel of a program. batches: those of the suite, the quickest first. version: of the PTX and of what runs it."""

    suite: Workload
    kernel: str
    batches: tuple[Tried, ...]
    version: str
    log: Log

    @classmethod
    def of(cls, suite: Workload, kernel: str, log: Log | None = None) -> Trial:
        """Runs the program itself. Raises RuntimeError if it is not sound."""
        batches = []
        for number, run in enumerate(suite.runs):
            reached, seconds = np.zeros(len(suite.kernels[kernel].program.instructions), bool), 0.0
            for seed in SEEDS:
                start = time.process_time()
                try:
                    out, covered = run.run(seed)
                except PtxError as error:
                    raise RuntimeError(f"{run.name}: broken before any mutation: {error}") from None
                if run.faults(out):
                    raise RuntimeError(f"{run.name}: wrong before any mutation: {run.faults(out)}")
                reached, seconds = reached | covered[kernel], max(seconds, time.process_time() - start)
            batches.append(Tried(number, reached, seconds))
        # A run that goes on has the order of the first one: a trial is known by its batches.
        version, log = _version(suite, kernel), log or Log(None)
        took = {"kernel": kernel, "case": suite.name, "took": [batch.seconds for batch in batches]}
        noted = (log.find(version) or log.add(version, **took))["took"]
        batches = [dataclasses.replace(batch, seconds=seconds) for batch, seconds in zip(batches, noted, strict=True)]
        return cls(suite, kernel, tuple(sorted(batches, key=lambda b: b.seconds)), version, log)

    def reaching(self, index: int) -> tuple[Tried, ...]:
        """The batches that reach an instruction."""
        return tuple(batch for batch in self.batches if batch.reached[index])

    def cover(self) -> tuple[Tried, ...]:
        """Batches that together reach what all of them do: as few as taking the best one each time gives."""
        chosen, seen = [], np.zeros_like(self.batches[0].reached)
        while (gains := [int((batch.reached & ~seen).sum()) for batch in self.batches]) and max(gains):
            chosen.append(self.batches[gains.index(max(gains))])
            seen |= chosen[-1].reached
        return tuple(chosen)

    def catch(self, changes: Sequence[Mutation], batches: Sequence[Tried], seeds: Sequence[int] = SEEDS) -> str | None:
        """What a program with these changes breaks first; None if nothing. Only batches that reach one of them are run."""
        indices = [change.index for change in changes]
        batches = [batch for batch in batches if batch.reached[indices].any()]
        names = sorted(f"{change.kind} at {change.index}" for change in changes)
        what = {"changes": names, "batches": [self.suite.runs[b.number].name for b in batches], "seeds": list(seeds)}
        key = hashlib.sha256(json.dumps([self.version, what]).encode()).hexdigest()[:32]
        entry = self.log.find(key)
        if entry is None:
            start = time.perf_counter()
            caught, by = self._run(changes, batches, seeds)
            seconds = round(time.perf_counter() - start, 2)
            entry = self.log.add(key, kernel=self.kernel, case=self.suite.name, **what, caught=caught, by=by, seconds=seconds)
        return entry["caught"]

    def _run(self, changes: Sequence[Mutation], batches: Sequence[Tried], seeds: Sequence[int]) -> tuple[str | None, str | None]:
        """(what is broken, by which batch in which schedule)."""
        program = self.suite.kernels[self.kernel].program
        for change in changes:
            program = change.of(program)
        kernels = {**self.suite.kernels, self.kernel: dataclasses.replace(self.suite.kernels[self.kernel], program=program)}
        runs = self.suite.with_kernels(kernels).runs
        for seed in seeds:
            for batch in batches:
                caught = broken(runs[batch.number], seed, HANGS * batch.seconds + LEAST)
                if caught is not None:
                    return caught, f"{runs[batch.number].name}, seed {seed}"
        return None, None


def broken(run: AnyRun, seed: int, limit: float) -> str | None:
    """The rule that a run breaks, without places; None if none. limit: seconds of the processor after which it is taken to hang."""
    try:
        with _at_most(limit):
            out, _ = run.run(seed)
    except PtxError as error:
        text = "hangs" if "hangs" in str(error) else str(error).split(": ")[-1]
        return re.sub(r"0x\w+|%\w+|\b\d+\b", "#", text)[:140]
    return "wrong values" if run.faults(out) else None


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """PtxError in the main thread once the process has used so much of the processor."""

    def stop(signum: int, frame: object) -> None:
        raise PtxError(f"hangs: no end after {seconds:.0f} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _version(suite: Workload, kernel: str) -> str:
    """A hash of the PTX and its launch, of the batches and what makes them, and of the interpreter's files."""
    # Files of which a change finds the same.
    aside = {"survivors.py", "agreement.py", "contraction.py", "coverage.py", "report.py"}
    what = [kernel, suite.name, digest_of(suite.kernels), [run.name for run in suite.runs], batch_makers(), interpreter(aside)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()
