"""Warming up behind the first steps: which programs are compiled first, the thread that compiles the rest, and the shapes that
steps take meanwhile.

Owns the thread. Programs are compiled from shapes: nothing is allocated on the device, and nothing runs there.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable

from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.execution.compilation import compile_side_by_side
from jaxserve.execution.pipeline_programs import AnyPrograms
from jaxserve.execution.programs import ProgramKey, RestBody, RestHead, name_of
from jaxserve.scheduling.config import resolve_policy

logger: logging.Logger = logging.getLogger("jaxserve")

HEAD_START_SECONDS = 1.0  # in which no program is begun: a server opens its port in them, and somebody may be waiting for that
NICENESS = 10  # of the compiling thread, and of the threads that XLA starts for it: steps come first
QUIET_SECONDS = 0.5  # a program is begun when no request ran for this long,
PATIENCE_SECONDS = 2.0  # or after this long: under steady traffic too all are compiled in the end


def first_programs(plan: BucketPlan, max_num_seqs: int, *, chunked: bool) -> list[ProgramKey]:
    """The few programs with which every step can run: a mixed bucket of max_num_seqs sequences, the largest head and the update of
    the rows; then the smallest bucket and head, in which a lone request decodes faster.

    Prompts are cut to what that mixed bucket holds. Where the batching policy does not cut prompts (chunked=False) it is the
    largest bucket instead.
    """
    if chunked:
        mixed = next(b for b in plan.buckets if _takes_any_prompt(b) and min(b.tokens, b.seqs) >= max_num_seqs)
    else:
        mixed = plan.buckets[-1]
    return list(dict.fromkeys([mixed, (plan.max_head_rows, True), "update", plan.buckets[0], (plan.head_rows[0], False)]))


def remaining_programs(plan: BucketPlan, keys: Iterable[ProgramKey], first: Iterable[ProgramKey]) -> list[ProgramKey]:
    """The other keys, in the order in which they bring most: buckets and heads by turns, the smaller first."""
    rest = set(keys) - set(first)
    heads = [(rows, with_logprobs) for with_logprobs in (False, True) for rows in plan.head_rows]
    by_turns = [key for i in range(max(len(plan.buckets), len(heads))) for key in (*plan.buckets[i : i + 1], *heads[i : i + 1])]
    at_rest = [*(RestHead(rows) for rows in plan.head_rows), *(RestBody(bucket) for bucket in plan.buckets)]
    return [key for key in (*by_turns, *at_rest, "score", "update", "take", "put") if key in rest]


def _takes_any_prompt(bucket: Bucket) -> bool:
    return bucket.max_q_len == bucket.tokens


class CompiledShapes:
    """What a packer asks for shapes while programs are being compiled: the cheapest of those that are, and the plan's own choice,
    which is then compiled in line, where none of them is large enough."""

    def __init__(self, programs: AnyPrograms):
        self._programs, self._plan = programs, programs.config.plan

    def select(self, num_tokens: int, num_seqs: int, max_q_len: int) -> Bucket:
        """As `BucketPlan.select`."""
        for bucket in self._plan.buckets:
            if bucket.holds(num_tokens, num_seqs, max_q_len) and self._programs.has(bucket):
                return bucket
        return self._plan.select(num_tokens, num_seqs, max_q_len)

    def select_head(self, num_rows: int, with_logprobs: bool) -> tuple[int, bool]:
        """As `BucketPlan.select_head`. A head with log-probabilities stands in for one without."""
        variants = (True,) if with_logprobs else (False, True)
        for rows in self._plan.head_rows:
            for variant in variants:
                if num_rows <= rows and self._programs.has((rows, variant)):
                    return rows, variant
        return self._plan.select_head(num_rows, with_logprobs)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest step that a compiled bucket takes whatever is in it; 0 if there is none."""
        max_num_seqs = self._programs.config.scheduler.max_num_seqs
        whole = (b for b in self._plan.buckets if _takes_any_prompt(b) and b.seqs >= min(b.tokens, max_num_seqs))
        return max((b.tokens for b in whole if self._programs.has(b)), default=0)


class BackgroundWarmUp:
    """Compiles the programs of a plan: the first ones at once, the rest on a thread of its own.

    A program is begun while no request runs, or when PATIENCE_SECONDS went by without such a moment: tracing holds Python's lock
    and XLA's compiler takes cores that steps need. A step that needs one of the rest sooner compiles it itself, or waits for it
    if it is under way. A program that can't be compiled is logged and left out: a larger one takes its place, and a step that
    needs it none the less raises the error.
    """

    def __init__(self, programs: AnyPrograms, is_busy: Callable[[], bool]):
        """is_busy: whether requests run; called on the compiling thread."""
        self._programs = programs
        self._is_busy = is_busy
        self.shapes: CompiledShapes = CompiledShapes(programs)
        config = programs.config.scheduler
        chunked = resolve_policy(config).chunked
        self.first: list[ProgramKey] = first_programs(programs.config.plan, config.max_num_seqs, chunked=chunked)
        self._stopping = threading.Event()
        self._last_busy = 0.0  # when a request was last seen to run
        self.on_progress: list[Callable[[], None]] = []  # called on the thread after each program
        self._thread = threading.Thread(target=self._compile_rest, name="jaxserve-compiler", daemon=True)

    def compile_first(self) -> None:
        """Compiles what every step can run with, side by side."""
        compile_side_by_side(self._programs.get, self.first)

    def start(self) -> None:
        """Starts the thread. It leaves the first request the machine, if that comes within HEAD_START_SECONDS + QUIET_SECONDS."""
        self._last_busy = time.monotonic() + HEAD_START_SECONDS
        atexit.register(self.close)  # a compiler that runs while the interpreter goes would crash it
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the thread has ended; False if that took more than `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread: the program under way is finished, which may take seconds, and no other is begun."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        atexit.unregister(self.close)

    def _compile_rest(self) -> None:
        if sys.platform == "linux":  # where this is the priority of a thread, not of its process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._stopping.wait(HEAD_START_SECONDS)
        for key in remaining_programs(self._programs.config.plan, self._programs.keys, self.first):
            self._await_quiet()
            if self._stopping.is_set():
                return
            try:
                self._programs.compile(key)
            except Exception:
                logger.exception("%s could not be compiled; a step that needs it will fail", name_of(key))
            for call in self.on_progress:
                call()

    def _await_quiet(self) -> None:
        """Waits until no request ran for QUIET_SECONDS, at most PATIENCE_SECONDS; ends early where the thread is to end."""
        now = time.monotonic()
        deadline = now + PATIENCE_SECONDS
        while now < deadline and not self._stopping.is_set():
            if self._is_busy():
                self._last_busy = now
            elif now - self._last_busy >= QUIET_SECONDS:
                return
            self._stopping.wait(0.02)
            now = time.monotonic()
