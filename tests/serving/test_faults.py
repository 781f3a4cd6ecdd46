"""What goes wrong around a server: clients that vanish, read slowly or come all at once, failing steps and tokenizers, signals."""

import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.request import Request
from jaxserve.serving.streaming import KEEP_ALIVE, EventStream
from jaxserve.serving.streams import RequestStream
from jaxserve.text.tokenizer import Tokenizer
from tests import alphabet_model
from tests.alphabet_model import after
from tests.serving.http_server import Server, serving, slow_down, steps_until_pages_are_back

LONG = {"prompt": "a", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
SHORT = {"prompt": "a", "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def shared(shared_llm):
    with serving(shared_llm, max_waiting=60) as server:
        yield server


@pytest.fixture
def server(shared):
    yield shared
    shared.wait_idle()
    assert shared.client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == "bcde", "it serves on"


def connect(server: Server, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion was asked for."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_vanishes(server, llm, monkeypatch, stream):
    slow_down(monkeypatch, llm)
    steps = steps_until_pages_are_back(monkeypatch, llm)
    with connect(server, LONG | {"stream": stream}) as connection:
        if stream:
            assert b"data: " in connection.recv(4096) + connection.recv(4096)
        while not server.engine.stats.num_running:
            time.sleep(0.001)
    server.wait_idle()
    assert len(steps) == 1 and steps[0] <= 2


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_silent_streams_have_comments(shared_llm, monkeypatch, path):
    """Where a server was told so: between the events, which are the same. A client that vanishes meanwhile is noticed."""
    said = SHORT if path == "completions" else {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 4}
    said = {"input": "a", "temperature": 0, "max_output_tokens": 4} if path == "responses" else said
    with serving(shared_llm, options={"sse_keep_alive_interval": 0.05}) as server:
        url = f"/v1/{path}"
        plain = server.client.post(url, json=said | {"stream": True}).text
        slow_down(monkeypatch, shared_llm, 0.15)
        parts = server.client.post(url, json=said | {"stream": True}).text.split("\n\n")
        comments = [part for part in parts if part == ": keep-alive"]
        assert len(comments) >= 4 and len(parts) - len(comments) == len(plain.replace(": keep-alive\n\n", "").split("\n\n"))
        assert all(part == ": keep-alive" or not part or "data: " in part for part in parts)
        with server.client.stream("POST", url, json=said | {"stream": True}) as stream:
            assert next(stream.iter_raw())
        server.wait_idle()


@pytest.mark.parametrize("gone", [False, True])
def test_a_client_that_takes_no_comment_leaves_nothing_running(gone):
    """A comment is being sent when patience runs out, or the client vanishes: the events are at work on the next."""
    ends = []

    async def events():
        try:
            yield b"data: first\n\n"
            await asyncio.sleep(60)
        finally:
            ends.append("events")

    async def receive():
        await asyncio.sleep(0.2 if gone else 60)
        return {"type": "http.disconnect"}

    async def send(message):
        if message.get("body") == KEEP_ALIVE:
            await asyncio.sleep(60)

    async def answer() -> None:
        stream = EventStream(events(), lambda: ends.append("stream"), patience=60 if gone else 0.1, keep_alive=0.05)
        await stream({"type": "http"}, receive, send)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(asyncio.wait_for(answer(), 20))
    assert ends == ["events", "stream"]


def test_a_client_vanishes_while_it_waits(server, llm, monkeypatch):
    slow_down(monkeypatch, llm)
    first = [connect(server, LONG) for _ in range(4)]
    waiting = connect(server, LONG)
    while not server.engine.stats.num_waiting:
        time.sleep(0.001)
    for connection in (waiting, *first):
        connection.close()
    server.wait_idle()


def test_a_slow_reader_holds_up_nobody_and_is_let_go(shared_llm):
    """It takes nothing of a stream larger than what the sockets hold: the requests end, and in time so does its connection."""
    with serving(shared_llm, options={"patience": 0.3}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            body = json.dumps(LONG | {"n": 8, "logprobs": 20, "stream": True}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            slow.sendall(head.encode() + body)
            answer = server.client.post("/v1/completions", json=SHORT).json()
            assert answer["choices"][0]["text"] == "bcde"
            server.wait_idle()
            deadline = time.monotonic() + 60
            while _num_completions(server) < 2:  # a request is counted when it has ended
                assert time.monotonic() < deadline, "the slow reader's request never ended"
                time.sleep(0.05)


def _num_completions(server: Server) -> float:
    wanted = 'jaxserve:http_requests_total{path="/v1/completions"'
    lines = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith(wanted)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def broken(*_, **__):
    raise RuntimeError("broken on purpose")


def test_a_step_raises(server, llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "fetch", broken)
        response = server.client.post("/v1/completions", json=SHORT)
        assert response.status_code == 500 and "broken on purpose" in response.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200
    assert "step_failures_total" in server.client.get("/metrics").text


@pytest.mark.parametrize("fault", [ValueError, NotImplementedError, LookupError, TypeError])
def test_our_own_faults_are_not_the_clients(server, monkeypatch, caplog, fault):
    """While a request is checked a ValueError refuses it. Behind that it is a bug: 500, logged with where it came from."""

    def faulty(*_):
        raise fault("ours")

    with monkeypatch.context() as patch:
        patch.setattr("jaxserve.serving.completions._CompletionAnswer._choice", faulty)
        response = server.client.post("/v1/completions", json=SHORT)
        streamed = server.client.post("/v1/completions", json=SHORT | {"stream": True})
    assert response.status_code == 500 and response.json()["error"]["message"] == f"internal error: {fault.__name__}"
    assert f"internal error: {fault.__name__}" in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
    assert sum(record.exc_info is not None and record.exc_info[0] is fault for record in caplog.records) == 2
    server.wait_idle()


def test_a_step_raises_mid_stream(server, llm, monkeypatch):
    """The status has been sent: the error is an event, and the stream ends as streams do."""
    slow_down(monkeypatch, llm)
    with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        assert "choices" in next(lines)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "fetch", broken)
            rest = [line for line in lines if line]
    assert response.status_code == 200 and rest[-1] == "data: [DONE]"
    assert "broken on purpose" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]


def test_steps_that_keep_raising_make_the_server_unhealthy(shared_llm, monkeypatch):
    with serving(shared_llm, max_failures=2) as server:
        monkeypatch.setattr(shared_llm.engine.runner, "fetch", broken)
        for _ in range(2):
            assert server.client.get("/health").status_code == 200
            assert server.client.post("/v1/completions", json=SHORT).status_code == 500
        refused = server.client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503 and "2 steps in a row failed" in refused.json()["error"]["message"]
        assert server.client.get("/health").status_code == 503


def test_the_tokenizer_raises(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", broken)
        response = server.client.post("/v1/completions", json=SHORT)
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        assert server.client.post("/v1/completions", json=SHORT | {"prompt": [97]}).status_code == 200


def test_a_deadline(shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm)
    with serving(shared_llm, request_timeout=0.3) as server:
        response = server.client.post("/v1/completions", json=LONG)
        assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
        server.wait_idle()


def test_more_than_may_wait(server):
    """64 samples run or wait at most; what comes on top is told when to come again, and all others get every token."""

    async def main():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=SHORT | {"max_tokens": 12}) for _ in range(150)))

    responses = asyncio.run(main())
    served = [r for r in responses if r.status_code == 200]
    refused = [r for r in responses if r.status_code == 429]
    assert len(served) + len(refused) == 150 and len(served) >= 64 and refused
    assert {r.json()["choices"][0]["text"] for r in served} == {after("a", 12)}
    assert all(1 <= int(r.headers["retry-after"]) <= 60 for r in refused)


def test_64_streams_lose_no_token(server):
    async def one(client: httpx.AsyncClient, letter: str, num_tokens: int) -> bool:
        body = {"prompt": letter, "temperature": 0, "max_tokens": num_tokens, "stream": True}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text == after(letter, num_tokens)

    async def main():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, "abcdefgh"[i % 8], 5 + i % 19) for i in range(64)))

    assert all(asyncio.run(main()))


