"""`jaxserve serve --api_server_count=N`: N processes that speak HTTP on the same sockets, and this one, which has the engine.

Owns how they are started, watched and stopped. The processes run this module with file descriptors: of the sockets that listen,
and of the pipe to the engine, whose first message is a `Start`. One that ends is replaced, and its requests end with it. They end
when this process does, however that ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jaxserve.cli.common.listeners import say_where

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.scheduling.config import CacheConfig, SchedulerConfig
    from jaxserve.serving.interfaces import ServedLLM
    from jaxserve.serving.messages import LoopStats
    from jaxserve.serving.options import ServerOptions
    from jaxserve.serving.pipes import EngineHub, Peer
    from jaxserve.text.tokenizer import Tokenizer

logger: logging.Logger = logging.getLogger("jaxserve")

WATCH_SECONDS = 0.2  # between two looks at the processes
KILL_SECONDS = 5.0  # beyond --grace, after which a process that has not ended is killed
FIRST_WAIT = 1.0  # seconds to the next start after a process ended before it served; twice as long after each one more
LONGEST_WAIT = 60.0  # seconds
FAILED = 1  # exit code of a server whose processes do not start, and of a process whose engine is gone


@dataclass(frozen=True)
class Model:
    """What is left of a model's config."""

    vocab_size: int


@dataclass(frozen=True)
class Config:
    """A `ServedConfig`."""

    engine: EngineConfig
    model: Model
    scheduler: SchedulerConfig
    cache: CacheConfig


@dataclass(frozen=True)
class Engine:
    """A `DescribedEngine`."""

    config: Config
    eos_token_ids: frozenset[int]
    qualification: str | None
    max_new_tokens: int | None = None  # that the checkpoint recommends


@dataclass(frozen=True)
class TokenizerParts:
    """What a `Tokenizer` is made of; its backend as JSON."""

    backend: str
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


@dataclass(frozen=True)
class Start:
    """What a process is told at its start. limits: `AsyncLLM`'s max_waiting, request_timeout and max_new_tokens. stats: what the
    engine has counted so far. uvicorn: its options. tag: as `AsyncLLM`'s, of this process alone."""

    engine: Engine
    tokenizer: TokenizerParts | None
    params: SamplingParams
    limits: Mapping[str, Any]
    options: ServerOptions
    stats: LoopStats
    uvicorn: Mapping[str, Any]
    access_log: bool
    tag: str = ""


def describe(llm: ServedLLM) -> Engine:
    """What the processes need to know of an engine."""
    config = llm.engine.config
    known = Config(config.engine, Model(config.model.vocab_size), config.scheduler, config.cache)
    recommended = getattr(getattr(llm, "generation_defaults", None), "max_new_tokens", None)
    return Engine(known, llm.engine.eos_token_ids, llm.engine.qualification, recommended)


def take_apart(tokenizer: Tokenizer | None) -> TokenizerParts | None:
    """A tokenizer as a process is told of it."""
    if tokenizer is None:
        return None
    return TokenizerParts(tokenizer.backend.to_str(), tokenizer.special_tokens, tokenizer.chat_templates)


# ---- in the process that has the engine


