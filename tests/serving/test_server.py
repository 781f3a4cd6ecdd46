"""The HTTP server, over a socket, on the model whose greedy output can be written down: every endpoint, parameter and refusal."""

import json
import socket
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest

from jaxserve.serving.app import ServerOptions
from tests import alphabet_model
from tests.alphabet_model import BOS, EOS, SPECIALS, VOCABULARY, after, ids
from tests.serving.http_server import Server, serving, slow_down

KEY = "a key"


@pytest.fixture(scope="module")
def shared(shared_llm):
    with serving(shared_llm) as server:
        yield server


@pytest.fixture
def server(shared):
    """The shared server, which a test must leave idle, with all pages free."""
    yield shared
    shared.wait_idle()


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


def logprobs_after(text: str) -> np.ndarray:  # f64[VOCABULARY]
    """What the model says after a text, by the formula."""
    logits = alphabet_model.logits(ord(text[-1])).astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def logprob_after(text: str, token: str) -> float:
    return float(logprobs_after(text)[ord(token)])


# ---- completions


def test_a_completion(server):
    answer = ok(complete(server))
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": "bcde", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["object"] == "text_completion" and answer["model"] == "alphabet" and answer["id"].startswith("cmpl-")
    expected = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == expected


@pytest.mark.parametrize("prompt", ["tea", ids("tea")])
def test_prompts_one(server, prompt):
    assert ok(complete(server, prompt))["choices"][0]["text"] == "bcde"


@pytest.mark.parametrize("prompt", [["tea", "x"], [ids("tea"), ids("x")]])
def test_prompts_several_with_samples(server, prompt):
    answer = ok(complete(server, prompt, n=2, max_tokens=2))
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "bc"), (1, "bc"), (2, "yz"), (3, "yz")]
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 8


def test_default_length_is_openais(server):
    answer = ok(server.client.post("/v1/completions", json={"prompt": "a", "temperature": 0}))
    assert answer["choices"][0]["text"] == after("a", 16)


def test_echo(server):
    assert ok(complete(server, echo=True))["choices"][0]["text"] == "teabcde"
    assert ok(complete(server, ids("tea"), echo=True))["choices"][0]["text"] == "teabcde"
    streamed = chunks(complete(server, ["tea", "x"], echo=True, stream=True))
    texts = ["".join(c["text"] for chunk in streamed for c in chunk["choices"] if c["index"] == i) for i in (0, 1)]
    assert texts == ["teabcde", "xyz{|"]


def test_logprobs(server):
    found = ok(complete(server, logprobs=2))["choices"][0]["logprobs"]
    assert found["tokens"] == list("bcde") and found["text_offset"] == [0, 1, 2, 3]
    assert found["token_logprobs"][0] == pytest.approx(logprob_after("a", "b"), abs=1e-4)
    assert len(found["top_logprobs"][0]) == 2 and found["top_logprobs"][0]["b"] == found["token_logprobs"][0]
    second = sorted(logprobs_after("a"))[-2]
    assert sorted(found["top_logprobs"][0].values())[0] == pytest.approx(second, abs=1e-4)
    zero = ok(complete(server, logprobs=0))["choices"][0]["logprobs"]
    assert [list(top) for top in zero["top_logprobs"]] == [["b"], ["c"], ["d"], ["e"]], "the tokens that stand there, alone"


