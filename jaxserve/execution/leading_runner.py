"""The runner of host 0, where an engine's devices belong to several processes.

Owns that the others run what this one runs: every command is sent to them before it begins here, once, whatever it calls itself.
Owns the waits for a step too, which end when a host is lost or a step stands still.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.batching.layout import StepInputs
from jaxserve.execution.page_transfer import TakenPages, TakenStages
from jaxserve.execution.pipeline_programs import AnyPrograms
from jaxserve.execution.pipeline_runner import PipelineRunner
from jaxserve.execution.placing import SLEEP_PARTS
from jaxserve.execution.programs import ProgramKey
from jaxserve.execution.runner import BodyHandle, Runner, StepHandle, warm_up
from jaxserve.execution.stage_reports import Result
from jaxserve.hosts.group import HostGroup
from jaxserve.sampling.rows import SampledRows, ScoredRows

_SPIN_SECONDS = 0.002  # of a wait, in which it looks often
_SHORT_NAP, _LONG_NAP = 20e-6, 500e-6  # between two looks, in seconds


class LeadingRunner:
    """A runner whose commands the followers of `hosts` run too. Raises HostLostError from every method that needs them."""

    def __init__(self, runner: Runner | PipelineRunner, hosts: HostGroup):
        self._runner = runner
        self._hosts = hosts
        self._depth = 0  # of commands within commands
        self.programs: AnyPrograms = runner.programs
        self.score_rows: int = runner.score_rows

    @contextlib.contextmanager
    def _together(self, command: str, *args: Any, timed: bool = False) -> Iterator[None]:
        """What runs in here, the followers run too, by a method of their runners. Where it breaks off here, they may have gone on:
        then the group is at its end. timed: whether it is part of a step."""
        if self._depth:
            yield
            return
        self._hosts.send((command, args))
        self._depth += 1
        try:
            with self._hosts.carrying_out(timed=timed):
                yield
        except BaseException as error:
            raise self._hosts.broke_off(error, f"broke off in {command} ({error!r})") from error
        finally:
            self._depth -= 1

    # -- steps

    def dispatch(self, inputs: StepInputs) -> StepHandle:
        """As `Runner.dispatch`."""
        return self.dispatch_head(self.dispatch_body(inputs))

    def dispatch_body(self, inputs: StepInputs) -> BodyHandle:
        """As `Runner.dispatch_body`."""
        with self._together("dispatch_body", inputs, timed=True):
            return self._runner.dispatch_body(inputs)

    def dispatch_head(self, body: BodyHandle, allowed: np.ndarray | None = None) -> StepHandle:
        """As `Runner.dispatch_head`."""
        masks = None if allowed is None else allowed[: body.inputs.head_rows]
        with self._together("dispatch_head", masks, timed=True):
            return self._runner.dispatch_head(body, masks)

    def fetch(self, handle: StepHandle) -> SampledRows | None:
        """As `Runner.fetch`."""
        with self._waiting_for(handle):
            return self._runner.fetch(handle)

    def fetch_scores(self, handle: StepHandle) -> ScoredRows:
        """As `Runner.fetch_scores`."""
        with self._waiting_for(handle):
            return self._runner.fetch_scores(handle)

    def take_pages(self, page_ids: Sequence[int], group: int = 0) -> TakenPages | TakenStages:
        """As `Runner.take_pages`."""
        with self._together("take_pages", list(page_ids), group, timed=True):
            return self._runner.take_pages(page_ids, group)

    def put_pages(self, page_ids: Sequence[int], kv: np.ndarray, group: int = 0) -> None:
        """As `Runner.put_pages`. The pages travel to every host."""
        with self._together("put_pages", list(page_ids), kv, group, timed=True):
            self._runner.put_pages(page_ids, kv, group)

    def warm_up(self, progress: Callable[[list], Iterable] = iter) -> None:
        """As `Runner.warm_up`."""
        with self._together("warm_up"):
            warm_up(self, progress)

    def run_beside_steps(self) -> None:
        """As `Runner.run_beside_steps`, of a warm-up."""
        assert self._depth, "the others run it as a part of their own warm-up"
        self._runner.run_beside_steps()

    def run_empty_steps(self, keys: Sequence[ProgramKey]) -> Iterator[StepHandle]:
        """As `Runner.run_empty_steps`."""
        with self._together("run_empty_steps", list(keys)):
            handles = list(self._runner.run_empty_steps(keys))
        return iter(handles)

    # -- weights and memory

    @property
    def has_weights(self) -> bool:
        """As `Runner.has_weights`."""
        return self._runner.has_weights

    @property
    def num_weight_updates(self) -> int:
        """As `Runner.num_weight_updates`."""
        return self._runner.num_weight_updates

    def num_deleted_weights(self) -> int:
        """As `Runner.num_deleted_weights`, of this process."""
        return self._runner.num_deleted_weights()

    def set_weights(self, weights: Iterable[Any]) -> None:
        """As `Runner.set_weights`. The others have been told which they are."""
        with self._hosts.at_work():
            self._runner.set_weights(weights)

    def reset(self) -> None:
        """As `Runner.reset`; nothing where a host is lost."""
        if self._hosts.lost is None:
            with self._together("reset"):
                self._runner.reset()

    def sleep(self, *, keep_weights: bool, parts: Collection[str] = SLEEP_PARTS) -> None:
        """As `Runner.sleep`."""
        with self._together("sleep", keep_weights, parts):
            self._runner.sleep(keep_weights=keep_weights, parts=parts)

    def wake_up(self, parts: Collection[str] = SLEEP_PARTS) -> None:
        """As `Runner.wake_up`."""
        with self._together("wake_up", parts):
            self._runner.wake_up(parts)

    # -- waits

    @contextlib.contextmanager
    def _waiting_for(self, handle: StepHandle) -> Iterator[None]:
        """What runs in here finds the step's arrays there. An error of XLA's is a HostLostError where a host is lost."""
        try:
            with self._hosts.at_work(timed=True):
                self._await([handle.done, *handle.scored])
                yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # of gloo's some are ValueErrors
            raise self._hosts.why_broken(error) from error

    def _await(self, arrays: list[Result]) -> None:
        """Until all are there, or a host is lost: never inside a call of XLA's, which would not come back from one."""
        started = time.monotonic()
        while not all(array.is_ready() for array in arrays):  # pyright: ignore[reportAttributeAccessIssue]
            if time.monotonic() - started < _SPIN_SECONDS:
                time.sleep(_SHORT_NAP)
                continue
            self._hosts.check()
            time.sleep(_LONG_NAP)


AnyRunner = Runner | PipelineRunner | LeadingRunner
