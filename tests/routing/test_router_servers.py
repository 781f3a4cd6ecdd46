"""The router in front of real servers: answers equal to theirs, none lost under load, servers that are killed, signals."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxserve import LLM
from jaxserve.routing.app import make_router
from jaxserve.routing.options import RouterOptions
from jaxserve.serving.app import make_app
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.options import ServerOptions
from scripts.bench.replay_engine import FOX, replay_llm
from tests.alphabet_model import after
from tests.serving.conftest import PLAN
from tests.serving.http_server import Server, listening, serving, slow_down

ROOT = Path(__file__).parents[2]
LONG = {"prompt": "a", "temperature": 0, "max_tokens": 200, "ignore_eos": True}


@contextlib.contextmanager
def routing(*urls: str, **options: Any) -> Iterator[httpx.Client]:
    router = make_router(RouterOptions(backends=urls, check_seconds=0.1, max_failures=2, min_successes=1, **options))
    with listening(router, date_header=False, server_header=False) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def other_llm(folder) -> LLM:
    return LLM(folder, bucket_plan=PLAN, num_pages=96, page_size=4, compilation_cache_dir="")


@pytest.fixture(scope="module")
def servers(shared_llm, other_llm) -> Iterator[tuple[Server, Server]]:
    options = {"enable_request_id_headers": True}  # a router's answers always have the id
    with serving(shared_llm, options=options) as a, serving(other_llm, options=options) as b:
        yield a, b


@pytest.fixture
def router(servers) -> Iterator[httpx.Client]:
    with routing(*(server.url for server in servers)) as client:
        yield client
    for server in servers:
        server.wait_idle()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "tea", "temperature": 0, "max_tokens": 9}),
    ("/v1/completions", {"prompt": "tea", "temperature": 0, "max_tokens": 9, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "seed": 3, "max_tokens": 5, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é"}], "seed": 1, "max_tokens": 20, "stream": True}),
    ("/v1/completions", {"prompt": "tea", "temperature": -1}),
    ("/tokenize", {"prompt": "tea"}),
    ("/nothing", {}),
]


@pytest.mark.parametrize("path,body", CASES)
def test_answers_are_the_servers(router, servers, path, body):
    def events(client: httpx.Client) -> tuple:
        answer = client.post(path, json=body, headers={"X-Request-Id": "same"})
        texts = answer.text.split("\n\n") if body.get("stream") else [answer.text]
        said = [json.loads(text.removeprefix("data: ")) if "{" in text else text for text in texts]
        for one in said:
            if isinstance(one, dict):
                one.pop("created", None)
        headers = {k: v for k, v in answer.headers.items() if k not in ("date", "server", "content-length")}
        return answer.status_code, headers, said

    assert events(router) == events(servers[0].client) == events(servers[1].client)


def test_openais_client_and_64_streams(router, servers):
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{router.base_url}/v1", api_key="none", max_retries=0) as client:
            (model,) = [model.id async for model in client.models.list()]

            async def one(i: int) -> str:
                stream = await client.completions.create(model=model, prompt="a", max_tokens=1 + i % 25, temperature=0, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(64)))

    before = [server.engine.stats.generated_tokens for server in servers]
    assert asyncio.run(main()) == [after("a", 1 + i % 25) for i in range(64)]
    both = [server.engine.stats.generated_tokens - tokens for server, tokens in zip(servers, before, strict=True)]
    assert sum(both) >= sum(1 + i % 25 for i in range(64)) and min(both) > sum(both) / 4, "both did their part"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_vanishes(router, servers, shared_llm, other_llm, monkeypatch, stream):
    for llm in (shared_llm, other_llm):
        slow_down(monkeypatch, llm)
    before = sum(server.engine.stats.generated_tokens for server in servers)
    with socket.create_connection((router.base_url.host, router.base_url.port or 0)) as connection:
        body = json.dumps(LONG | {"stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while not any(server.engine.stats.num_running for server in servers):
            time.sleep(0.001)
    for server in servers:
        server.wait_idle()
    made = sum(server.engine.stats.generated_tokens for server in servers) - before
    assert made < 0.75 * LONG["max_tokens"], "the request went on without its client"


# ---- processes that end


SERVE = """
import sys, uvicorn
from jaxserve.serving.app import make_app
from jaxserve.serving.options import ServerOptions
from jaxserve.serving.async_llm import AsyncLLM
from scripts.bench.replay_engine import replay_llm
engine = AsyncLLM(replay_llm(max_num_seqs=8, step_seconds=0.01))
uvicorn.run(make_app(engine, ServerOptions(names=("replay",))), port=int(sys.argv[1]), log_level="warning")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def process(url: str, *command: str, **variables: str) -> Iterator[subprocess.Popen]:
    """A Python process that answers at url's /health, killed at the end. variables: of its environment."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    running = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert running.poll() is None and time.monotonic() < deadline, "the process did not start"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.05)
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.fixture(scope="module")
def survivor() -> Iterator[str]:
    """A server that stays."""
    app = make_app(AsyncLLM(replay_llm(max_num_seqs=8, step_seconds=0.01)), ServerOptions(names=("replay",)))
    with listening(app) as url:
        yield url


def text_of(lines: list[str]) -> str:
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))


def num_up(client: httpx.Client) -> int:
    return client.get("/health").json()["up"]


def wait_until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def chosen(client: httpx.Client) -> dict[str, float]:
    """How often each server has been chosen."""
    found = re.findall(r'^jaxserve_router:choices_total{.*server="(.*?)"} (\S+)$', client.get("/metrics").text, re.MULTILINE)
    return {server: sum(float(number) for s, number in found if s == server) for server, _ in found}


def prompt_known_to(client: httpx.Client, server: str) -> str:
    """A prompt that the server has been given, so that the next one like it goes there."""
    for _ in range(8):
        prompt, before = uuid.uuid4().hex * 20, chosen(client).get(server, 0)
        client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        if chosen(client).get(server, 0) > before:
            return prompt
    raise AssertionError("the server is never chosen")


@pytest.mark.slow
def test_servers_that_are_killed(survivor):
    """Mid-stream the client sees it and nothing is retried; back, it is used again; where it hangs another answers."""
    victim = f"http://127.0.0.1:{free_port()}"
    command = ("-c", SERVE, victim.rpartition(":")[2])
    with process(victim, *command) as running, routing(victim, survivor, check_timeout=1.5) as client:
        body = {"prompt": prompt_known_to(client, victim), "max_tokens": 200, "stream": True}
        received: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError), client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                received.append(line)
                running.kill()
        assert 0 < len(text_of(received)) < 200 and "data: [DONE]" not in received
        assert client.post("/v1/completions", json=body | {"stream": False}).status_code == 200
        wait_until(lambda: num_up(client) == 1)
        with process(victim, *command) as again:
            wait_until(lambda: num_up(client) == 2)
            body["prompt"] = prompt_known_to(client, victim)
            again.send_signal(signal.SIGSTOP)  # it takes the request, and never begins
            before = chosen(client)
            answer = client.post("/v1/completions", json=body, timeout=30)
            assert text_of(answer.text.split("\n\n")) == (FOX * 5)[:200] and answer.text.endswith("data: [DONE]\n\n")
            assert {server: chosen(client)[server] - before[server] for server in before} == {victim: 1, survivor: 1}


@pytest.mark.slow
def test_a_server_that_drains_gets_nothing_new(survivor):
    """After SIGTERM it ends what it has begun, and nobody notices."""
    victim = f"http://127.0.0.1:{free_port()}"
    with process(victim, "-c", SERVE, victim.rpartition(":")[2]) as running, routing(victim, survivor) as client:
        body = {"prompt": prompt_known_to(client, victim), "max_tokens": 100, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            received = [next(lines)]
            running.send_signal(signal.SIGTERM)
            served = [client.post("/v1/completions", json=body | {"max_tokens": 3, "stream": False}) for _ in range(8)]
            received += lines
        assert text_of(received) == (FOX * 3)[:100] and "data: [DONE]" in received
        assert {answer.json()["choices"][0]["text"] for answer in served} == {FOX[:3]}
        wait_until(lambda: running.poll() is not None)
        assert num_up(client) == 1


@pytest.mark.slow
def test_sigterm_ends_the_router_when_its_streams_have_ended(survivor):
    url = f"http://127.0.0.1:{free_port()}"
    flags = (f"--backends={survivor}", f"--port={url.rpartition(':')[2]}", "--noaccess_log")
    with process(url, "-m", "jaxserve.cli.router", *flags) as running:
        body = {"prompt": "a", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            received = [next(lines)]
            running.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses(url))
            assert running.poll() is None
            received += lines
        assert text_of(received) == (FOX * 3)[:100] and "data: [DONE]" in received
        assert running.wait(60) == 0


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # taken in by the system as the listener closed: asked again
        return False
    return False
