"""A process that follows: it has its part of the weights and pages, and runs what host 0's runner runs, in the same order.

Owns the loop over host 0's commands. It never schedules, and never looks at what a step brought.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxserve.batching.layout import StepInputs
from jaxserve.config import EngineConfig, engine_config
from jaxserve.engine.runner_setup import prepare, set_up_runner
from jaxserve.engine.weights import read_weights
from jaxserve.execution.runner import BodyHandle
from jaxserve.hosts.group import HostGroup
from jaxserve.hosts.pulse import HostLostError
from jaxserve.models import Decoder
from jaxserve.models.files import find_model
from jaxserve.models.shard_placement import matching
from jaxserve.models.shards import ShardedModel
from jaxserve.qualification.qualify import Qualification

logger: logging.Logger = logging.getLogger("jaxserve")

BUSY_SECONDS = 0.5  # after a command, in which host 0 is taken to have requests


def follow(model: str | Path, *, hosts: HostGroup, mesh: Mesh | None = None, revision: str | None = None, **options: Any) -> None:
    """What the hosts other than 0 call, where host 0 makes `LLM(model, hosts=hosts, mesh=mesh, **options)`; it returns when that
    is closed.

    Args are those of `LLM`; each host reads its own part of the files.

    Raises:
      HostLostError: another host is gone.
      TypeError, FileNotFoundError, NotImplementedError, ValueError: as `LLM`; the other hosts are told, and end too. ValueError
        also where hosts disagree.
    """
    if hosts.leads:
        raise ValueError("host 0 leads: make an LLM(model, hosts=hosts) there, and call follow() on the others")
    from jaxserve.models.loading import load_files  # late: it imports the tokenizers library

    with hosts.told():
        config = engine_config(options)
        files = find_model(model, revision=revision)
        shards, config, qualification = prepare(files, config, mesh, hosts)
        loaded = load_files(files, skip_tokenizer_init=True, dtype=config.dtype, transposed=None, shards=shards)
        follower = Follower(loaded.module, config, hosts=hosts, mesh=mesh, qualification=qualification)
    follower.run()


class Follower:
    """What a host other than 0 makes of the model and config of which host 0 makes an `Engine`.

    Arguments and errors as `Engine`'s; ValueError also where the hosts disagree.
    """

    def __init__(
        self,
        model: Decoder | ShardedModel,
        config: EngineConfig | None = None,
        *,
        hosts: HostGroup,
        mesh: Mesh | None = None,
        qualification: Qualification | None = None,
    ):
        self._last_command = 0.0  # when one came, by time.monotonic
        setup = set_up_runner(model, config or EngineConfig(), mesh, hosts, self._is_busy, qualification)
        self._hosts, self._runner, self._warm_up = hosts, setup.runner, setup.warm_up
        self._body: BodyHandle | None = None  # whose head comes next
        self._read: tuple[int, _Reading] | None = None
        runner = self._runner
        self._commands: dict[str, Callable[..., Any]] = {
            "dispatch_body": self._dispatch_body,
            "dispatch_head": self._dispatch_head,
            "run_empty_steps": lambda keys: list(runner.run_empty_steps(keys)),
            "take_pages": runner.take_pages,
            "put_pages": runner.put_pages,
            "warm_up": runner.warm_up,
            "reset": runner.reset,
            "sleep": lambda keep_weights, parts: runner.sleep(keep_weights=keep_weights, parts=parts),
            "wake_up": runner.wake_up,
            "read_weights": self._read_weights,
            "use_weights": self._use_weights,
        }
        if self._warm_up is not None:
            self._warm_up.start()

    def _is_busy(self) -> bool:
        return time.monotonic() - self._last_command < BUSY_SECONDS

    def run(self) -> None:
        """Follows host 0 until it says that there is nothing more to do. Raises HostLostError; any other exception is told to the
        other hosts, whose steps end with it."""
        try:
            while (command := self._hosts.receive()) is not None:
                name, args = command
                self._last_command = time.monotonic()
                with self._hosts.at_work():
                    self._commands[name](*args)
                self._hosts.num_commands += 1
        except HostLostError:
            raise
        except BaseException as error:
            raise self._hosts.broke_off(error, f"failed: {error!r}") from error
        finally:
            if self._warm_up is not None:
                self._warm_up.close()

    def _dispatch_body(self, inputs: StepInputs) -> None:
        self._body = self._runner.dispatch_body(inputs)

    def _dispatch_head(self, allowed: np.ndarray | None) -> None:
        assert self._body is not None
        self._runner.dispatch_head(self._body, allowed)

    def _read_weights(self, number: int, path: str, dtype: str) -> None:
        """On a thread: steps go on meanwhile."""
        functions = self._runner.programs.functions
        self._read = number, _Reading(lambda: read_weights(functions, path, dtype))

    def _use_weights(self, number: int) -> None:
        read, self._read = self._read, None
        if read is None or read[0] != number:
            weights, error = None, RuntimeError(f"they were let go of: read them again (number {number})")
        else:
            weights, error = read[1].result()
        if any(self._hosts.exchange(None if error is None else repr(error))):
            return
        assert isinstance(weights, ShardedModel)
        self._runner.set_weights(iter(matching(weights, self._runner.programs.functions.by_path)))


class _Reading:
    """A call on a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], Any]):
        self._found: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name="jaxserve-loader", daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._found = call()
        except Exception as error:
            self._error = error

    def result(self) -> tuple[Any, Exception | None]:
        self._thread.join()
        return self._found, self._error
