"""The router in front of scripted servers: what passes through, what is retried, who is asked, and what is counted."""

import asyncio
import contextlib
import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import fastapi
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.routing.app import CONTROL_PATHS, make_router
from jaxserve.routing.health import BackendHealth
from jaxserve.routing.options import RouterOptions
from jaxserve.routing.prompts import BLOCK_BYTES, prompt_blocks
from jaxserve.serving.control import control_routes
from tests.serving.http_server import listening
from tests.serving.scripted_server import BREAK, Scripted, scripted

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ASKED = {"prompt": "x" * 1000}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextlib.contextmanager
def routing(*servers: Scripted, **options: Any) -> Iterator[httpx.Client]:
    """A client of a router in front of the servers."""
    checked = {"check_seconds": 0.05, **options}
    router = make_router(RouterOptions(backends=tuple(server.url for server in servers), **checked))
    with listening(router, date_header=False, server_header=False) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def two() -> Iterator[tuple[Scripted, Scripted]]:
    with scripted() as a, scripted() as b:
        yield a, b


def value(client: httpx.Client, name: str, **labels: str) -> float:
    lines = re.findall(rf"^jaxserve_router:{name}({{.*}})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return sum(float(number) for given, number in lines if all(f'{k}="{v}"' in given for k, v in labels.items()))


def ask(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/completions", json=ASKED | body)


def num_asked(*servers: Scripted) -> list[int]:
    return [len(server.requests) for server in servers]


# ---- passing through


def test_a_request_and_its_answer_pass_unchanged(two):
    server, _ = two
    packed = gzip.compress(b"\x00\xffnot text")
    server.script = [
        b"HTTP/1.1 203 Odd\r\nDate: then\r\nServer: mine\r\nX-Two: 1\r\nX-Two: 2\r\nSet-Cookie: a=b\r\nContent-Encoding: gzip\r\n"
        b"Connection: X-Hop\r\nX-Hop: dropped\r\nContent-Length: %d\r\n\r\n%s" % (len(packed), packed)
    ]
    with routing(server) as client:
        headers = [("X-Mine", "1"), ("x-mine", "2"), ("Authorization", "Bearer k"), ("TE", "trailers"), ("Accept-Encoding", "gzip")]
        headers += [("User-Agent", "me"), ("Connection", "close, x-none"), ("X-None", "dropped"), ("X-Request-Id", "mine-1")]
        with client.stream("PUT", "/a%2Fb//c;d?q=%20z&&", content=b"\x00{", headers=headers) as answer:
            body = b"".join(answer.iter_raw())
    assert answer.status_code == 203 and body == packed
    got = sorted(answer.headers.multi_items())
    assert got == sorted(
        [("date", "then"), ("server", "mine"), ("x-two", "1"), ("x-two", "2"), ("set-cookie", "a=b"), ("content-encoding", "gzip")]
        + [("content-length", str(len(packed))), ("connection", "close"), ("x-request-id", "mine-1")]
    )
    ((head, sent),) = server.requests
    first, *lines = head.decode().split("\r\n")
    assert first == "PUT /a%2Fb//c;d?q=%20z&& HTTP/1.1" and sent == b"\x00{"
    assert sorted(line for line in lines if line) == sorted(
        ["x-mine:1", "x-mine:2", "authorization:Bearer k", "accept-encoding:gzip", "user-agent:me", "x-request-id:mine-1"]
        + ["accept:*/*", "content-length:2", f"host:{server.url.removeprefix('http://')}"]
    )


def test_a_stream_passes_as_it_comes(two):
    """Byte for byte, comments and odd line ends too, and each piece before the server writes the next."""
    server, _ = two
    pieces = [b"data: {\xc3", b"\xa9}\n\n: a comment\n\n", b"data: [DONE]\r\n\r\n"]
    gates = [threading.Event(), threading.Event()]
    server.script = [HEAD, chunk(pieces[0]), gates[0], chunk(pieces[1]), gates[1], chunk(pieces[2]), b"0\r\n\r\n"]
    with routing(server) as client, client.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as answer:
        received = []
        for data, gate in zip(answer.iter_raw(), [*gates, threading.Event()], strict=True):
            received.append(data)
            gate.set()
    assert received == pieces and answer.headers["content-type"] == "text/event-stream"


def test_answers_without_a_body(two):
    server, _ = two
    with routing(server) as client:
        server.script = [b"HTTP/1.1 204 No Content\r\n\r\n"]
        assert client.get("/nothing").status_code == 204
        server.script = [b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n"]
        assert client.head("/v1/models").headers["content-length"] == "7"
        server.script = [b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /there\r\ncontent-length: 0\r\n\r\n"]
        assert client.get("/here").headers["location"] == "/there"


def test_a_large_body_goes_through_and_a_larger_one_does_not(two):
    server, _ = two
    with routing(server, max_body_bytes=3 * 2**20) as client:
        large = {"prompt": "y" * (2**21)}
        assert client.post("/v1/completions", json=large).status_code == 200
        assert json.loads(server.requests[0][1]) == large
        assert client.post("/v1/completions", json={"prompt": "y" * 2**22}).status_code == 413


# ---- what goes wrong


def test_broken_off_before_the_first_byte_another_is_asked(two):
    a, b = two
    a.script = [HEAD, BREAK]  # the status came, and nothing of the answer
    with routing(a, b) as client:
        assert ask(client).json() == {"served by": b.url} and value(client, "prompt_blocks_total") == 1002 // BLOCK_BYTES
        assert num_asked(a, b) == [1, 1] and a.requests[0][1] == b.requests[0][1]
        assert value(client, "unanswered_total", server=a.url) == 1 and value(client, "server_requests") == 0


def test_broken_off_mid_stream_the_client_sees_it_and_nothing_is_retried(two):
    a, b = two
    for head, first in ((HEAD, chunk(b"data: 1\n\n")), (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b"short")):
        passed = threading.Event()
        a.script = [head, first, passed, BREAK]
        with routing(a, b) as client:
            with pytest.raises(httpx.RemoteProtocolError), client.stream("POST", "/v1/completions", json=ASKED) as answer:
                for _ in answer.iter_raw():
                    passed.set()
            assert passed.is_set() and not b.requests and value(client, "broken_answers_total", server=a.url) == 1
    assert num_asked(a, b) == [2, 0]


def test_a_request_that_breaks_servers_is_not_given_to_all_of_them(two):
    with scripted() as c:
        for server in (*two, c):
            server.script = [BREAK]
        with routing(*two, c) as client:
            answer = ask(client)
            assert answer.status_code == 502 and "2 servers broke off" in answer.json()["error"]["message"]
            assert sum(num_asked(*two, c)) == 2


def test_a_server_that_refuses_is_passed_over(two):
    a, b = two
    a.answer({"full": "a"}, "429 Too Many Requests", "retry-after: 7")
    with routing(a, b) as client:
        assert ask(client).json() == {"served by": b.url}
        b.answer({"full": "b"}, "503 Service Unavailable")
        for server in two:
            server.requests.clear()
        assert ask(client).status_code in (429, 503), "all refuse: one of their answers"
        assert num_asked(a, b) == [1, 1] and value(client, "refused_total") == 3
        a.answer({"bad": 1}, "400 Bad Request")
        for server in two:
            server.requests.clear()
        assert ask(client).status_code == 400
        assert len(a.requests) == 1, "what the client did wrong is not tried again"


def test_nobody_is_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = Scripted(f"http://127.0.0.1:{taken.getsockname()[1]}")
    with routing(closed) as client:
        for answer in (ask(client), client.get("/health")):
            assert answer.status_code == 503 and "none of the 1 servers" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]


def test_a_client_that_leaves_hangs_up_on_the_server(two):
    server, _ = two
    with routing(server) as client:
        for script in ([HEAD, chunk(b"data: 1\n\n"), 20.0], [20.0]):  # amid a stream, and before there is anything
            server.script, before = script, server.num_hung_up
            with (
                contextlib.suppress(httpx.ReadTimeout),
                client.stream("POST", "/v1/completions", json=ASKED, timeout=5 if HEAD in script else 1) as answer,
            ):
                next(answer.iter_raw())
            deadline = time.monotonic() + 60
            while server.num_hung_up == before:
                assert time.monotonic() < deadline, "the server never heard that the client had gone"
                time.sleep(0.01)
        assert value(client, "server_requests") == 0 and value(client, "http_requests_total", status="499") == 1


def test_a_reader_that_takes_nothing_is_let_go(two):
    server, _ = two
    server.script = [HEAD, *[chunk(b"x" * 2**20)] * 64, 20.0]
    with routing(server, patience=0.3) as client, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((client.base_url.host, client.base_url.port))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        deadline = time.monotonic() + 60
        while not server.requests or value(client, "server_requests"):
            assert time.monotonic() < deadline, "the slow reader holds its server for ever"
            time.sleep(0.05)


# ---- health


def test_health_in_words():
    health = BackendHealth(max_failures=3, min_successes=2)
    assert not health.up
    health.succeed()
    assert health.up, "the first answer decides"
    for event, up in [("fail", 1), ("fail", 1), ("answer", 1), ("fail", 1), ("fail", 1), ("fail", 0), ("succeed", 0), ("fail", 0)]:
        getattr(health, event)()
        assert health.up == bool(up), event
    for event, up in [("succeed", 0), ("succeed", 1), ("refuse", 0), ("answer", 0), ("answer", 0), ("succeed", 0), ("succeed", 1)]:
        getattr(health, event)()
        assert health.up == bool(up), event
    late = BackendHealth(max_failures=3, min_successes=2)
    late.fail()
    late.succeed()
    assert not late.up
    with pytest.raises(ValueError, match="max_failures=0"):
        BackendHealth(0, 1)


def test_an_ill_server_gets_nothing_until_it_is_well(two):
    a, b = two
    with routing(a, b) as client:

        def becomes(server, *, up: bool) -> None:
            server.healthy = up
            deadline = time.monotonic() + 60
            while value(client, "server_up", server=server.url) != up:
                assert time.monotonic() < deadline, f"{server.url} stays {'down' if up else 'up'}"
                time.sleep(0.005)

        assert client.get("/health").json() == {"status": "ok", "servers": 2, "up": 2}
        becomes(a, up=False)
        assert client.get("/health").json()["up"] == 1
        for _ in range(4):
            assert ask(client).json() == {"served by": b.url}
        becomes(a, up=True)
        becomes(b, up=False)
        assert ask(client).json() == {"served by": a.url}
        becomes(a, up=False)
        assert client.get("/health").status_code == 503 and ask(client).status_code == 503


def test_a_server_that_keeps_failing_is_out(two):
    """Meanwhile whoever was sent there is answered elsewhere."""
    a, b = two
    with routing(a, b, check_seconds=30) as client:
        b.script = [BREAK]
        assert {ask(client, prompt=str(i)).json()["served by"] for i in range(12)} == {a.url}
        assert len(b.requests) == 3 and value(client, "server_up", server=b.url) == 0


def test_a_server_that_comes_back_is_a_new_one(two):
    """What it had cached is gone."""
    a, b = two
    with routing(a, b) as client:
        served = a if ask(client).json()["served by"] == a.url else b
        assert ask(client).json() == {"served by": served.url}
        served.healthy = False
        served.next_checks(2)
        served.healthy = True
        served.next_checks(3)
        assert ask(client).status_code == 200 and value(client, "choices_total", reason="prefix") == 1


# ---- who is asked


def test_equal_prefixes_meet(two):
    with routing(*two) as client:
        shared = "s" * (10 * BLOCK_BYTES)
        first = ask(client, prompt=shared + "1").json()
        assert ask(client, prompt="other").json() != first, "in turn, where nothing else speaks"
        again = [ask(client, prompt=shared + str(i)).json() for i in range(5)]
        assert again == [first] * 5
        assert value(client, "choices_total", reason="prefix") == 5 and value(client, "matched_blocks_total") == 50
        assert value(client, "prompt_blocks_total") == 60


def test_load_is_what_servers_say_and_what_was_sent_since(two):
    a, b = two
    a.waiting, a.running = 1, 2
    with routing(a, b, check_seconds=0.05) as client:
        assert value(client, "server_waiting", server=a.url) == 1 and value(client, "server_running", server=a.url) == 2
        assert {ask(client, prompt=str(i)).json()["served by"] for i in range(6)} == {b.url}
        b.waiting = 2
        b.next_checks(2)
        assert {ask(client, prompt=str(i)).json()["served by"] for i in range(6)} == {a.url}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_load_that_is_no_number_says_nothing(two, number):
    a, _ = two
    a.waiting = 5
    with routing(a, check_seconds=0.02) as client:
        a.next_checks(2)
        a.waiting = number
        a.next_checks(2)
        assert value(client, "server_waiting") == 5 and ask(client).status_code == 200


def test_requests_under_way_count_until_the_next_check(two):
    a, b = two
    with routing(a, b, check_seconds=30) as client:
        for server in two:
            server.script = [HEAD, chunk(b"data: 1\n\n"), 20.0]
        with contextlib.ExitStack() as streams:
            for i in range(6):
                streams.enter_context(client.stream("POST", "/v1/completions", json={"prompt": str(i)}))
            assert num_asked(a, b) == [3, 3] and value(client, "server_running") == 6
        deadline = time.monotonic() + 60
        while value(client, "server_running"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def blocks_of(**body: Any) -> list[bytes]:
    return prompt_blocks("/v1/completions", json.dumps(body).encode())


def test_blocks_of_a_prompt():
    text = "word " * 200
    one = blocks_of(prompt=text + "a")
    assert len(one) == (len(text) + 3) // BLOCK_BYTES and blocks_of(prompt=text + "b", max_tokens=3, temperature=0)[:3] == one[:3]
    assert not set(blocks_of(prompt=text, cache_salt="s")) & set(one) and not set(blocks_of(prompt=text, model="m")) & set(one)
    assert blocks_of(prompt=[*range(500)])[:4] == blocks_of(prompt=[*range(400)])[:4] != []
    said = [{"role": "system", "content": text}, {"role": "user", "content": "hello"}]
    more = [*said, {"role": "assistant", "content": "hi"}, {"role": "user", "content": text}]

    def chat(messages: list, **body: Any) -> list[bytes]:
        return prompt_blocks("/v1/chat/completions", json.dumps({"messages": messages, **body}).encode())

    assert chat(said) == chat(more)[: len(chat(said))] != []
    assert not set(chat(said, tools=[{"type": "function"}])) & set(chat(said))
    assert prompt_blocks("/tokenize", json.dumps({"prompt": text}).encode()) == [] == blocks_of(max_tokens=1)


@given(st.text(), st.text(), st.text(), st.integers(1, 30))
def test_equal_beginnings_have_equal_blocks(shared, one, other, times):
    shared = shared * 20 * times
    blocks = blocks_of(prompt=shared + one), blocks_of(prompt=shared + other)
    least = (len(json.dumps(shared)) - 1) // BLOCK_BYTES  # without the quote that ends it
    assert blocks[0][:least] == blocks[1][:least] and min(map(len, blocks)) >= least


def test_json_that_is_too_deep_has_no_blocks():
    assert prompt_blocks("/v1/completions", b'{"prompt": ' + b"[" * 100_000) == []


@given(st.binary(max_size=BLOCK_BYTES))
def test_nonsense_has_no_blocks(body):
    assert prompt_blocks("/v1/completions", body) == []


# ---- keys, control, options


def test_keys(two):
    server, _ = two
    with routing(server, api_keys=("mine",)) as client:
        assert ask(client).status_code == 401 and not server.requests
        assert client.get("/health").status_code == 200
        client.headers["Authorization"] = "Bearer mine"
        assert ask(client).status_code == 200 and b"\r\nauthorization:Bearer mine\r\n" in server.requests[0][0]
    with routing(server, api_keys=("mine",), backend_api_key="theirs") as client:
        server.requests.clear()
        assert ask(client).status_code == 401
        client.headers["Authorization"] = "Bearer mine"
        assert ask(client).status_code == 200
        assert b"\r\nauthorization:Bearer theirs\r\n" in server.requests[0][0] and b"mine" not in server.requests[0][0]


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_the_routers_own_routes_are_its_own(two, path):
    """They need no key: nothing of them may reach a server, with the key that the router has there."""
    server, _ = two
    with routing(server, api_keys=("mine",), backend_api_key="theirs") as client:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            answer = client.request(method, path, headers={"Authorization": "Bearer mine"})
            assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"
            assert client.request(method, path).status_code in (401, 405)
        assert client.get(path).status_code == 200 and not server.requests


def test_control_is_refused(two):
    server, _ = two
    app = fastapi.FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    control_routes(app, None, None)  # type: ignore[arg-type]
    assert sorted(CONTROL_PATHS) == sorted(getattr(route, "path", "") for route in app.routes)
    with routing(server) as client:
        for path in (*CONTROL_PATHS, "/%70ause"):
            answer = client.post(path, json={})
            assert answer.status_code == 403 and "send it to each of them" in answer.json()["error"]["message"]
        assert not server.requests


def test_a_target_that_is_no_path_goes_nowhere(two):
    """Behind "http://host:port" anything but a path would name another host."""
    server, _ = two
    with routing(server) as client, socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
        connection.sendall(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 4") and not server.requests
    scope = {"type": "http", "method": "GET", "path": "/@x", "raw_path": b"%2F@x", "query_string": b"", "headers": []}
    sent: list[Any] = []
    body = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return body.pop() if body else await asyncio.Future()  # the client waits

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(make_router(RouterOptions(backends=(server.url,)))(scope, receive, send))
    assert sent[0]["status"] == 400 and b"is no path" in sent[1]["body"]


def test_options_are_checked():
    for backends in ((), ("http://a:1", "http://a:1")):
        with pytest.raises(ValueError, match="must name one server at least, none twice"):
            RouterOptions(backends=backends)
    for url in ("a:1", "ftp://a:1", "http://", "http://a:1/v1", "http://a:1/"):
        with pytest.raises(ValueError, match="must be an address such as"):
            RouterOptions(backends=(url,))
    with pytest.raises(ValueError, match="policy='x' must be one of prefix_aware"):
        RouterOptions(backends=("http://a:1",), policy="x")
    with pytest.raises(ValueError, match="patience=-1 must be above 0"):
        RouterOptions(backends=("http://a:1",), patience=-1)
    with pytest.raises(ValueError, match="min_successes=0"):
        RouterOptions(backends=("http://a:1",), min_successes=0)