def requests_in_memory() -> list[Any]:
    gc.collect()
    return [left for left in gc.get_objects() if isinstance(left, RequestStream | Request)]


def test_random_requests_leave_nothing_behind(server):
    """Valid and invalid ones, streams, and clients that leave: answers are 200, 400, 404 or 429, never 500, and pages come back.
    (10,000 of them, and the server's memory, are scripts.soak's: `make soak`.)"""
    rng = random.Random(0)
    statuses: set[int] = set()
    others = requests_in_memory()  # of this process's other tests

    async def one(client: httpx.AsyncClient, body: dict[str, Any], patience: float | None) -> None:
        try:
            async with asyncio.timeout(patience):
                statuses.add((await client.post("/v1/completions", json=body)).status_code)
        except TimeoutError:
            pass

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            for _ in range(12):
                await asyncio.gather(*(one(client, random_body(rng), rng.choice([None, None, 0.01])) for _ in range(25)))

    asyncio.run(main())
    assert statuses <= {200, 400, 404, 429} and {200, 400} <= statuses
    server.wait_idle()
    known, deadline = set(map(id, others)), time.monotonic() + 30
    while left := [request for request in requests_in_memory() if id(request) not in known]:  # a task may still end
        assert time.monotonic() < deadline, f"something remembers {left}"
        time.sleep(0.05)


