"""What a server refuses: each refusal names its parameter."""

import json

import pytest

from tests.alphabet_model import VOCABULARY
from tests.serving.calls import chat, complete, refusal

BAD_SCHEMA = {"name": "a", "schema": {"type": "object", "if": {"required": ["a"]}}}
WRONG = [
    ({"prompt": ""}, "prompt", "at least 1 character"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": [[]]}, "prompt", "at least 1 item"),
    ({"prompt": 7}, "prompt", "string"),
    ({"prompt": [1, "a"]}, "prompt", "valid"),
    ({"prompt": [VOCABULARY]}, None, f"token id {VOCABULARY} is out of vocabulary"),
    ({"prompt": "a" * 256}, None, "256 tokens"),
    ({"prompt": "\ud800"}, None, ""),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0 needs echo=true"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "a prompt is text or token ids"),
    ({"max_tokens": "4"}, "max_tokens", "valid integer"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": True}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20 [less_than_equal]"),
    ({"seed": -(2**63) - 1}, "seed", "[greater_than_equal]"),
    ({"stop": ""}, "stop", "at least 1 character"),
    ({"stop_token_ids": [VOCABULARY]}, None, "stop token id"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "only with logprobs"),
    ({"logprob_token_ids": [1], "logprobs": 1, "max_tokens": 0, "echo": True}, "logprob_token_ids", "max_tokens=0 asks for none"),
    ({"logprob_token_ids": [1], "logprobs": 1, "use_beam_search": True}, "logprob_token_ids", "beam search"),
    ({"logprob_token_ids": [VOCABULARY], "logprobs": 1}, None, f"logprob token id {VOCABULARY} is out of vocabulary"),
    ({"logprob_token_ids": [1] * 129, "logprobs": 1}, "logprob_token_ids", "at most 128 items"),
    ({"logprob_token_ids": [-1], "logprobs": 1}, "logprob_token_ids", "greater than or equal to 0"),
    ({"stream_options": {"include_usage": True}}, None, "only with stream=true"),
    ({"suffix": "x"}, "suffix", "None"),
    ({"best_of": 2}, "best_of", "1"),
    ({"priority": 3}, "priority", "scheduling_policy='priority'"),
    ({"response_format": {"type": "xml"}}, "response_format", "'text', 'json_object', 'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format", "pattern"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format", "Field required"),
    ({"response_format": {"type": "json_schema", "json_schema": BAD_SCHEMA}}, "response_format", "json: Unimplemented keys"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of json, regex"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
    ({"structured_outputs": []}, "structured_outputs", "must be an object"),
    ({"structured_outputs": {"regex": "a", "preamble": ["a", "b"]}}, "structured_outputs", "unknown fields preamble"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "unknown name"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "json is not JSON"),
    ({"structured_outputs": {"json": {"type": "string", "minLength": 2, "maxLength": 1}}}, "structured_outputs", "json: "),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, None, "not both"),
    ({"guided_json": {}}, "guided_json", "unknown parameter"),
    ({"<x>": 1}, "<x>", "unknown parameter"),
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
    ({"logprob_token_ids": [2]}, "logprob_token_ids may be given only with logprobs=true"),
    ({"logprob_token_ids": [2], "logprobs": True, "use_beam_search": True}, "logprob_token_ids: beam search"),
    ({"max_completion_tokens": 2}, "not both"),
    ({"tool_choice": "required"}, "tool_choice: a call can be required only where tools are given"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "the chat template does not read tools"),
    ({"chat_template_kwargs": {"mood": 1}}, "the chat template does not read mood"),
    ({"chat_template_kwargs": {"mood": None}}, "the chat template does not read mood"),
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
