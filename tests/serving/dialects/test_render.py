"""`/render`: what a request asks of the engine, which `/inference/v1/generate` answers with the tokens of its own route."""

import json
from typing import Any

import pytest

from tests.alphabet_model import VOCABULARY, ids
from tests.serving.calls import ok, refusal

USER = [{"role": "user", "content": "tea"}]
FORMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 3, "top_k": 5, "min_p": 0.01, "logprobs": True, "top_logprobs": 2, "priority": 0},
    {"stop": ["e"], "min_tokens": 1, "cache_salt": "s", "frequency_penalty": 1.5},
    {"logit_bias": {"122": 30}, "repetition_detection": {"max_pattern_size": 2, "min_count": 3}, "max_tokens": 40},
    {"structured_outputs": {"regex": "x{3}"}, "stop_token_ids": [1], "bad_words": ["q"]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 12]}}}},
]


def generated(server, rendered: dict[str, Any]) -> list[int]:
    return ok(server.client.post("/inference/v1/generate", json=rendered))["choices"][0]["token_ids"]


@pytest.mark.parametrize("fields", FORMS, ids=lambda fields: "-".join(fields))
def test_a_chat_is_rendered_as_it_is_answered(server, fields):
    body = {"messages": USER, "temperature": 0, "max_tokens": 6} | fields
    answer = ok(server.client.post("/v1/chat/completions", json=body | {"return_token_ids": True}))
    rendered = ok(server.client.post("/v1/chat/completions/render", json=body | {"request_id": "mine"}))
    assert rendered["token_ids"] == answer["prompt_token_ids"] and rendered["request_id"] == "chatcmpl-mine"
    assert rendered["reasoning_ended"] is (True if {"structured_outputs", "response_format"} & fields.keys() else None)
    assert rendered["model"] == "alphabet" and rendered["stream"] is False and rendered["stream_options"] is None
    assert generated(server, rendered) == answer["choices"][0]["token_ids"]


def test_the_prompts_of_a_completion_are_rendered_each(server):
    body = {"prompt": ["ab", "kl"], "temperature": 0, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    rendered: Any = ok(server.client.post("/v1/completions/render", json=body | {"request_id": "r"}))
    first, second = rendered
    assert [one["request_id"] for one in (first, second)] == ["cmpl-r-0", "cmpl-r-1"]
    assert first["stream"] and first["stream_options"] == {"include_usage": True} and second["token_ids"] == ids("kl")
    assert generated(server, second | {"stream": False, "stream_options": None}) == ids("mno")


def test_a_message_is_rendered(server):
    body = {"model": "alphabet", "max_tokens": 3, "temperature": 0, "system": "be", "messages": USER, "stop_sequences": ["X"]}
    rendered = ok(server.client.post("/v1/messages/render", json=body))
    assert rendered["token_ids"] == ids("s:be;u:tea;A") and rendered["sampling_params"]["stop"] == ["X"]
    assert generated(server, rendered) == ids("BCD")


@pytest.mark.parametrize("opening", ["<think>", "<think></think>", "A", ";"])
def test_a_form_stays_behind_the_reasoning(thinking, opening):
    body = {"messages": USER, "structured_outputs": {"regex": "x{3}"}, "temperature": 0, "max_tokens": 60, "cache_salt": "a"}
    body |= {"chat_template_kwargs": {"opening": opening}, "logit_bias": {str(VOCABULARY - 1): 3.5, "32": -100}}
    answer = ok(thinking.client.post("/v1/chat/completions", json=body | {"return_token_ids": True}))["choices"][0]
    rendered = ok(thinking.client.post("/v1/chat/completions/render", json=body))
    assert rendered["reasoning_ended"] is (opening == "<think></think>")
    assert generated(thinking, rendered) == answer["token_ids"]
    at_once = ok(thinking.client.post("/v1/chat/completions/render", json=body | {"include_reasoning": False}))
    assert at_once["reasoning_ended"] is True and generated(thinking, at_once) == ids("xxx")
    assert ok(thinking.client.post("/v1/chat/completions/render", json=body | {"timeout": 60}))["timeout"] == 60


def test_refusals(server, thinking):
    def refused(server, path: str, **body) -> str:
        return refusal(server.client.post(f"{path}/render", json=body))["message"]

    assert "beam search" in refused(server, "/v1/completions", prompt="a", use_beam_search=True)
    assert "best" in refused(server, "/v1/chat/completions", messages=USER, best=1)
    assert "256" in refused(server, "/v1/completions", prompt="a" * 300)
    assert "max_tokens=0" in refused(server, "/v1/completions", prompt="a", echo=True, max_tokens=0)
    within = [*USER, {"role": "assistant", "content": "<think>so"}]
    asked = {"messages": within, "continue_final_message": True, "structured_outputs": {"regex": "x"}}
    assert "breaks off" in refused(thinking, "/v1/chat/completions", **asked)
    refusal(server.client.post("/v1/completions/render", json={"prompt": "a", "model": "other"}), 404)
    body = {"token_ids": ids("a"), "sampling_params": {"structured_outputs": {"regex": "x"}}, "reasoning_ended": False}
    assert "knows no reasoning" in refusal(server.client.post("/inference/v1/generate", json=body))["message"]
    assert json.loads(server.client.post("/v1/messages/render", json={}).text)["type"] == "error"
