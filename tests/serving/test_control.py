"""API keys, limits of bodies, and weights in flight."""

import json
import re
import socket
from typing import Any

import httpx
import numpy as np
import pytest

from jaxserve.serving.app import make_app
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.control import ControlCall
from jaxserve.serving.fleet_answers import FleetAnswer, Said, answer_of_all
from jaxserve.serving.options import HTTPOptions, ServerOptions
from tests import alphabet_model
from tests.serving.calls import ok, refusal
from tests.serving.http_server import listening, serving, slow_down

KEY = "a key"


@pytest.fixture(scope="module")
def guarded(shared_llm, shared):
    """A second server, with a key, small limits and control; the shared one must be idle meanwhile: they share the model."""
    shared.wait_idle()
    options = {"api_keys": ("another", KEY), "enable_control": True, "max_body_bytes": 2000, "body_seconds": 0.5}
    with serving(shared_llm, options=options) as server:
        yield server


def with_key(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys(guarded):
    client = guarded.client
    for headers in ({}, with_key("wrong"), {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/pause"), ("GET", "/nothing")):
            response = client.request(method, path, headers=headers)
            assert refusal(response, 401)["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/metrics", "/version", "/"):
        assert client.get(path).status_code == 200
    for key in ("another", KEY):
        ok(client.get("/v1/models", headers=with_key(key)))


def test_bodies_too_large_and_too_slow(guarded):
    client = guarded.client
    large = {"prompt": "a" * 3000}
    assert "2000 bytes" in refusal(client.post("/v1/completions", json=large, headers=with_key()), 413)["message"]
    chunked = (b"x" * 500 for _ in range(6))  # no Content-Length
    headers = with_key() | {"content-type": "application/json"}
    refusal(client.post("/v1/completions", content=chunked, headers=headers), 413)
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        slow.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
        slow.settimeout(20)
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")


def test_control(guarded):
    client = guarded.client

    def post(path: str, /, **body: Any) -> httpx.Response:
        return client.post(path, json=body, headers=with_key())

    ok(post("/pause"))
    assert "jaxserve:engine_paused" in client.get("/metrics").text
    with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}, headers=with_key()) as response:
        assert response.status_code == 200  # and leaves before there is a token
    ok(post("/resume"))
    guarded.wait_idle()
    assert ok(post("/v1/completions", prompt="a", temperature=0, max_tokens=3))["choices"][0]["text"] == "bcd"
    assert ok(post("/reset_prefix_cache")) == {"status": "ok", "success": True}
    assert refusal(post("/reset_prefix_cache?reset_running_requests=true"))["param"] == "query.reset_running_requests"
    ok(post("/reset_prefix_cache?reset_running_requests=false"))
    refusal(post("/sleep", level=3))
    refusal(client.post("/sleep", content=b" null", headers=with_key() | {"content-type": "application/json"}))
    refusal(post("/update_weights_from_path", path="/nothing/there"))

    def slept(operation: str) -> float:
        line = rf'^jaxserve:sleep_mode_operation_duration_seconds_count{{operation="{operation}"}} (\S+)'
        found = re.search(line, client.get("/metrics").text, re.M)
        return float(found[1]) if found else 0

    before = slept("sleep"), slept("wake")
    ok(client.post("/sleep", headers=with_key()))  # no body: level 1
    ok(post("/wake_up"))
    ok(post("/sleep", level=1))
    assert "asleep" in refusal(post("/v1/completions", prompt="a"), 503)["message"]
    ok(post("/wake_up"))
    assert (slept("sleep"), slept("wake")) == (before[0] + 2, before[1] + 2)
    assert ok(post("/v1/completions", prompt="a", temperature=0, max_tokens=3))["choices"][0]["text"] == "bcd"


def test_weights_change_in_flight(guarded, shared_llm, folder, tmp_path, monkeypatch):
    """The new checkpoint's head maps each token to the one two after it."""
    tensors = alphabet_model.weights()
    tensors["lm_head.weight"] = np.roll(tensors["lm_head.weight"], 1, axis=0).copy()
    other = alphabet_model.save(tmp_path / "other", tensors=tensors)

    def text() -> str:
        body = {"prompt": "a", "temperature": 0, "max_tokens": 3}
        return ok(guarded.client.post("/v1/completions", json=body, headers=with_key()))["choices"][0]["text"]

    def update(path, **body: Any) -> httpx.Response:
        return guarded.client.post("/update_weights_from_path", json={"path": str(path)} | body, headers=with_key())

    assert text() == "bcd"
    ok(update(other))
    assert text() == "ceg"
    slow_down(monkeypatch, shared_llm)
    body = {"prompt": "a", "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with guarded.client.stream("POST", "/v1/completions", json=body, headers=with_key()) as response:
        lines = response.iter_lines()  # kept: a generator that ends closes the connection
        next(lines)
        assert "in flight" in refusal(update(folder), 409)["message"]
        ok(update(folder, in_flight="recompute"))
    guarded.wait_idle()
    assert text() == "bcd"


def test_answers_name_their_weights(guarded, shared_llm, folder, tmp_path, monkeypatch):
    """A token's distance from the one before it tells which weights sampled it."""
    tensors = alphabet_model.weights()
    tensors["lm_head.weight"] = np.roll(tensors["lm_head.weight"], 1, axis=0).copy()
    other = alphabet_model.save(tmp_path / "other", tensors=tensors)
    client, ask = guarded.client, {"prompt": "a", "temperature": 0, "max_tokens": 200, "ignore_eos": True}

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return ok(client.post(path, json=body, headers=with_key()))

    def version_now() -> set[str]:
        info = ok(client.get("/weight_info", headers=with_key()))
        return {info["weight_version"], client.get("/health").json()["weight_version"], guarded.engine.stats.weight_version}

    first = post("/update_weights_from_path", {"path": str(folder), "weight_version": "one"})
    assert first == {"status": "ok", "weight_version": "one"}
    assert version_now() == {"one"} and "jaxserve:weight_updates_total" in client.get("/metrics").text
    assert post("/v1/completions", ask)["choices"][0]["weight_versions"] == [{"version": "one", "start": 0, "end": 200}]
    slow_down(monkeypatch, shared_llm)
    token_ids, spans = list(b"a"), []
    body = ask | {"stream": True, "return_token_ids": True}
    with client.stream("POST", "/v1/completions", json=body, headers=with_key()) as response:
        for line in response.iter_lines():
            if line in ("", "data: [DONE]"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            token_ids += choice["token_ids"]
            if len(token_ids) == 4:
                post("/pause?mode=keep", {})  # so that it has not ended when the weights are read
                done = post("/update_weights_from_path", {"path": str(other), "weight_version": "two", "in_flight": "recompute"})
                assert done["weight_version"] == "two" and post("/resume", {})
            assert ("weight_versions" in choice) is (choice["finish_reason"] is not None)
            spans = choice.get("weight_versions", [])
    assert [span["version"] for span in spans] == ["one", "two"] and spans[1]["end"] == 200
    distances = np.diff(token_ids) % alphabet_model.VOCABULARY
    assert distances.tolist() == [1] * spans[0]["end"] + [2] * (200 - spans[1]["start"])
    chat = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "ignore_eos": True})
    assert chat["choices"][0]["weight_versions"] == [{"version": "two", "start": 0, "end": 2}]
    named = post("/update_weight_version", {"new_version": "2"})
    assert named == {"status": "ok", "success": True, "weight_version": "2", "new_version": "2"} and version_now() == {"2"}
    sampling = {"max_tokens": 2, "ignore_eos": True}
    tokens = post("/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling})
    assert tokens["choices"][0]["weight_versions"] == [{"version": "2", "start": 0, "end": 2}]
    for wrong in ("", "x" * 129):
        refusal(client.post("/update_weight_version", json={"new_version": wrong}, headers=with_key()))
    post("/update_weights_from_path", {"path": str(folder)})
    guarded.wait_idle()


def asked_otherwise(client: httpx.Client, **headers: str) -> list[dict[str, Any]]:
    """A message and a response, each whole and as the last events of a stream; greedy, so that none ends before its two tokens."""
    chats = {
        "/v1/messages": {"model": "alphabet", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0},
        "/v1/responses": {"input": "a", "max_output_tokens": 2, "store": False, "temperature": 0},
    }
    found = []
    for path, body in chats.items():
        found.append(ok(client.post(path, json=body, headers=headers)))
        events = client.post(path, json=body | {"stream": True}, headers=headers).text
        said = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]
        found += [event.get("response", event) for event in said if event["type"] in ("message_delta", "response.incomplete")]
    assert len(found) == 4
    return found


def test_the_other_apis_name_the_weights_too(guarded):
    ok(guarded.client.post("/update_weight_version", json={"new_version": "one"}, headers=with_key()))
    for answer in asked_otherwise(guarded.client, **with_key()):
        assert answer["weight_versions"] == [{"version": "one", "start": 0, "end": 2}]


def test_weights_that_cannot_change_are_not_named(server):
    answer = ok(server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}))
    assert "weight_versions" not in answer["choices"][0] and "weight_version" not in server.client.get("/health").json()
    assert not [answer for answer in asked_otherwise(server.client) if "weight_versions" in answer]


