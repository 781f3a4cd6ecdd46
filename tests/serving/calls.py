"""What the tests of a server say to it, and how its answers are read."""

import json
from typing import Any

import httpx

from tests.serving.http_server import Server


def complete(server: Server, prompt: Any = "tea", **body: Any) -> httpx.Response:
    return server.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 4} | body)


def chat(server: Server, said: Any = "tea", **body: Any) -> httpx.Response:
    messages = said if isinstance(said, list) else [{"role": "user", "content": said}]
    return server.client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 4} | body)


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended as OpenAI's do."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(e.startswith("data: ") for e in events[:-1])
    return [json.loads(e.removeprefix("data: ")) for e in events[:-2]]