def run(hub: EngineHub, start: Start, count: int, listeners: Sequence[socket.socket], *, grace: float, scheme: str = "http") -> int:
    """Serves with `count` processes until SIGTERM or Ctrl-C, then lets what runs finish for `grace` seconds. listeners: on these.
    scheme: of the URLs that are logged. Returns the exit code: 0, or FAILED where a process ended before any could serve."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    hub.start()
    processes = Processes(lambda i: _start(hub, replace(start, stats=hub.stats, tag=f"{i}-"), listeners), count)
    has_said_where = False
    try:
        while not stopping.is_set():
            if not processes.tend():
                return FAILED
            if processes.has_served and not has_said_where:
                say_where(listeners, scheme)
                has_said_where = True
            stopping.wait(WATCH_SECONDS)
    finally:
        _stop(processes.all(), grace)
        for listener in listeners:
            listener.close()
        hub.stop()
    return 0


class Processes:
    """`count` processes, each of which is replaced when it ends.

    start: starts one, which is the i-th of all. has_served: whether one has ever begun to serve.
    """

    def __init__(self, start: Callable[[int], tuple[subprocess.Popen[bytes], Peer]], count: int):
        self.has_served: bool = False
        self._start, self._count = start, count
        self._starting: dict[subprocess.Popen[bytes], Peer] = {}
        self._serving: list[subprocess.Popen[bytes]] = []
        self._num_started = 0
        self._num_failed = 0  # since one began to serve
        self._next_start = 0.0  # in seconds of time.monotonic(), after one failed

    def all(self) -> list[subprocess.Popen[bytes]]:
        """Those that have not been found to have ended."""
        return [*self._serving, *self._starting]

    def tend(self) -> bool:
        """Starts what is missing. Returns False where none has ever served and one has failed: then the next would fail too."""
        for process in [process for process, peer in self._starting.items() if peer.is_ready]:
            del self._starting[process]
            self._serving.append(process)
            self.has_served, self._num_failed, self._next_start = True, 0, 0.0
        for process in [process for process in self._serving if process.poll() is not None]:
            self._serving.remove(process)
            logger.error("an API process ended with code %s; its requests end, another one starts", process.returncode)
        for process in [process for process in self._starting if process.poll() is not None]:
            del self._starting[process]
            if not self._goes_on(f"an API process ended with code {process.returncode} before it served"):
                return False
        while len(self.all()) < self._count and time.monotonic() >= self._next_start:
            self._num_started += 1
            try:
                process, peer = self._start(self._num_started)
            except OSError as error:
                if not self._goes_on(f"an API process could not be started: {error}"):
                    return False
            else:
                self._starting[process] = peer
        return True

    def _goes_on(self, failure: str) -> bool:
        """Logs a failure, after which the next start has to wait. Returns whether there will be one."""
        if not self.has_served:
            logger.error("%s", failure)
            return False
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2**self._num_failed)
        logger.error("%s; the next one starts in %g s", failure, wait)
        self._num_failed = min(self._num_failed + 1, 30)
        self._next_start = time.monotonic() + wait
        return True


def _start(hub: EngineHub, start: Start, listeners: Sequence[socket.socket]) -> tuple[subprocess.Popen[bytes], Peer]:
    ours, theirs = socket.socketpair()
    with theirs:
        fds = [listener.fileno() for listener in listeners] + [theirs.fileno()]
        # -P: modules are those of this process, and none of the folder that it was started in.
        command = [sys.executable, "-P", "-c", f"import {__name__} as module; module.run_process()", *map(str, fds)]
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}  # the devices are not theirs
        try:
            process = subprocess.Popen(command, pass_fds=fds, env=env)
        except BaseException:
            ours.close()
            raise
    peer = hub.attach(ours)
    peer.pipe.put(start)
    return process, peer


def _stop(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """Ends them all by one deadline."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace + KILL_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- in each of the processes


def run_process() -> None:
    *listeners, end = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    from jaxserve.cli.common import http_server
    from jaxserve.cli.common.command import without_collecting
    from jaxserve.serving.pipes import read_one

    try:
        start: Start = read_one(end)
    except EOFError:
        sys.exit(FAILED)
    http_server.set_up_logging(access_log=start.access_log)
    lost = threading.Event()
    with without_collecting():
        application = _application(start, end, partial(_end, lost))
    http_server.serve(application, start.options, dict(start.uvicorn), listeners)
    sys.exit(FAILED if lost.is_set() else 0)


def _end(lost: threading.Event) -> None:
    """Stops the server, after what it has to say: the engine is gone."""
    logger.error("the engine's process is gone: this one ends")
    lost.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _application(start: Start, end: socket.socket, on_lost: Any) -> Any:
    from jaxserve.serving.app import make_app
    from jaxserve.serving.async_llm import AsyncLLM
    from jaxserve.serving.pipes import RemoteLoop

    connect = partial(RemoteLoop, end, start.stats, on_lost=on_lost)
    engine = AsyncLLM(_Described(start), **start.limits, default_sampling_params=start.params, connect=connect, tag=start.tag)
    return make_app(engine, start.options, shares_engine=True, one_of_several="api_server_count")


class _Described:
    """A `DescribedLLM`."""

    def __init__(self, start: Start):
        self.engine = start.engine
        self.tokenizer: Tokenizer | None = None
        self.generation_defaults = SimpleNamespace(max_new_tokens=start.engine.max_new_tokens)
        self._params = start.params
        if (parts := start.tokenizer) is not None:
            import tokenizers

            from jaxserve.text.tokenizer import Tokenizer

            backend = tokenizers.Tokenizer.from_str(parts.backend)
            self.tokenizer = Tokenizer(backend, special_tokens=parts.special_tokens, chat_templates=parts.chat_templates)

    def get_default_sampling_params(self) -> SamplingParams:
        return self._params
