"""Servers with roles: what a prefill server answers, what a decode server makes of it, and what each refuses."""

from typing import Any

import pytest

from jaxserve import LLM, BucketPlan
from jaxserve.serving.app import make_app
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.handover import PREFILL_HEADER, STORED_HEADER
from jaxserve.serving.options import ServerOptions
from tests.alphabet_model import after
from tests.serving.calls import ok, refusal
from tests.serving.http_server import serving
from tests.serving.test_operator_routes import metric

PLAN = BucketPlan(mixed=((32, 4),), head_rows=(32,))
PROMPT = "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz abc"  # 57 tokens: 14 pages
BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory):
    """A prefill and a decode server on one folder."""
    store, cache = (tmp_path_factory.mktemp(name) for name in ("store", "cache"))  # the second takes the first's programs
    settings = {"kv_store": f"disk:{store}:16MiB", "page_size": 4, "num_pages": 96, "compilation_cache_dir": str(cache)}
    settings["warm_up"] = "first_use"
    llms = [LLM(folder, bucket_plan=PLAN, **settings) for _ in range(2)]
    for llm in llms:
        assert llm.engine.stored_pages is not None
        llm.engine.stored_pages.load_seconds = llm.engine.stored_pages.keep_seconds = 60.0  # of a slow machine
    details: dict[str, Any] = {"enable_prompt_tokens_details": True}
    with serving(llms[0], options={"role": "prefill"}) as first, serving(llms[1], options=details | {"role": "decode"}) as second:
        yield first, second


def prefilled(server, body, path="/v1/completions"):
    return server.client.post(path, json=body, headers={PREFILL_HEADER: "1"})


def test_a_prompt_is_handed_over(two):
    first, second = two
    answer = prefilled(first, BODY | {"stream": True, "n": 3, "logprobs": 2})
    told = answer.headers[STORED_HEADER]
    assert ok(answer) == {"prompt_tokens": len(PROMPT), "stored": [told], "object": "prefill"} and told.startswith("14:")
    hits = metric(second, "external_prefix_cache_hits_total")
    got = ok(second.client.post("/v1/completions", json=BODY, headers={STORED_HEADER: told}))
    assert got["choices"][0]["text"] == after(PROMPT, 8)
    assert metric(second, "external_prefix_cache_hits_total") == hits + 4 * 14
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * 14
    first.wait_idle()
    second.wait_idle()


def test_several_prompts_and_a_chat(two):
    first, second = two
    body = BODY | {"prompt": ["a" * 9, "b", "c" * 8]}
    told = prefilled(first, body).headers[STORED_HEADER]
    parts = told.split(",")
    assert [part.partition(":")[0] for part in parts] == ["2", "-", "2"]
    got = ok(second.client.post("/v1/completions", json=body, headers={STORED_HEADER: told}))
    assert [choice["text"] for choice in got["choices"]] == [after(prompt, 8) for prompt in "abc"]
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 8 + 4
    body = {"messages": [{"role": "user", "content": "tea for two"}], "temperature": 0, "max_tokens": 5}
    told = prefilled(first, body, "/v1/chat/completions").headers[STORED_HEADER]
    got = ok(second.client.post("/v1/chat/completions", json=body, headers={STORED_HEADER: told}))
    assert got["choices"][0]["message"]["content"] == after("A", 5)
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * int(told.partition(":")[0]) > 0


def test_what_is_not_for_a_role_is_refused(two, server):
    first, second = two
    assert "--role=prefill and generates nothing" in refusal(first.client.post("/v1/completions", json=BODY))["message"]
    assert "this one has decode" in refusal(prefilled(second, BODY))["message"]
    assert "this one has none" in refusal(prefilled(server, BODY))["message"]
    for said in ("", "3", "0:" + "00" * 32, "1:zz", "-,x"):
        answer = second.client.post("/v1/completions", json=BODY, headers={STORED_HEADER: said})
        assert "must be PAGES:HASH" in refusal(answer)["message"]
    refusal(prefilled(first, BODY | {"prompt": "x" * 300}))
    refusal(prefilled(first, BODY | {"model": "other"}), 404)


def test_a_server_without_a_store_computes_what_it_is_told_of(server):
    said = f"14:{'ab' * 32}"
    got = ok(server.client.post("/v1/completions", json=BODY, headers={STORED_HEADER: said}))
    assert got["choices"][0]["text"] == after(PROMPT, 8)


def test_roles_are_said(two, server):
    for one, role in zip(two, ("prefill", "decode"), strict=True):
        assert ok(one.client.get("/health"))["role"] == role and metric(one, "server_role", role=role) == 1
    assert "role" not in ok(server.client.get("/health")) and "server_role" not in server.client.get("/metrics").text


@pytest.mark.parametrize("store", [None, "host:1MiB"])
def test_a_role_needs_a_shared_store(folder, shared_llm, store):
    llm = shared_llm
    if store is not None:
        llm = LLM(
            folder, kv_store=store, bucket_plan=PLAN, num_pages=96, page_size=4, warm_up="first_use", compilation_cache_dir=""
        )
    with pytest.raises(ValueError, match=r"role='decode' with kv_store=.* give all of them kv_store='disk:FOLDER:SIZE'"):
        make_app(AsyncLLM(llm), ServerOptions(names=("a",), role="decode"))
    with pytest.raises(ValueError, match="role='both' must be one of prefill, decode"):
        ServerOptions(names=("a",), role="both")  # pyright: ignore[reportArgumentType]
