"""`jaxserve serve --api_server_count=N`: N processes that speak HTTP on one socket, and this one, which has the engine.

Owns how they are started, watched and stopped. The processes run this module with two file descriptors: of the socket that listens,
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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxserve.cli.common import http_server

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


@dataclass(frozen=True)
class TokenizerParts:
    """What a `Tokenizer` is made of; its backend as JSON."""

    backend: str
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


@dataclass(frozen=True)
class Start:
    """What a process is told at its start. limits: `AsyncLLM`'s max_waiting and request_timeout. stats: the engine's counts so far.
    uvicorn: its options. tag: as `AsyncLLM`'s, of this process alone."""

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
    return Engine(known, llm.engine.eos_token_ids, llm.engine.qualification)


def take_apart(tokenizer: Tokenizer | None) -> TokenizerParts | None:
    """A tokenizer as a process is told of it."""
    if tokenizer is None:
        return None
    return TokenizerParts(tokenizer.backend.to_str(), tokenizer.special_tokens, tokenizer.chat_templates)


# ---- in the process that has the engine


def run(hub: EngineHub, start: Start, count: int) -> int:
    """Serves with `count` processes until SIGTERM or Ctrl-C, then lets what runs finish for --grace seconds. Returns the exit code:
    0, or FAILED where a process ended before it could serve."""
    listener, stopping = http_server.listen(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    hub.start()
    processes: dict[subprocess.Popen[bytes], Peer] = {}
    num_started = 0
    try:
        while not stopping.is_set():
            for process, peer in list(processes.items()):
                if process.poll() is None:
                    continue
                del processes[process]
                if not peer.is_ready:
                    logger.error("an API process ended with code %s before it served", process.returncode)
                    return FAILED
                logger.error("an API process ended with code %s; its requests end, another one starts", process.returncode)
            while len(processes) < count:
                num_started += 1
                process, peer = _start(hub, replace(start, stats=hub.stats, tag=f"{num_started}-"), listener)
                processes[process] = peer
            stopping.wait(WATCH_SECONDS)
    finally:
        _stop(list(processes))
        http_server.stop_listening(listener)
        hub.stop()
    return 0


def _start(hub: EngineHub, start: Start, listener: socket.socket) -> tuple[subprocess.Popen[bytes], Peer]:
    ours, theirs = socket.socketpair()
    with theirs:
        fds = listener.fileno(), theirs.fileno()
        command = [sys.executable, "-m", "jaxserve.cli.common.api_processes", *map(str, fds)]
        process = subprocess.Popen(command, pass_fds=fds, env=os.environ | {"JAX_PLATFORMS": "cpu"})  # the devices are not theirs
    peer = hub.attach(ours)
    peer.pipe.put(start)
    return process, peer


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(http_server.grace() + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- in each of the processes


def main() -> None:
    listener, end = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    from jaxserve.serving.pipes import read_one

    try:
        start: Start = read_one(end)
    except EOFError:
        sys.exit(FAILED)
    http_server.set_up_logging(access_log=start.access_log)
    lost = threading.Event()
    http_server.serve(_application(start, end, partial(_end, lost)), start.options, dict(start.uvicorn), listener)
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
    return make_app(engine, start.options, shares_engine=True)


class _Described:
    """A `DescribedLLM`."""

    def __init__(self, start: Start):
        self.engine = start.engine
        self.tokenizer: Tokenizer | None = None
        self._params = start.params
        if (parts := start.tokenizer) is not None:
            import tokenizers

            from jaxserve.text.tokenizer import Tokenizer

            backend = tokenizers.Tokenizer.from_str(parts.backend)
            self.tokenizer = Tokenizer(backend, special_tokens=parts.special_tokens, chat_templates=parts.chat_templates)

    def get_default_sampling_params(self) -> SamplingParams:
        return self._params


if __name__ == "__main__":
    main()
