"""Load from outside: a workload over HTTP as benchmarks run it, 1,000 connections at once, the soak script."""

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxserve.cli.common.http_load import Stream, Target, serve_at
from jaxserve.request import EngineOutput
from jaxserve.routing.app import make_router
from jaxserve.routing.options import RouterOptions
from jaxserve.serving.app import make_app
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.options import ServerOptions
from jaxserve.workloads.workload import Workload, WorkloadRequest
from scripts.bench.replay_engine import replay_llm
from tests.serving.http_server import listening, serving

ROOT = Path(__file__).parents[2]
MANY = 1000


@contextlib.contextmanager
def replaying(max_num_seqs: int = 64, *, begin: threading.Event | None = None, **options: Any) -> Iterator[str]:
    """The address of a server without a model. begin: what its first step waits for."""
    llm = replay_llm(max_num_seqs)
    if begin is not None:
        step, may_begin = llm.engine.step, begin

        def step_later() -> list[EngineOutput]:
            assert may_begin.wait(60)
            return step()

        llm.engine.step = step_later
    with listening(make_app(AsyncLLM(llm, **options), ServerOptions(names=("replay",)))) as url:
        yield url


@pytest.mark.parametrize("max_concurrency", [None, 1])
def test_a_workload_over_http(max_concurrency):
    requests = tuple(WorkloadRequest(3 + i, 1 + 2 * i, arrived_at=0.02 * i) for i in range(6))
    with replaying() as url:
        times = asyncio.run(serve_at(Target(url), Workload("mine", requests), 256, 0, max_concurrency=max_concurrency))
    assert times.num_output.tolist() == [1, 3, 5, 7, 9, 11] and len(times.gaps) == sum(times.num_output - 1)
    assert (times.first > times.arrivals).all() and (times.last >= times.first).all() and (times.gaps >= 0).all()
    assert (times.arrivals >= [0.02 * i for i in range(6)]).all()
    if max_concurrency:
        assert (times.arrivals[1:] >= times.last[:-1]).all(), "sent, and counted as arrived, when the one before had ended"
    else:
        assert np.allclose(times.arrivals, [0.02 * i for i in range(6)])


def test_a_workload_that_is_not_served_is_no_figure():
    with replaying(1, max_waiting=0) as url, pytest.raises(RuntimeError, match="answered 429, not 500 tokens"):
        asyncio.run(serve_at(Target(url), Workload("mine", (WorkloadRequest(3, 500),) * 8), 256, 0))
    with pytest.raises(ValueError, match="url='localhost' must be an address"):
        Target("localhost")


def test_a_thousand_connections_at_once():
    """All open before the first asks: each is served to its last token, or told that there is no room; the server lives on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * MANY:
        pytest.skip(f"needs {3 * MANY} open files, may have {hard} (raise it with ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * MANY), hard))
    body, begin, room = {"prompt": "a", "max_tokens": 8, "stream": True}, threading.Event(), 32 + 400

    async def main(target: Target) -> list[Stream]:
        connections = await asyncio.gather(*(target.connect() for _ in range(MANY)))
        streams = [Stream() for _ in connections]

        async def begin_when_full() -> None:
            while sum(stream.status == 429 for stream in streams) < MANY - room:
                await asyncio.sleep(0.01)
            begin.set()

        try:
            async with asyncio.timeout(60):
                reads = (target.read(s, *c, body) for s, c in zip(streams, connections, strict=True))
                await asyncio.gather(begin_when_full(), *reads)
        finally:
            begin.set()
            for _, writer in connections:
                writer.close()
        return streams

    with replaying(32, begin=begin, max_waiting=room - 32) as url:
        streams = asyncio.run(main(Target(url)))
        assert httpx.post(f"{url}/v1/completions", json=body | {"stream": False}).json()["choices"][0]["text"] == "The quic"
    assert Counter(stream.status for stream in streams) == {200: room, 429: MANY - room}
    assert all(len(s.chunk_times) == 8 and s.complete for s in streams if s.status == 200)
    refusals = [json.loads(s.tail[s.tail.index(b"{") :]) for s in streams if s.status == 429]
    assert {refusal["error"]["type"] for refusal in refusals} == {"rate_limit_error"}


def soak(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.soak", "--num_requests=120", "--check_every=60", "--max_concurrency=8", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_soak(shared_llm):
    """Good and bad requests, and clients that leave, to a server and through a router; what the router can't say is not taken for
    nothing."""
    with serving(shared_llm) as server:
        done = soak(f"--url={server.url}", f"--pid={os.getpid()}", "--max_growth_mb=2000", "--json=-")
        assert done.returncode == 0, done.stderr
        statuses = json.loads(done.stdout[done.stdout.index("{\n") :])["statuses"]
        assert {"200", "400"} <= set(statuses) and sum(statuses.values()) == 120
        with listening(make_router(RouterOptions(backends=(server.url,)))) as url:
            done = soak(f"--url={url}", f"--metrics_urls={server.url}")
            assert done.returncode == 0, done.stderr
            done = soak(f"--url={url}")
            assert done.returncode != 0 and "for a router give --metrics_urls" in done.stderr
        server.wait_idle()
