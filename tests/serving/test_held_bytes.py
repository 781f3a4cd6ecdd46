"""What requests make the server hold beside their samples: bodies of all of them together, JSON that is meant to hurt, labels."""

import json
import time

import httpx
import pytest

from jaxserve.serving.options import HTTPOptions
from tests.serving.calls import complete, ok, refusal
from tests.serving.http_server import serving, slow_down

LONG = {"prompt": "a", "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}


def test_bodies_of_all_requests_are_bounded(shared_llm, shared, monkeypatch):
    """Until a request ends, a stream's last event included; whole bodies and those that come in chunks."""
    shared.wait_idle()
    slow_down(monkeypatch, shared_llm)
    with serving(shared_llm, options={"max_body_bytes": 3000, "max_held_bytes": 5000}) as server:
        with server.client.stream("POST", "/v1/completions", json=LONG | {"user": "x" * 2500}) as stream:
            lines = stream.iter_lines()  # kept: a generator that ends closes the connection
            next(lines)
            body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 2500}).encode()
            for content in (body, iter((body[:2000], body[2000:]))):
                headers = {"content-type": "application/json"}
                response = server.client.post("/v1/completions", content=content, headers=headers)
                assert "bytes, of at most 5000" in refusal(response, 429)["message"] and response.headers["retry-after"] == "1"
            ok(complete(server, "a"))
        server.wait_idle()
        deadline = time.monotonic() + 60
        while server.client.post("/v1/completions", content=body, headers=headers).status_code != 200:
            assert time.monotonic() < deadline, "a request that has ended is held"  # a little later than its client thinks
    with pytest.raises(ValueError, match="max_held_bytes=1 must be at least max_body_bytes=2"):
        HTTPOptions(max_held_bytes=1, max_body_bytes=2)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": 1e999999}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": '
        + b'{"items":' * 3000
        + b"{}"
        + b"}" * 3000
        + b"}}}",
        b'{"prompt": "\\ud800"}',
        b'{"input": [[null, null]], "messages": [[null]], "prompt": [[null]]}',
        b'\xef\xbb\xbf{"prompt": "a"}\x00',
    ],
    ids=["open", "lists", "objects", "digits", "exponent", "nan", "schema", "surrogate", "no-objects", "bytes"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
def test_json_that_is_meant_to_hurt(server, path, body):
    response = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text[:500]
    assert len(response.content) < 5000


def test_metrics_do_not_grow_with_what_is_asked(server):
    def num_lines() -> int:
        return len(server.client.get("/metrics").text.splitlines())

    ask = [("GET", "/nothing"), ("POST", "/nothing"), ("GET", "/v1/responses/resp_x"), ("GET", "/v1/models/x")]
    for method, path in ask:
        server.client.request(method, path)
    num_lines()  # which counts itself from the second time on
    before = num_lines()
    for i in range(50):
        for method, path in ask:
            server.client.request(method, f"{path}{i}", headers={"user-agent": f"{i}", "x-request-id": f"{i}"})
    assert num_lines() == before


def test_content_of_another_type_is_read_as_json_or_refused(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/xml"):
        response = httpx.post(
            f"{server.url}/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind}, timeout=60
        )
        assert response.status_code == 400, kind