def test_stream_and_its_usage(server):
    streamed = chunks(complete(server, stream=True))
    assert "".join(c["choices"][0]["text"] for c in streamed) == "bcde"
    assert [c["choices"][0]["finish_reason"] for c in streamed] == [None, None, None, "length"]
    assert len({c["id"] for c in streamed}) == 1 and not any("usage" in c for c in streamed)

    streamed = chunks(complete(server, stream=True, stream_options={"include_usage": True}))
    assert [c["usage"] for c in streamed[:-1]] == [None] * 4
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"]["total_tokens"] == 7

    streamed = chunks(complete(server, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert [c["usage"]["completion_tokens"] for c in streamed] == [1, 2, 3, 4, 4]


def test_characters_are_never_split(server):
    text = "é"  # after its first byte comes the byte after it, which begins a character too
    for stream in (False, True):
        response = complete(server, text[:1], max_tokens=3, stream=stream)
        got = "".join(c["choices"][0]["text"] for c in chunks(response)) if stream else ok(response)["choices"][0]["text"]
        assert got == bytes([0xAA, 0xAB, 0xAC]).decode("utf-8", "replace")


STOPS = [
    ({"stop": "de"}, "bc", "stop", "de"),
    ({"stop": ["x", "d"]}, "bc", "stop", "d"),
    ({"stop": "d", "include_stop_str_in_output": True}, "bcd", "stop", "d"),
    ({"stop_token_ids": [ord("e")]}, "bcd", "stop", ord("e")),
    ({"stop": "d", "min_tokens": 3}, "bcdefghi", "length", None),
    ({}, "bcdefghi", "length", None),
]


@pytest.mark.parametrize("body,text,reason,stop", STOPS)
def test_stops(server, body, text, reason, stop):
    (choice,) = ok(complete(server, max_tokens=8, **body))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop)


def test_eos_and_special_tokens(server):
    end = [255]  # eos is the next id
    (choice,) = ok(complete(server, end, max_tokens=8))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
    (choice,) = ok(complete(server, end, max_tokens=2, ignore_eos=True, skip_special_tokens=False))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (EOS + BOS, "length")
    (choice,) = ok(complete(server, end, max_tokens=2, ignore_eos=True))["choices"]
    assert choice["text"] == ""


def test_sampling_is_the_engines(server):
    from jaxserve import SamplingParams

    given = {"temperature": 2.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 7, "max_tokens": 12}
    answer = ok(complete(server, "tea", n=3, **given))
    async_llm = server.engine

    async def here():
        return [output async for output in async_llm.generate("tea", SamplingParams(n=3, **given))][-1]

    import asyncio

    loop = async_llm._loop
    assert loop is not None
    output = asyncio.run_coroutine_threadsafe(here(), loop).result(30)
    assert [c["text"] for c in answer["choices"]] == [o.text for o in output.outputs]
    assert len({c["text"] for c in answer["choices"]}) > 1


def test_edits_of_logits(server):
    def text(prompt: str = "a", **body: Any) -> str:
        return ok(complete(server, prompt, **body))["choices"][0]["text"]

    assert text(logit_bias={str(ord("m")): 100}) == "mmmm"
    assert text(logit_bias={str(ord("b")): -100})[0] != "b"
    assert set(text(allowed_token_ids=ids("xy"), max_tokens=8)) <= set("xy")
    assert "b" not in text(bad_words=["b"]) and text(bad_words=["xyz"]) == "bcde"
    again = {"logit_bias": {str(ord("m")): 5}, "max_tokens": 6}
    assert text(**again) == "m" * 6 and text(**again, presence_penalty=2.0)[:2] != "mm"
    assert text(**again, repetition_penalty=10.0).count("m") < 6


def test_prompt_logprobs_and_echo(server):
    """Each prompt token's log-probability is that which the model gives it after the one before."""
    expected = [logprob_after(a, b) for a, b in zip("abc", "bcx", strict=True)]
    (choice,) = ok(complete(server, "abcx", prompt_logprobs=0, max_tokens=1))["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [entry[str(ord(c))]["logprob"] for entry, c in zip(others, "bcx", strict=True)] == pytest.approx(expected, abs=1e-4)

    (choice,) = ok(complete(server, "abcx", echo=True, logprobs=1, max_tokens=1))["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "abcxy" and found["tokens"] == list("abcxy") and found["text_offset"] == [0, 1, 2, 3, 4]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx([*expected, logprob_after("x", "y")], abs=1e-4)
    assert set(found["top_logprobs"][3]) == {"d", "x"} and set(found["top_logprobs"][1]) == {"b"}

    streamed = chunks(complete(server, "abcx", echo=True, logprobs=1, max_tokens=1, stream=True))
    assert streamed[0]["choices"][0]["logprobs"] == found
    chat_answer = ok(chat(server, "abc", prompt_logprobs=0, max_tokens=1))
    assert len(chat_answer["prompt_logprobs"]) == len("u:abc;A")


def test_cached_tokens_and_salt(server):
    prompt = "m" * 20
    ok(complete(server, prompt, cache_salt="one"))
    cached = [
        ok(complete(server, prompt, cache_salt=salt))["usage"]["prompt_tokens_details"]["cached_tokens"] for salt in ("one", "two")
    ]
    assert cached == [16, 0]


# ---- chats


def test_a_chat(server):
    answer = ok(chat(server))
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "BCDE"} and choice["finish_reason"] == "length"
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == len("u:tea;A")


def test_chat_stream(server):
    streamed = chunks(chat(server, stream=True, n=2, stream_options={"include_usage": True}))
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"]["completion_tokens"] == 8
    for i in (0, 1):
        deltas = [c["choices"][0] for c in streamed[:-1] if c["choices"][0]["index"] == i]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(d["delta"].get("content", "") for d in deltas) == "BCDE"
        assert [d["finish_reason"] for d in deltas] == [None] * 4 + ["length"]


def test_chat_ends_where_the_model_ends_without_a_limit(server):
    answer = ok(server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "temperature": 0}))
    assert answer["choices"][0]["finish_reason"] == "stop", "eos comes 191 tokens after 'A', before the model's length"


