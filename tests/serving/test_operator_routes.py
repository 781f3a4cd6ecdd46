"""Models, tokens, metrics, the access log, the published schema, the page."""

import base64
import functools
import hashlib
import json
import re
import time

import httpx
import jsonschema_rs

from jaxserve.serving.bodies import LONG
from tests.alphabet_model import BOS, EOS, SPECIALS, VOCABULARY, ids
from tests.serving.calls import chat, chunks, complete, ok, refusal
from tests.serving.http_server import Server, serving, slow_down


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


def test_invocations_are_chats_or_completions(server):
    """SageMaker knows one address, and the body says what it asks for. Mistakes are told as of the one that it is."""
    options = {"temperature": 0, "max_tokens": 3}
    chatted = {"messages": [{"role": "user", "content": "a"}]} | options
    completed = {"prompt": "abc"} | options
    for path, body in (("/v1/chat/completions", chatted), ("/v1/completions", completed)):
        answer, expected = (ok(server.client.post(p, json=body)) for p in ("/invocations", path))
        assert answer["choices"] == expected["choices"] and answer["object"] == expected["object"]
        wrong = body | {"top_p": 2, "best": 1}
        assert refusal(server.client.post("/invocations", json=wrong)) == refusal(server.client.post(path, json=wrong))
    streamed = chunks(server.client.post("/invocations", json=completed | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "def"
    long = {"prompt": "a", "user": "x" * LONG, **options}
    assert ok(server.client.post("/invocations", json=long))["choices"][0]["text"] == "bcd"
    assert refusal(server.client.post("/invocations", json=[1]))


def test_a_wrong_method_is_told_the_right_ones(server):
    """All of them, also where a path has several routes."""
    for path, allowed in (
        ("/ping", "GET, POST"),
        ("/v1/responses/x", "DELETE, GET"),
        ("/v1/completions", "POST"),
        ("/health", "GET"),
    ):
        response = server.client.put(path)
        assert response.headers["allow"] == allowed and refusal(response, 405)["code"] == "method_not_allowed"


def test_request_ids_and_access_log(shared_llm, caplog):
    secret = "a-prompt-that-nobody-may-log"
    with caplog.at_level("INFO"), serving(shared_llm, options={"enable_request_id_headers": True}) as server:
        named = server.client.post(
            "/v1/completions", json={"prompt": secret, "max_tokens": 1, "user": "me"}, headers={"X-Request-Id": "my-id.1"}
        )
        odd = server.client.get("/health", headers={"X-Request-Id": "no good\tid"})
    assert named.headers["x-request-id"] == "my-id.1" and ok(named)["id"] == "cmpl-my-id.1"
    assert len(odd.headers["x-request-id"]) == 32
    lines = [r.getMessage() for r in caplog.records if r.name == "jaxserve.access"]
    assert any("POST /v1/completions 200" in line and "my-id.1 user='me'" in line for line in lines)
    assert secret not in caplog.text


def metric(server: Server, name: str, **labels: str) -> float:
    wanted = f"jaxserve:{name}{{"
    lines = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith(wanted)]
    lines = [line for line in lines if all(f'{k}="{v}"' in line for k, v in labels.items())]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_metrics(server):
    value = functools.partial(metric, server)
    names = ("generation_tokens_total", "steps_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
    ok(complete(server, max_tokens=1))  # another server may have used the engine meanwhile
    server.wait_idle()
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


def test_metrics_of_requests_and_steps(shared_llm):
    with serving(shared_llm) as server:
        steps, tokens = metric(server, "steps_total"), metric(server, "step_tokens_total")  # of the engine, which is older
        ok(complete(server, ["tea", "a"], max_tokens=5, n=2))
        ok(complete(server, "x", max_tokens=None))  # OpenAI's 16
        server.wait_idle()
        for name, count, total in (
            ("request_prompt_tokens", 3, 3 + 1 + 1),
            ("request_generation_tokens", 3, 4 * 5 + 16),
            ("request_params_n", 3, 2 + 2 + 1),
            ("request_params_max_tokens", 3, 5 + 5 + 16),
        ):
            assert (metric(server, f"{name}_count"), metric(server, f"{name}_sum")) == (count, total), name
        assert metric(server, "prompt_tokens_total") == 5
        assert metric(server, "iteration_tokens_total_sum") == 5 + 36, "prompts and what was generated, as vLLM counts"
        assert metric(server, "step_tokens_total") - tokens >= 36
        assert 0 < metric(server, "iteration_tokens_total_count") <= metric(server, "steps_total") - steps
        queue, whole = (metric(server, f"{name}_seconds_sum") for name in ("request_queue_time", "e2e_request_latency"))
        assert abs(queue + metric(server, "request_inference_time_seconds_sum") - whole) < 1e-6
        pages = {"block_size": "4", "num_gpu_blocks": "96", "enable_prefix_caching": "True"}
        pages |= {"kv_cache_size_tokens": "384", "kv_cache_max_concurrency": "1.5"}  # of samples of 256 tokens
        assert metric(server, "cache_config_info", **pages) == 1


def test_aborted_requests_are_counted(shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm)
    with serving(shared_llm) as server:
        body = {"prompt": "a", "n": 2, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        server.wait_idle()
        deadline = time.monotonic() + 60
        while not metric(server, "request_success_total", finished_reason="abort"):
            assert time.monotonic() < deadline
        assert metric(server, "request_success_total", finished_reason="abort") == 2
        assert metric(server, "request_success_total") == 2 and metric(server, "request_failures_total") == 0


def test_a_refused_call_counts_as_nothing(shared_llm):
    with serving(shared_llm) as server:
        refusal(complete(server, [ids("a"), ids("a" * 300)], max_tokens=200))  # the first has begun by then
        server.wait_idle()
        ok(complete(server, "b", max_tokens=1))  # after it: all reports have come
        assert metric(server, "request_success_total", finished_reason="abort") == 0
        assert metric(server, "request_success_total") == 1 and metric(server, "request_failures_total") == 0


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
    """Only the scripts and styles that stand in it run, and none of them can make markup of a text."""
    response = server.client.get("/")
    policy = response.headers["content-security-policy"]
    assert response.status_code == 200 and policy.startswith("default-src 'none'; ") and "trusted-types 'none'" in policy
    assert not re.search(r"https?://|innerHTML| (src|onclick|style)=", response.text) and response.text.count("<link") == 1
    for kind in ("script", "style"):
        texts = re.findall(rf"<{kind}>(.*?)</{kind}>", response.text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert f"{kind}-src {' '.join(f"'sha256-{one}'" for one in hashes)};" in policy and texts
