"""Bodies that are large and allowed: what can't be served is refused early, the rest read beside the event loop: streams go on."""

import contextlib
import json
import operator
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import jaxserve.serving as serving_package
from jaxserve.serving import bodies
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from tests.alphabet_model import BOS, TURN, backend, ids
from tests.serving.calls import chat, complete, ok, refusal
from tests.serving.http_server import Server, serving, slow_down

STREAM = {"prompt": "a", "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}


class Flow:
    """A stream of another client, which takes at least a second: `chunks` counts what has come of it."""

    def __init__(self, server: Server):
        self.chunks = 0
        self._thread = threading.Thread(target=self._read, args=(server.url,))
        self._thread.start()
        self.wait(1)

    def _read(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=60) as response:
            for line in response.iter_lines():
                self.chunks += line.startswith("data: {")

    def wait(self, chunks: int) -> None:
        deadline = time.monotonic() + 60
        while self.chunks < chunks:
            assert time.monotonic() < deadline, "the other stream stands still"
            time.sleep(0.002)

    def end(self) -> None:
        self._thread.join(60)


@pytest.fixture
def flow(server, shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm, 0.01)
    flow = Flow(server)
    yield flow
    flow.end()


def while_it_flows(flow: Flow, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, which goes on only when the other stream has brought something: the event loop must be free meanwhile."""

    def held(*args, **kwargs):
        flow.wait(flow.chunks + 2)
        return work(*args, **kwargs)

    return held


@contextlib.contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch, *texts: str) -> Iterator[list[str]]:
    """None of these is tokenised before the `with` ends. Yields those with which it has begun."""
    encode, begun, go_on = Tokenizer.encode, list[str](), threading.Event()

    def held(tokenizer, text, *args):
        if text in texts:
            begun.append(text)
            assert go_on.wait(120), "held for too long"
        return encode(tokenizer, text, *args)

    monkeypatch.setattr(Tokenizer, "encode", held)
    try:
        yield begun
    finally:
        go_on.set()


def until(ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def never(*_, **__):
    raise AssertionError("looked at though it must be refused")


def test_a_list_of_more_prompts_than_there_is_room_for_is_not_tokenised(server, flow, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", never)
    many = ["a"] * 250_000  # 1 MB
    for body, num_samples in (({}, 250_000), ({"n": 2}, 500_000)):
        assert f"{num_samples} samples in one call can't be held" in refusal(complete(server, many, **body))["message"]
    flow.wait(flow.chunks + 2)


def test_a_long_list_is_tokenised_while_others_stream(server, flow, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", while_it_flows(flow, Tokenizer.encode))
    answer = ok(complete(server, ["a" * 200] * 30, max_tokens=1))
    assert [choice["text"] for choice in answer["choices"]] == ["b"] * 30


def test_a_text_that_cannot_fit_is_not_tokenised(server, monkeypatch):
    """256 tokens of at most 8 bytes, a special token's."""
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", never)
        said = "tokens have 2048 at most"
        assert said in refusal(complete(server, TURN * 256 + "a"))["message"]
        assert said in refusal(chat(server, "a" * 1_000_000))["message"]
    assert "256 tokens" in refusal(complete(server, TURN * 256))["message"]
    ok(server.client.post("/tokenize", json={"prompt": "a" * 10_000}))


def test_a_long_chat_is_rendered_while_others_stream(server, flow, monkeypatch):
    monkeypatch.setattr(ChatTemplate, "render", while_it_flows(flow, ChatTemplate.render))
    messages = [{"role": "user", "content": "a"}] * 200
    assert "max_model_len" in refusal(chat(server, messages))["message"]
    assert ok(server.client.post("/tokenize", json={"messages": messages}))["count"] == 801


LONG_MESSAGES = {"max_tokens": 1, "messages": [{"role": "user", "content": "a" * bodies.LONG}]}


def test_long_bodies_are_read_while_others_stream(server, flow, monkeypatch):
    for path, body, reads in (
        ("/v1/chat/completions", LONG_MESSAGES, "bodies.read_json"),
        ("/v1/completions", {"prompt": "a", "stop": [{}] * bodies.LONG}, "bodies.read_json"),
        ("/v1/messages", LONG_MESSAGES, "dialects.anthropic.to_chat"),
        ("/v1/responses", {"input": "a" * bodies.LONG}, "dialects.responses.to_chat"),
    ):
        work: Any = operator.attrgetter(reads)(serving_package)
        with monkeypatch.context() as patch:
            patch.setattr(f"jaxserve.serving.{reads}", while_it_flows(flow, work))
            message = server.client.post(path, json=body | {"model": "alphabet"}).json()["error"]["message"]
        assert "characters" in message or "stop: Input should be a valid string" in message


def test_reading_of_a_long_body_goes_on_value_by_value():
    """In Python, so that a thread hands the interpreter's lock over between two of them; and to the same values."""
    value = [{"a": [1, -2.5e3, True, None, 'ü\n"\U0001f600'], "b": {}}, [], "x" * 1000] * (bodies.INTERRUPTIBLE // 1000)
    body, num_calls = json.dumps(value).encode(), 0

    def count(_, event, __):
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        assert bodies.read_json(body) == value
    finally:
        sys.setprofile(None)
    assert num_calls > 3 * len(value)
    for wrong in (body[:-1], body + b"}", body.replace(b"true", b"tru", 1), b"\xff" * 2 * len(body)):
        with pytest.raises(ValueError):  # as of json.loads
            bodies.read_json(wrong)


@pytest.mark.parametrize("made", ["[]", "{}"])
def test_a_body_of_too_many_objects(server, made):
    body = '{"prompt": "a", "tools": [' + f"{made}," * bodies.MAX_CONTAINERS + f"{made}]}}"
    response = server.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert "more than 262144 objects and lists" in refusal(response)["message"]


USER, PART = {"role": "user", "content": "a"}, {"type": "text", "text": "a"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
TOO_LONG = [
    ("/v1/chat/completions", {"messages": [USER] * 4097}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * 1025}]}, "messages"),
    ("/v1/chat/completions", {"messages": [USER], "tools": [FUNCTION] * 1025}, "tools"),
    ("/v1/chat/completions", {"messages": [USER], "documents": [{}] * 1025}, "documents"),
    ("/v1/chat/completions", {"messages": [USER], "documents": [{str(i): "a" for i in range(65)}]}, "documents"),
    ("/v1/chat/completions/batch", {"messages": [[USER]] * 1025}, "messages"),
    ("/v1/completions", {"prompt": [[1]] * 4097}, "prompt"),
    ("/v1/responses", {"input": [USER] * 4097}, "input"),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "f"}] * 1025}, "tools"),
    ("/v1/messages", {"messages": [USER] * 4097, "max_tokens": 1}, "messages"),
    ("/v1/messages", {"messages": [USER], "max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}] * 1025}, "tools"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [PART] * 1025}], "max_tokens": 1}, "messages"),
]


@pytest.mark.parametrize("path, body, field", TOO_LONG)
def test_lists_are_bounded(server, path, body, field):
    answer = server.client.post(path, json=body | {"model": "alphabet"})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(field) and "should have at most" in message and len(message) < 1000


def test_a_long_list_of_another_kind_makes_one_error(server):
    """Not one an element for each alternative that a prompt could have been."""
    tokens = ok(server.client.post("/detokenize", json={"tokens": ids("ab") * 3000}))
    assert tokens["prompt"] == "ab" * 3000
    message = refusal(server.client.post("/v1/completions", json={"prompt": [*[1] * 5000, None, None]}))["message"]
    assert len(message) < 1000 and "5000" in message


def test_a_deadline_counts_what_reading_takes(server, monkeypatch):
    """And does not wait for its end."""
    with held_back(monkeypatch, "a") as begun:
        error = refusal(complete(server, "a", max_tokens=1, user="x" * 5000, timeout=0.5), 504)
        assert begun == ["a"], "reading goes on"
    assert error["code"] == "deadline_exceeded" and "longer than 0.5 s" in error["message"]


def test_what_is_read_takes_its_room_meanwhile(shared_llm, monkeypatch):
    with (
        serving(shared_llm, max_waiting=0) as server,  # 4 run
        ThreadPoolExecutor(1) as pool,
    ):
        with held_back(monkeypatch, "a") as begun:
            first = pool.submit(complete, server, ["a"] * 4, max_tokens=1, user="x" * 5000)
            until(lambda: begun)
            message = refusal(complete(server, "b", max_tokens=1, user="x" * 5000), 429)["message"]
            assert "4 samples are running or waiting, of at most 4" in message and begun == ["a"]
        assert len(ok(first.result(30))["choices"]) == 4
        with held_back(monkeypatch, "a"):
            refusal(complete(server, ["a"] * 4, max_tokens=1, user="x" * 5000, timeout=0.1), 504)
            ok(complete(server, ["b"] * 4, max_tokens=1))  # nobody waits for the others any more
        server.wait_idle()


def test_no_request_waits_for_tokenize(server, monkeypatch):
    """Nor does a reader for one whose client has left."""
    texts = [letter * 5000 for letter in "xyz"]
    with ThreadPoolExecutor(2) as pool:
        with held_back(monkeypatch, *texts) as begun:
            answers = [pool.submit(server.client.post, "/tokenize", json={"prompt": text}) for text in texts[:2]]
            until(lambda: begun)
            with pytest.raises(httpx.ReadTimeout):
                server.client.post("/tokenize", json={"prompt": texts[2]}, timeout=0.3)
            until(lambda: re.search(r'http_requests_total.*"/tokenize",status="499"', server.client.get("/metrics").text))
            ok(complete(server, ["a"] * 2, max_tokens=1, user="x" * 5000))
            assert len(begun) == 1
        assert [ok(answer.result(30))["count"] for answer in answers] == [5000, 5000]
    assert sorted(begun) == texts[:2]


@pytest.mark.parametrize(
    "changes, most",
    [
        ({}, 8),
        ({"normalizer": {"type": "NFC"}}, 32),
        ({"normalizer": {"type": "Lowercase"}}, None),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}}, None),
        ({"lstrip": True}, None),
        ({"without": "Z"}, None),
    ],
)
def test_the_longest_token(changes, most):
    """Texts within it are never refused: where something can vanish there is no bound."""
    import tokenizers

    said = json.loads(backend().to_str())
    said |= {name: value for name, value in changes.items() if name in ("normalizer", "pre_tokenizer")}
    said["added_tokens"][0]["lstrip"] = changes.get("lstrip", False)
    vocab = said["model"]["vocab"]
    vocab.pop(changes.get("without"), None)
    made = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(said)), special_tokens={"bos_token": BOS})
    assert made.max_token_bytes == most


def test_per_request_deadlines(shared_llm, monkeypatch):
    """Within the server's own."""
    slow_down(monkeypatch, shared_llm)
    with serving(shared_llm, request_timeout=0.3) as server:
        for timeout, ends in ((0.1, 0.1), (60, 0.3)):
            error = refusal(complete(server, "a", max_tokens=200, ignore_eos=True, timeout=timeout), 504)
            assert f"longer than {ends} s" in error["message"]
        assert ok(complete(server, "a", max_tokens=2, timeout=60))["choices"][0]["text"] == "bc"
        assert refusal(complete(server, timeout=0))["param"] == "timeout"
        server.wait_idle()
