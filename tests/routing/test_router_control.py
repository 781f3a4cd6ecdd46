"""Control calls through a router: every server gets them, and the answer and /health say what each of them said."""

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.routing.app import make_router
from jaxserve.routing.options import RouterOptions
from tests import alphabet_model
from tests.routing.test_router import num_asked, routing, value
from tests.serving.http_server import listening, serving
from tests.serving.scripted_server import BREAK, Scripted, scripted

KEY = {"Authorization": "Bearer mine"}
NEW = {"path": "/new", "weight_version": "two"}


@contextlib.contextmanager
def controlled(*versions: str, **options: Any) -> Iterator[tuple[list[Scripted], httpx.Client]]:
    """Servers whose weights have these versions, and a router's client."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(scripted()) for _ in versions]
        for server, version in zip(servers, versions, strict=True):
            server.weight_version = version
            server.answer({"status": "ok", "weight_version": "two"})
        given = {"api_keys": ("mine",), "enable_control": True, "check_seconds": 30} | options
        yield servers, stack.enter_context(routing(*servers, **given))


def update(client: httpx.Client) -> httpx.Response:
    return client.post("/update_weights_from_path?x=1", json=NEW, headers=KEY)


def test_all_servers_get_the_call():
    with controlled("one", "one", backend_api_key="theirs") as (servers, client):
        assert client.get("/health").json()["weight_versions"] == {server.url: "one" for server in servers}
        answer = update(client)
        assert answer.status_code == 200
        said = {"status": 200, "answer": {"status": "ok", "weight_version": "two"}}
        assert answer.json() == {"status": "ok", "servers": {s.url: said for s in servers}, "weight_version": "two"}
        for server in servers:
            ((head, body),) = server.requests
            assert head.startswith(b"POST /update_weights_from_path?x=1 ") and json.loads(body) == NEW
            assert b"authorization:Bearer theirs" in head
        assert client.get("/health").json()["weight_versions"] == {server.url: "two" for server in servers}, "without a check"
        assert value(client, "server_requests") == 0


def test_the_calls_run_at_once():
    """Each server answers only when the other has been asked."""
    with controlled("", "") as (servers, client):
        asked = [threading.Event() for _ in servers]
        for server, mine, other in zip(servers, asked, reversed(asked), strict=True):
            server.on_request = mine.set
            server.script = [other, *server.script]
        assert client.post("/pause", headers=KEY).status_code == 200


@pytest.mark.parametrize(
    "first, second, status",
    [("409 Conflict", "200 OK", 502), ("404 Not Found", "404 Not Found", 404), (None, "200 OK", 502), (None, None, 502)],
)
def test_one_that_does_not_do_it_is_named(first: str | None, second: str | None, status: int):
    with controlled("one", "one") as (servers, client):
        for server, said in zip(servers, (first, second), strict=True):
            if said is None:
                server.script = [BREAK]
            elif said != "200 OK":
                server.answer({"error": {"message": "no"}}, said)
        answer = update(client)
        assert answer.status_code == status and answer.json()["status"] == "error" and num_asked(*servers) == [1, 1]
        for server, said in zip(servers, (first, second), strict=True):
            its = answer.json()["servers"][server.url]
            assert its["error"] if said is None else its["status"] == int(said[:3])
        versions = client.get("/health").json()["weight_versions"]
        assert versions == {s.url: "two" if said == "200 OK" else "one" for s, said in zip(servers, (first, second), strict=True)}


def test_a_server_that_is_down_is_asked_too():
    """It may be asleep, and be woken by this; and one that comes back with older weights is seen."""
    with controlled("one", "one", check_seconds=0.05) as (servers, client):
        servers[0].healthy = False
        servers[0].next_checks(2)
        assert update(client).status_code == 200 and num_asked(*servers) == [1, 1]
        servers[1].weight_version = "two"
        servers[0].healthy = True  # with the weights that it was started with
        servers[0].next_checks(4)
        assert client.get("/health").json()["weight_versions"] == {servers[0].url: "one", servers[1].url: "two"}


def test_prefixes_are_forgotten_where_their_kv_is():
    with controlled("one", "one") as (_, client):
        for path, matched in (("/pause", True), ("/update_weights_from_path", False)):
            client.post("/v1/completions", json={"prompt": "x" * 5000}, headers=KEY)
            before = value(client, "matched_blocks_total")
            assert client.post(path, json=NEW, headers=KEY).status_code == 200
            client.post("/v1/completions", json={"prompt": "x" * 5000}, headers=KEY)
            assert (value(client, "matched_blocks_total") > before) is matched


def test_it_takes_a_key():
    with pytest.raises(ValueError, match="weights of all servers: give api_keys too"):
        RouterOptions(backends=("http://127.0.0.1:1",), enable_control=True)
    with controlled("one") as (servers, client):
        assert client.post("/pause").status_code == 401 and not servers[0].requests


@pytest.mark.slow
def test_two_servers_change_their_weights_by_one_call(tmp_path, folder):
    """Engines, servers and router in one process: answers before and after name their weights, and are those weights'."""
    tensors = alphabet_model.weights()
    tensors["lm_head.weight"] = np.roll(tensors["lm_head.weight"], 1, axis=0).copy()  # the letter after the next
    other = alphabet_model.save(tmp_path / "other", tensors=tensors)
    options = {"api_keys": ("mine",), "enable_control": True}
    body = {"prompt": "a", "temperature": 0, "max_tokens": 3}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(LLM(folder, max_model_len=64), options=options)) for _ in range(2)]
        router = make_router(RouterOptions(backends=tuple(s.url for s in servers), policy="round_robin", **options))
        url = stack.enter_context(listening(router, date_header=False, server_header=False))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60, headers=KEY))

        def answers() -> set[tuple[str, str]]:
            choices = [client.post("/v1/completions", json=body).json()["choices"][0] for _ in range(4)]
            return {(choice["text"], choice["weight_versions"][0]["version"]) for choice in choices}

        assert answers() == {("bcd", "0")}
        done = client.post("/update_weights_from_path", json={"path": str(other), "weight_version": "step-1"}).json()
        assert done["weight_version"] == "step-1" and list(done["servers"]) == [s.url for s in servers]
        assert answers() == {("ceg", "step-1")}
        refused = client.post("/update_weights_from_path", json={"path": "/nothing/there"})
        assert refused.status_code == 400 and answers() == {("ceg", "step-1")}