def test_chat_logprobs(server):
    for stream in (False, True):
        response = chat(server, logprobs=True, top_logprobs=2, stream=stream)
        parts = chunks(response) if stream else [ok(response)]
        content = [t for c in parts for t in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [t["token"] for t in content] == list("BCDE") and [t["bytes"] for t in content] == [[b] for b in b"BCDE"]
        assert [len(t["top_logprobs"]) for t in content] == [2] * 4
        assert content[0]["top_logprobs"][0]["token"] == "B" and content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
    assert [t["top_logprobs"] for t in ok(chat(server, logprobs=True))["choices"][0]["logprobs"]["content"]] == [[]] * 4


def test_messages_and_template(server):
    said = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": "z", "refusal": None},
        {"role": "user", "content": "q"},
    ]
    asked = {"messages": said, "chat_template_kwargs": {"opening": "M"}}
    tokens = ok(server.client.post("/tokenize", json=asked))
    assert bytes(tokens["tokens"]).decode() == "s:d;u:x\ny;a:z;u:q;M"
    assert ok(chat(server, said, chat_template_kwargs={"opening": "M"}))["choices"][0]["message"]["content"] == "NOPQ"
    assert ok(chat(server, said, add_generation_prompt=False))["usage"]["prompt_tokens"] == len("s:d;u:x\ny;a:z;u:q;")


def test_max_completion_tokens(server):
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_completion_tokens": 2}
    assert ok(server.client.post("/v1/chat/completions", json=body))["choices"][0]["message"]["content"] == "BC"


# ---- refusals: each names its parameter


WRONG = [
    ({"prompt": ""}, "prompt", "at least 1 character"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": [[]]}, "prompt", "at least 1 item"),
    ({"prompt": 7}, "prompt", "string"),
    ({"prompt": [1, "a"]}, "prompt", "valid"),
    ({"prompt": [VOCABULARY]}, None, f"token id {VOCABULARY} is out of the vocabulary"),
    ({"prompt": "a" * 256}, None, "256 tokens"),
    ({"prompt": "\ud800"}, None, ""),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": "4"}, "max_tokens", "valid integer"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": True}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"stop": ""}, "stop", "at least 1 character"),
    ({"stop_token_ids": [VOCABULARY]}, None, "stop token id"),
    ({"stream_options": {"include_usage": True}}, None, "only with stream=true"),
    ({"suffix": "x"}, "suffix", "None"),
    ({"best_of": 2}, "best_of", "1"),
    ({"priority": 3}, "priority", "scheduling_policy='priority'"),
    ({"response_format": {"type": "json_object"}}, "response_format", "'text'"),
    ({"guided_json": {}}, "guided_json", "unknown parameter"),
]