def test_a_call_of_several_is_passed_on_to_all(shared_llm, shared):
    """One of two is real here, and answers by the routes of its own."""
    shared.wait_idle()
    other = Said(200, {"status": "ok"})

    async def ask_all(call: ControlCall) -> tuple[int, FleetAnswer]:
        own = Said.of(*await call.ask(app.state.controls))
        return answer_of_all({"own": own, "other": other})

    options = ServerOptions(names=("alphabet",), api_keys=(KEY,), enable_control=True)
    app = make_app(AsyncLLM(shared_llm), options, one_of_several="replicas", ask_all=ask_all)
    with listening(app) as url, httpx.Client(base_url=url, headers=with_key(), timeout=60) as client:
        assert client.post("/pause", headers={"Authorization": ""}).status_code == 401
        done = {"status": 200, "answer": {"status": "ok"}}
        paused, resumed = ({"status": 200, "answer": {"status": word}} for word in ("paused", "resumed"))
        assert ok(client.post("/pause?mode=keep")) == {"status": "ok", "servers": {"own": paused, "other": done}}
        assert ok(client.get("/is_paused"))["servers"]["own"]["answer"] == {"is_paused": True}
        ok(client.post("/resume"))
        assert ok(client.get("/is_paused"))["servers"]["own"]["answer"] == {"is_paused": False}
        named = ok(client.post("/update_weight_version", json={"new_version": "one"}))
        assert named["servers"]["own"]["answer"]["weight_version"] == "one" and "weight_version" not in named
        ok(client.post("/update_weight_version", json={"new_version": "0"}))  # as it was: others share this engine
        assert client.get("/pause").status_code == 502 and client.delete("/pause").status_code == 405
        wrong = client.post("/update_weight_version", json={"new_version": ""})
        said = wrong.json()["servers"]["own"]
        assert wrong.status_code == 502 and said["status"] == 400 and "new_version" in said["answer"]["error"]["message"]
        other = Said(error="it is gone")
        gone = client.post("/resume")
        assert gone.status_code == 502 and gone.json()["servers"] == {"own": resumed, "other": {"error": "it is gone"}}
    with pytest.raises(ValueError, match="enable_control: not with several replicas"):
        make_app(AsyncLLM(shared_llm), options, one_of_several="replicas")


def test_control_is_off_unless_asked_for(server):
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights_from_path"):
        refusal(server.client.post(path, json={}), 404)


def test_options_are_checked():
    with pytest.raises(ValueError, match="must hold one name at least"):
        ServerOptions(names=())
    with pytest.raises(ValueError, match="an API key must not be empty"):
        ServerOptions(names=("a",), api_keys=("",))
    for name in ("max_body_bytes", "body_seconds", "patience"):
        limit: dict[str, Any] = {name: 0}
        with pytest.raises(ValueError, match=f"{name}=0 must be above 0"):
            HTTPOptions(**limit)
    with pytest.raises(ValueError, match="give api_keys too"):
        ServerOptions(names=("a",), enable_control=True)
