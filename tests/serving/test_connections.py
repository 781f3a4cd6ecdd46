"""What a connection may hold: header bytes and their time, requests sent ahead, answers that nobody reads, connections."""

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jaxserve.serving.connections import MAX_AHEAD, bounded
from jaxserve.serving.options import HTTPOptions
from tests.serving.http_server import listening

LARGE = 16 * 2**20  # bytes of an answer that no socket's buffers hold


async def said(request: Request) -> Response:
    return PlainTextResponse(f"{request.method} {len(await request.body())}")


async def early(request: Request) -> Response:
    """Answers without reading the body."""
    return PlainTextResponse("early")


async def large(_: Request) -> Response:
    return Response(b"x" * LARGE)


gone: list[str] = []  # what clients of /wait have left


async def wait(request: Request) -> Response:
    """Answers when its client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.append(request.url.path)
    return PlainTextResponse("late")


ROUTES = [
    Route("/wait", wait),
    Route("/", said, methods=["GET", "POST"]),
    Route("/early", early, methods=["POST"]),
    Route("/large", large),
]


@contextlib.contextmanager
def bounds(**limits: Any) -> Iterator[tuple[str, int]]:
    """Where a server with these limits listens."""
    with listening(Starlette(routes=ROUTES), http=bounded(HTTPOptions(**limits))) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


@pytest.fixture(scope="module")
def server():
    with bounds(max_header_bytes=2000, header_seconds=0.15) as address:
        yield address


def talk(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> bytes:
    """Sends the parts, and returns what comes until the server closes."""
    with socket.create_connection(address, timeout=30) as connection:
        with contextlib.suppress(OSError):  # the server may have closed before the end
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        return rest(connection)


def rest(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


ASK = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_headers_within_the_limit(server):
    answer = talk(server, ASK + b"X: " + b"a" * 1900 + b"\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"GET 0")


@pytest.mark.parametrize(
    "parts",
    [
        [ASK + b"X: " + b"a" * 2100 + b"\r\n\r\n"],
        [ASK + b"X: ", *[b"a" * 500] * 8],  # a value that never ends
        [ASK, *[b"X: aaaaaaaaa\r\n"] * 300],
        [ASK, *[b"".join(b"X%d:\r\n" % i for i in range(200))] * 3],
        [b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n"],
        [b"GET /", *[b"a" * 500] * 8],
        [b"\r\n" * 500] * 8,  # before any request
    ],
    ids=["value", "value-in-parts", "lines", "many", "url", "url-in-parts", "empty-lines"],
)
def test_headers_beyond_the_limit(server, parts):
    answer = talk(server, *parts, pause=0.002 if len(parts) < 100 else 0)
    assert answer.startswith(b"HTTP/1.1 431 ") and answer.endswith(b"are larger than 2000 bytes") or answer == b""
    assert answer or len(parts) > 1, "a server that has closed may be written to once"


@pytest.mark.parametrize(
    "parts",
    [
        [b"1;", *[b"a" * 500] * 8],
        [b"1\r\nx\r\n0\r\n", *[b"X: " + b"a" * 500 + b"\r\n"] * 8],
        [b"1\r\nx\r\n0\r\nX: ", *[b"a" * 500] * 8],
    ],
    ids=["extension", "trailers", "trailer-in-parts"],
)
def test_parts_of_a_body_that_are_none(server, parts):
    """They are no part of the body that the application sees, and are bounded as headers are."""
    answer = talk(server, CHUNKED, *parts, pause=0.002)
    assert b"200 OK" not in answer


def test_bodies_are_not_headers(server):
    body = b"".join(b"%x\r\n%s\r\n" % (500, b"a" * 500) for _ in range(20))
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert talk(server, head, body, b"0\r\n\r\n").endswith(b"POST 10000")


@pytest.mark.parametrize("parts", [[], [ASK], [b"GET"], [ASK + b"\r\n", b"\r\n"]], ids=["silent", "head", "method", "after"])
def test_headers_that_do_not_come(server, parts):
    """Also where some bytes come now and then: the time is counted from the first."""
    started = time.monotonic()
    with socket.create_connection(server, timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            connection.sendall(b"\r\n" if parts[1:] else b"X: a\r\n" if parts == [ASK] else b"")
        answer = rest(connection)
    assert time.monotonic() - started < 5, "uvicorn's own keep-alive is 5 s"
    assert answer == b"" if not parts else b"HTTP/1.1 408 " in answer


def test_a_body_whose_request_is_answered_ends_soon(server):
    answer = talk(server, b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
    assert answer.endswith(b"early") and b"408" not in answer, "one answer, and then the end"


def test_the_rest_of_an_answered_body_begins_no_endless_wait(server):
    """It ends the time that a connection may lie idle between two requests, and another begins."""
    head, rest_of_it = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nabc", b"abc"
    started = time.monotonic()
    assert talk(server, head, rest_of_it, pause=0.05).endswith(b"early") and time.monotonic() - started < 5


def test_requests_sent_ahead(server):
    """Some are answered in their order; too many are a client to be rid of."""
    last = ASK + b"Connection: close\r\n\r\n"
    assert talk(server, (ASK + b"\r\n") * (MAX_AHEAD - 1) + last).count(b"HTTP/1.1 200 OK\r\n") == MAX_AHEAD
    assert talk(server, (ASK + b"\r\n") * 5000 + last).count(b"HTTP/1.1 200 OK\r\n") <= MAX_AHEAD + 2


@pytest.mark.parametrize("behind", [b"", ASK + b"\r\n", b"\x00nonsense\r\n\r\n"], ids=["nothing", "request", "nonsense"])
def test_a_client_that_leaves_is_known_to_be_gone(server, behind, caplog):
    """Whatever it has sent behind the request that is under way."""
    gone.clear()
    with socket.create_connection(server) as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + behind)
        time.sleep(0.05)
    deadline = time.monotonic() + 30
    while not gone:
        assert time.monotonic() < deadline, "the request goes on"
        time.sleep(0.01)
    assert not [record for record in caplog.records if record.exc_info]


def test_nonsense_behind_a_request(server):
    """Never a second answer in the midst of the first."""
    answer = talk(server, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n\x00\x01nonsense\r\n\r\n")
    assert answer.count(b"HTTP/1.1") <= 1 and len(answer) < LARGE


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_other_protocols_are_not_spoken(server, protocol, caplog):
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: %s\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" % protocol
    answer = talk(server, ASK + upgrade + b"Sec-WebSocket-Version: 13\r\n\r\n")
    assert (
        answer.startswith(b"HTTP/1.1 200 OK\r\n")
        and answer.count(b"HTTP/1.1") == 1
        and not [r for r in caplog.records if r.name == "uvicorn.error"]
    )


def slow_reader(address: tuple[str, int], buffer: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(30)
    connection.connect(address)
    connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return connection


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_dropped():
    with bounds(patience=0.3) as address, slow_reader(address, 4096) as connection:
        time.sleep(1.0)
        assert len(rest(connection)) < LARGE, "the server has dropped the rest"


@pytest.mark.slow
def test_an_answer_that_is_read_slowly_arrives():
    """In several times the patience, never pausing for as long."""
    received = 0
    with bounds(patience=0.4) as address, slow_reader(address, 2**16) as connection:
        paused_at = 0
        while data := connection.recv(2**20):
            received += len(data)
            if received > paused_at + 1_500_000:
                paused_at = received
                time.sleep(0.1)
    assert received > LARGE


def test_too_many_connections():
    with bounds(max_connections=2) as address:
        with socket.create_connection(address), socket.create_connection(address) as second:
            answer = talk(address, ASK + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 10\r\n" in answer
            assert answer.endswith(b"2 connections are open; try again in 10 s")
            second.sendall(ASK + b"Connection: close\r\n\r\n")
            assert rest(second).endswith(b"GET 0")
        deadline = time.monotonic() + 30
        while not talk(address, ASK + b"Connection: close\r\n\r\n").endswith(b"GET 0"):
            assert time.monotonic() < deadline, "a connection that is gone counts"