@pytest.mark.parametrize("body,param,said", WRONG, ids=[str(body)[:40].encode("ascii", "replace").decode() for body, *_ in WRONG])
def test_a_wrong_completion(server, body, param, said):
    payload = json.dumps({"prompt": "tea", "max_tokens": 4} | body)
    error = refusal(server.client.post("/v1/completions", content=payload, headers={"content-type": "application/json"}))
    assert error["type"] == "invalid_request_error" and (said or "") in error["message"]
    assert param is None or error["message"].startswith(param) and error["param"] in (param, None)


WRONG_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "unknown parameter"),
    ({"top_logprobs": 2}, "top_logprobs may be given only with logprobs=true"),
    ({"max_completion_tokens": 2}, "not both"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "the chat template does not read tools"),
    ({"chat_template_kwargs": {"mood": 1}}, "the chat template does not read mood"),
    ({"chat_template_kwargs": {"tools": 1}}, "must not hold tools"),
    ({"functions": []}, "unknown parameter"),
]


@pytest.mark.parametrize("body,said", WRONG_CHATS, ids=[str(body)[:40] for body, _ in WRONG_CHATS])
def test_a_wrong_chat(server, body, said):
    assert said in refusal(chat(server, **body))["message"]


def test_other_mistakes(server):
    client = server.client
    assert refusal(complete(server, model="other"), 404)["code"] == "model_not_found"
    assert refusal(client.get("/nothing"), 404)
    wrong_method = client.get("/v1/completions")
    assert refusal(wrong_method, 405) and wrong_method.headers["allow"] == "POST"
    for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000):
        response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        refusal(response)
    refusal(client.post("/v1/completions", content=b'{"prompt": "tea"}', headers={"content-type": "text/plain"}))
    refusal(
        client.post(
            "/v1/completions", content=b'{"prompt": "tea", "temperature": NaN}', headers={"content-type": "application/json"}
        )
    )


# ---- the rest


def test_models_version_tokenizer(server):
    client = server.client
    (card,) = ok(client.get("/v1/models"))["data"]
    assert card["id"] == "alphabet" and card["max_model_len"] == 256
    assert ok(client.get("/version"))["version"] and ok(client.get("/health")) == {"status": "ok", "reason": None}
    info = ok(client.get("/tokenizer_info"))
    assert (info["bos_token"], info["eos_token"], info["eos_token_ids"]) == (BOS, EOS, [SPECIALS[EOS]])
    tokens = ok(client.post("/tokenize", json={"prompt": "tea" + EOS, "return_token_strs": True}))
    assert (
        tokens["tokens"] == [*ids("tea"), SPECIALS[EOS]] and tokens["token_strs"] == ["t", "e", "a", EOS] and tokens["count"] == 4
    )
    assert ok(client.post("/detokenize", json={"tokens": tokens["tokens"]}))["prompt"] == "tea" + EOS
    refusal(client.post("/detokenize", json={"tokens": [VOCABULARY]}))
    refusal(client.post("/tokenize", json={"prompt": "a", "messages": []}))


