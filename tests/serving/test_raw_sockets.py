"""Requests as no client would send them: split, slow, half-closed, ahead of each other, with sizes that are none. Whatever comes is
answered with a 4xx or as it should be, or the connection is closed; nothing is left, and the server serves on.

RAW_REQUESTS is the number of cases, RAW_SEED the first one's seed. `make fuzz-api` tries 10,000.
"""

import collections
import os
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.serving.app import make_app
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.connections import bounded
from jaxserve.serving.options import ServerOptions
from tests.alphabet_model import after
from tests.serving.calls import complete, ok
from tests.serving.http_server import Server, listening
from tests.serving.raw_requests import Answer, RawCase, answers, case, play

CASES = int(os.environ.get("RAW_REQUESTS", 400))
SEED = int(os.environ.get("RAW_SEED", 0))
WORKERS = 16
LIMITS: dict[str, Any] = {"max_header_bytes": 8192, "max_body_bytes": 8192, "max_held_bytes": 16384}
SOON: dict[str, Any] = {"header_seconds": 0.3, "body_seconds": 0.3, "patience": 1.0}


@pytest.fixture(scope="module")
def server(shared_llm):
    options, engine = ServerOptions(names=("alphabet",), **LIMITS | SOON), AsyncLLM(shared_llm)
    app = make_app(engine, options)
    with listening(app, http=bounded(options), timeout_keep_alive=1) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Server(url, engine, client)


def num_sockets() -> int:
    """Sockets that this process has open, the server's among them."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(link).startswith("socket:")
        except FileNotFoundError:
            pass
    return found


def check(given: RawCase, received: bytes | None) -> list[int]:
    """The statuses of a case's answers. AssertionError where an answer is none that may be."""
    try:
        found: list[Answer] = answers(received or b"")
    except ValueError as error:
        raise AssertionError(f"seed {given.seed}: {error}: {received!r:.3000}") from error
    for answer in found:
        redirects = answer.status == 307 and answer.headers.get("location", "").startswith(".")  # of a slash too many
        assert redirects or 200 <= answer.status < 300 or 400 <= answer.status < 500, f"seed {given.seed}: {answer}"
    return [answer.status for answer in found]


@pytest.mark.slow
def test_whatever_comes(server: Server, caplog: pytest.LogCaptureFixture):
    host, port = server.url.removeprefix("http://").split(":")
    ok(complete(server))
    server.client.close()  # its connection must not be counted
    before = num_sockets_when_idle()

    def one(seed: int) -> list[int]:
        given = case(seed)
        try:
            return check(given, play((host, int(port)), given))
        except TimeoutError:
            raise AssertionError(f"seed {seed}: neither an answer nor an end: {given}") from None

    with ThreadPoolExecutor(WORKERS) as pool:
        statuses = collections.Counter(status for found in pool.map(one, range(SEED, SEED + CASES)) for status in found)
    assert {200, 400, 404, 405, 408, 413, 431} <= set(statuses), statuses  # that many ways are tried
    server.wait_idle()
    deadline = time.monotonic() + 60
    while num_sockets() > before:
        assert time.monotonic() < deadline, f"{num_sockets()} sockets are open, {before} were"
        time.sleep(0.05)
    faults = {"".join(traceback.format_exception(record.exc_info[1])) for record in caplog.records if record.exc_info}
    assert not faults, "no case is a fault of ours:\n" + "\n".join(faults)
    serves_on(server)


def num_sockets_when_idle() -> int:
    """Once keep-alive connections have ended: 5 s."""
    count, since = num_sockets(), time.monotonic()
    while time.monotonic() - since < 1.0:
        if (now := num_sockets()) < count:
            count, since = now, time.monotonic()
        time.sleep(0.05)
    return count


def serves_on(server: Server) -> None:
    """A request as large as may be held: whatever is still counted as held would refuse it."""
    body: dict[str, Any] = {"prompt": "a", "temperature": 0, "max_tokens": 4, "user": "x" * 8000}
    for _ in range(2):
        answer = ok(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))
        assert answer["choices"][0]["text"] == after("a", 4)
    server.wait_idle()


def test_cases_are_made_from_their_seeds():
    assert [case(seed) for seed in range(50)] == [case(seed) for seed in range(50)]
    assert len({b"".join(piece for piece, _ in case(seed).parts) for seed in range(200)}) > 190


@pytest.mark.parametrize(
    "received, said",
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 400 Bad\r\ncontent-length: 0\r\n\r\n", [200, 400]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", [200]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\na", [200]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nHTTP/1.1 400 Bad\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nabc", None),
        (b"nonsense", None),
    ],
)
def test_the_reader_knows_an_answer(received, said):
    """An answer in the midst of another, and bytes behind one, are seen."""
    if said is None:
        with pytest.raises(ValueError):
            answers(received)
    else:
        assert [answer.status for answer in answers(received)] == said