def random_body(rng: random.Random) -> dict[str, Any]:
    """A completion request that may be all right."""
    choices: dict[str, list[Any]] = {
        "prompt": ["a", "tea", ["a", "b"], [97, 98], [[97], [98]], "", [], 7, "x" * 300, [9999], None],
        "max_tokens": [1, 5, 40, 200, 0, "5"],
        "temperature": [0, 1, 2.5, -1, True],
        "n": [1, 2, 5, 0],
        "logprobs": [None, 0, 3, 99],
        "stream": [True, False, "yes"],
        "echo": [True, False],
        "stop": [None, "c", ["d", "e"], ""],
        "min_tokens": [0, 2, 1000],
        "model": ["alphabet", "other"],
        "top_k": [-1, 5, 1.5],
        "logit_bias": [None, {"97": 5}, {"x": 1}],
        "presence_penalty": [0, 1, 3],
        "unknown": [1],
    }
    names = rng.sample(sorted(choices), rng.randint(0, 4))
    good = {"prompt": "a", "max_tokens": 8}
    return good | {
        name: rng.choice(values if rng.random() < 0.3 else values[:2]) for name, values in choices.items() if name in names
    }


def test_malformed_http(server):
    host, port = server.url.removeprefix("http://").split(":")
    for raw in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"G" * 200_000,
    ):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            try:
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
            except OSError:  # the server closed first
                continue
            assert not answer or answer.startswith(b"HTTP/1.1 4")


@pytest.mark.slow
def test_sigterm_mid_stream(folder, tmp_path):
    """A stream under way ends as if nothing had happened; new connections are refused; the exit code is 0."""
    with ScriptServer(folder, tmp_path) as server:
        body = {"prompt": "!", "temperature": 0, "max_tokens": 90, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            received = [first, *lines]
        assert "data: [DONE]" in received
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in received if line.startswith("data: {"))
        assert text == after("!", 90)
        assert server.process.wait(30) == 0, server.log.read_text()
        assert "Traceback" not in server.log.read_text()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


class ScriptServer:
    """`python -m jaxserve.cli.serve` on a free port."""

    def __init__(self, folder: Path, tmp_path: Path, *flags: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = tmp_path / "serve.log"
        options = ("--max_num_seqs=2", "--max_num_batched_tokens=16", "--num_pages=64", "--page_size=8", "--warm_up=first_use")
        command = [sys.executable, "-m", "jaxserve.cli.serve", f"--model={folder}", f"--port={port}", *options, *flags]
        root = Path(__file__).parents[2]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(tmp_path)}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)

    def __enter__(self) -> "ScriptServer":
        deadline = time.monotonic() + 60
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.1)

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.mark.slow
def test_a_folder_without_a_tokenizer_cannot_be_served(tmp_path):
    """What is missing is said, and the options with which it can be."""
    server = ScriptServer(alphabet_model.save(tmp_path / "bare", tokenizer=False), tmp_path)
    try:
        assert server.process.wait(60) == 1
    finally:
        server.__exit__()
    log = server.log.read_text()
    assert "bare has no tokenizer.json" in log and "(--tokenizer says where one lies, --skip_tokenizer_init does without)" in log
    assert "Traceback" not in log


def test_threads_end_with_the_server(shared_llm):
    before = {thread.name for thread in threading.enumerate()}
    with serving(shared_llm) as server:
        server.client.get("/health")
    deadline = time.monotonic() + 60
    while left := {t.name for t in threading.enumerate() if t.name.startswith("jaxserve")} - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
