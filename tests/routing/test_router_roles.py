"""The router in front of scripted prefill and decode servers: who computes a prompt, and what follows where nobody does."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.serving.handover import PREFILL_HEADER, STORED_HEADER
from tests.routing.test_router import HEAD, ask, chunk, num_asked, routing, value
from tests.serving.scripted_server import BREAK, Scripted, scripted

TOLD = "7:" + "ab" * 32
LONG = {"prompt": "x" * 5000}


@contextlib.contextmanager
def servers(*roles: str) -> Iterator[list[Scripted]]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(scripted()) for _ in roles]
        for server, role in zip(made, roles, strict=True):
            server.role = role
            if role == "prefill":
                server.answer({"object": "prefill"}, "200 OK", f"{STORED_HEADER}: {TOLD}")
        yield made


def header(server: Scripted, name: str, index: int = -1) -> str | None:
    head = server.requests[index][0].decode()
    found = [line.partition(":")[2] for line in head.split("\r\n") if line.partition(":")[0] == name]
    assert len(found) < 2
    return found[0] if found else None


def test_a_long_prompt_is_computed_elsewhere_first():
    with servers("prefill", "decode") as (p, d), routing(p, d) as client:
        assert client.get("/health").json()["up_by_role"] == {"prefill": 1, "decode": 1}
        answer = client.post("/v1/completions", json=LONG, headers={STORED_HEADER: "a client's", PREFILL_HEADER: "2"})
        assert answer.json() == {"served by": d.url} and num_asked(p, d) == [1, 1]
        assert json.loads(p.requests[0][1]) == json.loads(d.requests[0][1]) == LONG
        assert (header(p, PREFILL_HEADER), header(p, STORED_HEADER)) == ("1", None)
        assert (header(d, PREFILL_HEADER), header(d, STORED_HEADER)) == (None, TOLD)
        assert header(p, "x-request-id") == header(d, "x-request-id") == answer.headers["x-request-id"]
        assert value(client, "prefills_total", result="stored") == 1
        assert value(client, "server_role", server=p.url, role="prefill") == 1


def test_what_is_short_or_cached_is_not():
    with servers("prefill", "decode") as (p, d), routing(p, d) as client:
        ask(client, prompt="x" * 1500)
        client.get("/v1/models")
        client.post("/tokenize", json=LONG)
        assert num_asked(p, d) == [0, 3]
        client.post("/v1/completions", json=LONG)
        client.post("/v1/completions", json={"prompt": LONG["prompt"] + "y" * 500})  # of which the decode server has 5,000
        assert num_asked(p, d) == [1, 5] and header(d, STORED_HEADER) is None
    with servers("prefill", "") as (p, d), routing(p, d, min_prefill_bytes=0) as client:
        ask(client, prompt="x" * 300)  # a server without a role decodes, too
        assert num_asked(p, d) == [1, 1] and header(d, STORED_HEADER) == TOLD


@pytest.mark.parametrize("script", ["breaks", "fails", "refuses"])
def test_a_prompt_that_no_prefill_server_computes(script: str):
    """It goes to its decode server all the same."""
    with servers("prefill", "prefill", "decode") as (p, q, d), routing(p, q, d, check_seconds=30) as client:
        for server in (p, q):
            if script == "breaks":
                server.script = [BREAK]
            else:
                server.answer({"error": 1}, "503 Unavailable" if script == "refuses" else "400 Bad Request")
        assert client.post("/v1/completions", json=LONG).json() == {"served by": d.url}
        assert header(d, STORED_HEADER) is None and value(client, "prefills_total", result="failed") == 1
        assert sum(num_asked(p, q)) == (1 if script == "fails" else 2)


def test_another_prefill_server_is_asked():
    with servers("prefill", "prefill", "decode") as (p, q, d), routing(p, q, d) as client:
        p.script = [BREAK]
        for i in range(2):  # each is the first in turn once
            client.post("/v1/completions", json={"prompt": str(i) * 5000})
        assert [header(d, STORED_HEADER, i) for i in range(2)] == [TOLD] * 2


def test_a_role_without_a_partner(caplog: Any):
    with servers("prefill", "prefill") as made, routing(*made) as client:
        for answer in (client.post("/v1/completions", json=LONG), client.get("/health")):
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == (
                "no server generates (2 of 2 are up, with --role=prefill): start one with --role=decode"
            )
        assert num_asked(*made) == [0, 0] and caplog.text.count("no server generates") == 1
    with servers("prefill", "decode") as (p, d), routing(p, d) as client:
        p.healthy = False
        p.next_checks(2)
        assert client.post("/v1/completions", json=LONG).json() == {"served by": d.url}
        ask(client)
        assert caplog.text.count("decode servers compute prompts themselves") == 1 and value(client, "prefills_total") == 0


def test_a_client_that_leaves_hangs_up_on_the_prefill_server():
    with servers("prefill", "decode") as (p, d), routing(p, d) as client:
        p.script = [HEAD, 20.0, chunk(b"x")]
        with pytest.raises(Exception, match="timed out"):
            client.post("/v1/completions", json=LONG, timeout=0.5)
        while not p.num_hung_up:
            p.next_checks()
        assert not d.requests and value(client, "server_requests") == value(client, "server_running") == 0


def test_requests_whose_prompt_is_computed_count_for_their_decode_server():
    with servers("prefill", "decode", "decode") as (p, *both), routing(p, *both, check_seconds=30) as client:
        p.script = [HEAD, 20.0]
        with pytest.raises(Exception, match="timed out"):
            client.post("/v1/completions", json=LONG, timeout=0.3)
        p.answer({}, "200 OK", f"{STORED_HEADER}: {TOLD}")
        for i in range(4):
            client.post("/v1/completions", json={"prompt": str(i) * 5000})
        assert num_asked(*both) == [2, 2]
