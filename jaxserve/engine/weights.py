"""An engine's weights and its sleep: when weights may change, and what becomes of memory while nothing runs.

Owns whether the engine is asleep. Which weights fit the model is models/adoption.py's to say; the buffers are the runner's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxserve.execution.leading_runner import AnyRunner
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.execution.placing import SLEEP_PARTS
from jaxserve.hosts.group import HostGroup
from jaxserve.models import Decoder
from jaxserve.models.adoption import fit, placed
from jaxserve.models.files import find_model
from jaxserve.models.shard_placement import matching, place_cut
from jaxserve.models.shards import ShardedModel
from jaxserve.models.trainer_keys import is_transposed
from jaxserve.outputs import MAX_WEIGHT_VERSION
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler

IN_FLIGHT = ("refuse", "recompute", "keep")  # what becomes of requests that have begun when the weights change


def check_version(version: object) -> None:
    """ValueError for what is no name of weights."""
    if not (isinstance(version, str) and 0 < len(version) <= MAX_WEIGHT_VERSION):
        raise ValueError(f"weight_version={version!r} must be a text of 1 to {MAX_WEIGHT_VERSION} characters, such as 'step-42'")


def read_weights(functions: ModelFunctions, path: str | Path, dtype: str) -> Decoder | ShardedModel:
    """A checkpoint's weights, as these functions take them. Raises as `models.loading.load_model`."""
    from jaxserve.models.loading import load_files  # late: it imports the tokenizers library, which an engine does without

    how: dict[str, Any] = {"transposed": is_transposed(functions.paths), "shards": functions.shards}
    return load_files(find_model(path), skip_tokenizer_init=True, dtype=dtype, **how).module


class WeightsAndSleep:
    """What changes a runner's weights and frees its memory."""

    def __init__(self, runner: AnyRunner, hosts: HostGroup | None = None):
        self._runner = runner
        self._hosts = hosts
        self._last_read: tuple[Decoder | ShardedModel, int] | None = None  # with its number, by which the other hosts know theirs
        self._num_reads = 0
        self._reading = threading.Lock()
        self._asleep: set[str] = set()  # parts, of SLEEP_PARTS
        self.version: str = "0"

    def read(self, path: str | Path, dtype: str) -> Decoder | ShardedModel:
        """As `Engine.read_weights`."""
        functions = self._runner.programs.functions
        if self._hosts is None:
            return read_weights(functions, path, dtype)
        with self._reading:
            self._last_read, self._num_reads = None, self._num_reads + 1
            self._hosts.send(("read_weights", (self._num_reads, str(path), dtype)))
            read = read_weights(functions, path, dtype)
            self._last_read = read, self._num_reads
            return read

    def update(self, weights: Any, in_flight: str, version: str | None, scheduler: Scheduler, drain: Callable[[], None]) -> None:
        """As `Engine.update_params`. drain: waits for the steps in flight."""
        if version is not None:
            check_version(version)
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"{in_flight=} must be one of {', '.join(IN_FLIGHT)}")
        last = self._last_read
        if self._hosts is not None and (last is None or weights is not last[0]):
            raise NotImplementedError(
                f"with {self._hosts.num_hosts} hosts update_params takes what the last read_weights returned, which all hosts have "
                "read: weights in the memory of one process do not reach the others"
            )
        placed = self._placed(weights)
        drain()
        num_begun = scheduler.num_begun
        if num_begun and in_flight == "refuse":
            raise RuntimeError(
                f"{num_begun} requests are in flight: finish or abort them first, or call update_params with "
                "in_flight='recompute' or 'keep'"
            )
        if self._hosts is not None and last is not None:
            self._check_readers(self._hosts, last[1])
        try:
            self._runner.set_weights(placed)
            self.version = version or str(self._runner.num_weight_updates)
        finally:  # whatever came of it, the old weights' KV is not to be hit
            scheduler.change_weights(self._runner.num_weight_updates, self.version, recompute=in_flight == "recompute")

    def rename(self, version: str, scheduler: Scheduler) -> None:
        """As `Engine.update_weight_version`."""
        check_version(version)
        self.version = version
        scheduler.name_weights(version)

    def _check_readers(self, hosts: HostGroup, number: int) -> None:
        """The other hosts take what they have read as this number, unless one could not read it: ValueError."""
        answers = hosts.ask(("use_weights", (number,)), None)
        errors = {host_id: error for host_id, error in enumerate(answers) if error is not None}
        self._last_read = None
        if errors:
            raise ValueError("; ".join(f"host {host_id} could not read the weights: {error}" for host_id, error in errors.items()))

    def _placed(self, weights: Any) -> Iterator[jax.Array]:
        """The new weights, checked, and each placed when it is asked for."""
        functions = self._runner.programs.functions
        shards = functions.shards
        if isinstance(weights, ShardedModel):
            return iter(matching(weights, functions.by_path))
        fitted = fit(weights, functions.model_config, dict(zip(functions.paths, functions.plain, strict=True)))
        return placed(fitted, jax.local_devices()[0]) if shards is None else place_cut(fitted, shards)

    def sleep(self, level: int, num_unfinished: int, pools: Sequence[PagePool]) -> None:
        """As `Engine.sleep`. num_unfinished: requests that are not delivered to their end."""
        if level not in (1, 2):
            raise ValueError(f"{level=} must be 1 (the weights move to the host) or 2 (they are let go)")
        if num_unfinished:
            raise RuntimeError(f"{num_unfinished} requests are unfinished: finish or abort them before sleep()")
        parts = set(SLEEP_PARTS) - self._asleep
        if level == 2 and self._runner.has_weights:
            parts |= {"weights"}  # also those that sleep on the host
        if parts:
            for pool in pools:
                pool.reset()
            self._runner.sleep(keep_weights=level == 1, parts=sorted(parts))
            self._asleep |= parts

    def wake_up(self, tags: Collection[str] | None) -> None:
        """As `Engine.wake_up`."""
        if tags is not None and (not tags or not set(tags) <= set(SLEEP_PARTS)):
            raise ValueError(f"{tags=} must be of {', '.join(SLEEP_PARTS)}; None wakes both")
        if parts := self._asleep & set(SLEEP_PARTS if tags is None else tags):
            self._runner.wake_up(sorted(parts))
            self._asleep -= parts

    @property
    def is_asleep(self) -> bool:
        """As `Engine.is_asleep`."""
        return bool(self._asleep)

    def check_awake(self) -> None:
        """RuntimeError, with what to do, where nothing could run now: asleep, or without weights."""
        if self._asleep:
            what = "the engine is asleep" if len(self._asleep) > 1 else f"the engine's {min(self._asleep)} is asleep"
            raise RuntimeError(f"{what}: call wake_up() first")
        if not self._runner.has_weights:
            raise RuntimeError("the engine has no weights (sleep(level=2), or a failed update): call update_params() first")