def test_request_ids_and_access_log(server, caplog):
    secret = "a-prompt-that-nobody-may-log"
    with caplog.at_level("INFO"):
        named = server.client.post(
            "/v1/completions", json={"prompt": secret, "max_tokens": 1, "user": "me"}, headers={"X-Request-Id": "my-id.1"}
        )
        odd = server.client.get("/health", headers={"X-Request-Id": "no good\tid"})
    assert named.headers["x-request-id"] == "my-id.1" and ok(named)["id"] == "cmpl-my-id.1"
    assert len(odd.headers["x-request-id"]) == 32
    lines = [r.getMessage() for r in caplog.records if r.name == "jaxserve.access"]
    assert any("POST /v1/completions 200" in line and "my-id.1 user='me'" in line for line in lines)
    assert secret not in caplog.text


def test_metrics(server):
    def value(name: str, **labels: str) -> float:
        wanted = f"jaxserve:{name}{{"
        lines = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith(wanted)]
        lines = [line for line in lines if all(f'{k}="{v}"' in line for k, v in labels.items())]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    names = ("generation_tokens_total", "steps_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
    before = {name: value(name) for name in names}
    asked = value("http_requests_total", path="/v1/completions", status="200")
    ended = value("request_success_total", finished_reason="length")
    ok(complete(server, ["a", "b"], max_tokens=5))
    server.wait_idle()
    gained = {name: value(name) - before[name] for name in names}
    assert gained["generation_tokens_total"] == 10 and gained["time_to_first_token_seconds_count"] == 2
    assert gained["inter_token_latency_seconds_count"] == 8 and gained["steps_total"] >= 5
    assert value("http_requests_total", path="/v1/completions", status="200") == asked + 1
    assert value("request_success_total", finished_reason="length") == ended + 2
    assert value("num_requests_running") == 0 and value("kv_cache_usage_perc") == 0 and 0 < value("padding_share") < 1
    assert value("bucket_steps_total") == value("steps_total") and value("compiles_total") > 0


def test_answers_match_the_published_schema(server):
    schema = ok(server.client.get("/openapi.json"))

    def check(response: httpx.Response, path: str, method: str = "post") -> None:
        said = schema["paths"][path][method]["responses"][str(response.status_code)]
        shape = said["content"]["application/json"]["schema"]
        jsonschema_rs.validate({"components": schema["components"]} | shape, response.json())

    check(complete(server, logprobs=2), "/v1/completions")
    check(complete(server, n=0), "/v1/completions")
    check(complete(server, model="other"), "/v1/completions")
    check(chat(server, logprobs=True, top_logprobs=1), "/v1/chat/completions")
    check(server.client.get("/v1/models"), "/v1/models", "get")
    check(server.client.get("/tokenizer_info"), "/tokenizer_info", "get")
    body = schema["components"]["schemas"]["CompletionRequest"]
    assert body["additionalProperties"] is False and body["properties"]["model"]["anyOf"][0]["enum"] == ["alphabet"]
    assert "422" not in json.dumps(schema["paths"])


def test_the_page_allows_nothing_from_elsewhere(server):
    response = server.client.get("/")
    assert response.status_code == 200 and "default-src 'none'" in response.headers["content-security-policy"]
    assert "http://" not in response.text and "https://" not in response.text and "innerHTML" not in response.text


# ---- keys, limits, control


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
    assert ok(post("/reset_prefix_cache")) == {"status": "ok", "reset": True}
    refusal(post("/sleep", level=3))
    refusal(post("/update_weights_from_path", path="/nothing/there"))
    ok(post("/sleep", level=1))
    assert "asleep" in refusal(post("/v1/completions", prompt="a"), 503)["message"]
    ok(post("/wake_up"))
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


def test_control_is_off_unless_asked_for(server):
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights_from_path"):
        refusal(server.client.post(path, json={}), 404)


def test_options_are_checked():
    with pytest.raises(ValueError, match="must hold one name at least"):
        ServerOptions(names=())
    with pytest.raises(ValueError, match="an API key must not be empty"):
        ServerOptions(names=("a",), api_keys=("",))
    with pytest.raises(ValueError, match="give api_keys too"):
        ServerOptions(names=("a",), enable_control=True)
