"""`/v1/completions` on the model whose greedy output can be written down: every parameter."""

from typing import Any

import numpy as np
import pytest

from tests import alphabet_model
from tests.alphabet_model import BOS, EOS, after, ids
from tests.serving.calls import chat, chunks, complete, ok
from tests.serving.http_server import serving


def logprobs_after(text: str) -> np.ndarray:  # f64[VOCABULARY]
    """What the model says after a text, by the formula."""
    logits = alphabet_model.logits(ord(text[-1])).astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def logprob_after(text: str, token: str) -> float:
    return float(logprobs_after(text)[ord(token)])


def test_a_completion(server):
    answer = ok(complete(server))
    (choice,) = answer["choices"]
    empty = dict.fromkeys(("logprobs", "stop_reason", "prompt_logprobs", "prompt_token_ids", "token_ids"))
    assert choice == {"index": 0, "text": "bcde", "finish_reason": "length"} | empty
    assert answer["object"] == "text_completion" and answer["model"] == "alphabet" and answer["id"].startswith("cmpl-")
    expected = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": None}
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
    echoed = ok(complete(server, "tea", echo=True, logprobs=1))["choices"][0]["logprobs"]
    assert [list(top)[0] for top in echoed["top_logprobs"][1:]] == echoed["tokens"][1:], "before what is likelier"
    assert [len(top) for top in echoed["top_logprobs"][1:3]] == [2, 2]


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


def test_cached_tokens_and_salt(shared_llm):
    prompt = "m" * 20
    with serving(shared_llm, options={"enable_prompt_tokens_details": True}) as server:
        ok(complete(server, prompt, cache_salt="one"))
        answers = [ok(complete(server, prompt, cache_salt=salt)) for salt in ("one", "two")]
        server.wait_idle()
    assert [answer["usage"]["prompt_tokens_details"] for answer in answers] == [
        {"cached_tokens": 16, "created_cache_tokens": 4},
        {"cached_tokens": 0, "created_cache_tokens": 20},
    ]
