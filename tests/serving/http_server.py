"""A server on localhost in a thread of the tests' process, around an AsyncLLM."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from jaxserve import LLM
from jaxserve.serving.app import make_app
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.connections import bounded
from jaxserve.serving.interfaces import ServedLLM
from jaxserve.serving.options import HTTPOptions, ServerOptions


@dataclass
class Server:
    url: str
    engine: AsyncLLM
    client: httpx.Client

    def wait_idle(self, seconds: float = 60) -> None:
        """Waits until no request is left and every page is free."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.engine.stats
            if not self.engine.num_requests and stats.num_free_pages == stats.num_pages and not stats.num_running:
                return
            assert time.monotonic() < deadline, f"{self.engine.num_requests} requests are left: {stats}"
            time.sleep(0.005)


@contextlib.contextmanager
def serving(llm: ServedLLM, *, names=("alphabet",), options: dict[str, Any] | None = None, **engine: Any) -> Iterator[Server]:
    """A server while the `with` lasts."""
    async_llm, made = AsyncLLM(llm, **engine), ServerOptions(names=names, **options or {})
    with listening(make_app(async_llm, made), http=bounded(made)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Server(url, async_llm, client)


@contextlib.contextmanager
def listening(app: Any, **options: Any) -> Iterator[str]:
    """The address of an ASGI application that listens while the `with` lasts, by default with a server's bounds on connections.
    options: uvicorn's."""
    options = {"http": bounded(HTTPOptions()), "ws": "none"} | options
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, access_log=False, backlog=4096, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server did not end"


def steps_until_pages_are_back(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[int]:
    """For each abort that the engine's thread takes, once every page is free: how many steps it has run since."""
    engine, taken, found = llm.engine, list[int](), list[int]()
    abort, step = engine.abort, engine.step

    def look() -> None:
        while taken and engine.pool.num_free_pages == engine.pool.num_pages:
            found.append(engine.stats.num_steps - taken.pop(0))

    def watched_abort(request_ids):
        taken.append(engine.stats.num_steps)
        abort(request_ids)
        look()

    def watched_step():
        outputs = step()
        look()
        return outputs

    monkeypatch.setattr(engine, "abort", watched_abort)
    monkeypatch.setattr(engine, "step", watched_step)
    return found


def slow_down(monkeypatch: pytest.MonkeyPatch, llm: LLM, seconds: float = 0.02) -> None:
    """Makes each step of a model take so long, so that something can happen meanwhile."""
    fetch = llm.engine.runner.fetch

    def slowly(handle):
        time.sleep(seconds)
        return fetch(handle)

    monkeypatch.setattr(llm.engine.runner, "fetch", slowly)
