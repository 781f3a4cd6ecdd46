"""`/inference/v1/generate`, with a tokenizer and without one."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxserve import SamplingParams
from jaxserve.serving.dialects.generate import GenerateRequest, sampling_params
from tests.alphabet_model import VOCABULARY, after, ids
from tests.serving.calls import chunks, complete, ok, refusal
from tests.serving.http_server import serving, slow_down


class NoTokenizer:
    """The shared LLM as one that was made with skip_tokenizer_init."""

    def __init__(self, llm):
        self.tokenizer = None
        self.engine, self.grammars = llm.engine, llm.grammars
        self.get_default_sampling_params = llm.get_default_sampling_params


@pytest.fixture(scope="module")
def bare(shared_llm):
    with serving(NoTokenizer(shared_llm)) as server:  # type: ignore[arg-type]
        yield server


def generate(server, prompt="a", **body) -> httpx.Response:
    given = {name: body.pop(name) for name in list(body) if name in GenerateRequest.model_fields}
    sampling = {"temperature": 0, "max_tokens": 3} | body
    return server.client.post("/inference/v1/generate", json={"token_ids": ids(prompt), "sampling_params": sampling} | given)


def test_token_ids(bare):
    answer = ok(generate(bare, request_id="mine", return_token_ids=True))
    assert answer["choices"] == [
        {
            "index": 0,
            "token_ids": ids("bcd"),
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
            "weight_versions": [{"version": "0", "start": 0, "end": 3}],
        }
    ]
    assert answer["request_id"] == "generate-tokens-mine" and answer["prompt_token_ids"] == ids("a")
    assert answer["output_mode"] == "tokens" and answer["usage"]["total_tokens"] == 4
    stopped = ok(generate(bare, stop_token_ids=ids("c"), n=2))["choices"]
    assert [(choice["index"], choice["finish_reason"], choice["stop_reason"]) for choice in stopped] == [
        (i, "stop", ids("c")[0]) for i in (0, 1)
    ]


def test_without_max_tokens_it_goes_on_to_the_end(bare):
    assert len(ok(generate(bare, max_tokens=None))["choices"][0]["token_ids"]) > 100


def test_logprobs_by_token_id(bare, server):
    answer = ok(generate(bare, "abc", logprobs=2, prompt_logprobs=0))
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == ids("def")
    expected = ok(complete(server, "abc", max_tokens=3, logprobs=2))["choices"][0]["logprobs"]["token_logprobs"]
    assert [entry["logprob"] for entry in content] == expected and [entry["rank"] for entry in content] == [1, 1, 1]
    for entry in content:
        top = entry["top_logprobs"]
        assert len(top) == 2 and top[0]["token_id"] == entry["token_id"] and [one["rank"] for one in top] == [1, 2]
    assert answer["prompt_logprobs"][0] is None and [list(found) for found in answer["prompt_logprobs"][1:]] == [["98"], ["99"]]
    for entry in ok(generate(bare, logprobs=0))["choices"][0]["logprobs"]["content"]:
        assert entry["top_logprobs"] == [{name: entry[name] for name in ("token_id", "logprob", "rank")}]


def test_a_stream(bare):
    streamed = chunks(generate(bare, stream=True, stream_options={"include_usage": True}, return_token_ids=True, prompt_logprobs=0))
    assert [chunk["choices"][0]["token_ids"] for chunk in streamed[:-1]] == [[i] for i in ids("bcd")]
    assert streamed[0]["prompt_token_ids"] == ids("a") and streamed[0]["prompt_logprobs"] == [None]
    assert all("prompt_token_ids" not in chunk and "prompt_logprobs" not in chunk for chunk in streamed[1:])
    assert [chunk["usage"] is None for chunk in streamed] == [True] * 3 + [False] and streamed[-1]["choices"] == []
    assert streamed[2]["choices"][0]["finish_reason"] == "length"


def test_text(server):
    answer = ok(generate(server, output_mode="text", logprobs=1))
    (choice,) = answer["choices"]
    assert choice["text"] == "bcd" and choice["token_ids"] == ids("bcd") and answer["output_mode"] == "text"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list("bcd")
    stopped = ok(generate(server, stop=["d"]))["choices"][0]
    assert stopped["stop_reason"] == "d" and "text" not in stopped, "a stop string is heeded where no text is asked for"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"output_mode": "text"}, "no tokenizer was loaded"),
        ({"stop": ["d"]}, "needs a tokenizer"),
        ({"top_q": 1}, "sampling_params: unknown parameter (at top_q)"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [VOCABULARY]}, "vocabulary"),
        ({"features": {}}, "prompts are token ids"),
        ({"request_id": "a b"}, "request_id"),
        ({"stream_options": {"include_usage": True}}, "only with stream=true"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(bare, change, said):
    given = {"token_ids": ids("a"), "sampling_params": {}} | {k: v for k, v in change.items() if k in GenerateRequest.model_fields}
    given["sampling_params"] |= {k: v for k, v in change.items() if k not in GenerateRequest.model_fields}
    if "features" in change:
        given = {"token_ids": ids("a"), "sampling_params": {}} | change
    assert said in refusal(bare.client.post("/inference/v1/generate", json=given))["message"]


def test_other_routes_say_that_there_is_no_tokenizer(bare):
    for echo in (False, True):
        (choice,) = ok(complete(bare, ids("a"), echo=echo, return_token_ids=True))["choices"]
        assert choice["text"] == "" and choice["prompt_token_ids"] == ids("a") and choice["token_ids"] == ids("bcde")
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"}), ("/tokenize", {"prompt": "a"})):
        assert "no tokenizer was loaded" in refusal(bare.client.post(path, json=body))["message"]


def test_text_is_made_where_somebody_reads_it():
    def of(**body) -> SamplingParams:
        sampling = {name: body.pop(name) for name in list(body) if name not in GenerateRequest.model_fields}
        request = GenerateRequest.model_validate({"token_ids": [1], "sampling_params": sampling} | body)
        return sampling_params(request, SamplingParams(top_p=0.5))

    assert of().top_p == 0.5 and of(top_p=1).top_p == 1 and of().max_tokens is None
    assert [of().detokenize, of(output_mode="text").detokenize, of(stop=["a"]).detokenize] == [False, True, True]
    assert of(logit_bias={"7": 1}).logit_bias == {7: 1}


def test_requests_are_aborted_by_their_names(shared_llm, monkeypatch):
    """Of any route, by the client's name or the answer's; each ends with what it has. Others go on."""
    slow_down(monkeypatch, shared_llm)
    long = {"max_tokens": 200, "ignore_eos": True}

    def abort(*request_ids: str) -> int:
        return ok(server.client.post("/inference/v1/abort_requests", json={"request_ids": request_ids}))["num_aborted"]

    with serving(shared_llm) as server, ThreadPoolExecutor(3) as pool:
        first = pool.submit(generate, server, "a", request_id="mine", stream=True, **long)
        headers = {"X-Request-Id": "mine.2"}
        body = {"prompt": ["a", "x"], "temperature": 0} | long
        second = pool.submit(server.client.post, "/v1/completions", json=body, headers=headers)
        third = pool.submit(complete, server, "!", max_tokens=60)
        deadline = time.monotonic() + 60
        while server.engine.stats.num_running < 4:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert abort("nobody", "cmpl-mine.2", "mine.2.0") == 2
        cut = ok(second.result(60))["choices"]
        assert [choice["finish_reason"] for choice in cut] == ["abort"] * 2
        assert all(after(letter, 199).startswith(choice["text"]) for choice, letter in zip(cut, "ax", strict=True))
        assert abort("mine") == 1 and abort("mine") == 0
        assert chunks(first.result(60))[-1]["choices"][0]["finish_reason"] == "abort"
        assert ok(third.result(60))["choices"][0]["text"] == after("!", 60)
        server.wait_idle()
        assert refusal(server.client.post("/inference/v1/abort_requests", json={"request_ids": []}))["param"] == "request_ids"
