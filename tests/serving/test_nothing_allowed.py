"""Parameters that together forbid every token: a 400 that names them, an event where a stream has begun; nothing else is lost."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.alphabet_model import after, ids
from tests.serving.calls import chat, chunks, complete, ok, refusal
from tests.serving.dialects.answers import named_events
from tests.serving.test_operator_routes import metric

YES = {"structured_outputs": {"choice": ["yes", "no"]}}
ONLY_A = {"allowed_token_ids": ids("A")}
NEVER = [  # what is asked for, and how the refusal begins
    (
        YES | ONLY_A,
        f"allowed_token_ids and structured_outputs together forbid every token at the beginning of the output. "
        f"Without allowed_token_ids token ids {ord('n')}, {ord('y')} could follow",
    ),
    (YES | {"bad_words": ["y", "n"]}, "bad_words and structured_outputs together forbid every token at the beginning"),
    (ONLY_A | {"bad_words": ["A"]}, "allowed_token_ids and bad_words together forbid every token at the beginning"),
    ({"allowed_token_ids": [*ids("b")], "stop_token_ids": ids("b"), "min_tokens": 2}, "allowed_token_ids and min_tokens together"),
    (YES | ONLY_A | {"bad_words": ["z"]}, "allowed_token_ids and structured_outputs together"),
]
LATER = {"structured_outputs": {"regex": "ab(c|d)"}, "allowed_token_ids": ids("abx")}  # nothing may follow "ab"
SAID_LATER = (
    "allowed_token_ids and structured_outputs (or response_format, or tools) together forbid every token after 2 tokens of the "
    f"output. Without allowed_token_ids token ids {ord('c')}, {ord('d')} could follow: leave it out, or change it"
)


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body, said", NEVER)
def test_what_can_never_begin_is_refused(server, ask, stream, body, said):
    error = refusal(ask(server, stream=stream, **body))
    assert error["message"].startswith(said) and error["type"] == "invalid_request_error"
    assert error["param"] == said.split()[0]


def test_the_form_has_its_own_name(server):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert "allowed_token_ids and response_format together" in refusal(chat(server, response_format=schema, **ONLY_A))["message"]


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_form_that_breaks_off_is_the_requests_mistake(server, ask):
    error = refusal(ask(server, **LATER))
    assert error["message"] == SAID_LATER and error["param"] == "allowed_token_ids"
    *begun, last = chunks(ask(server, stream=True, **LATER))
    texts = [c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content", "") for c in begun]
    assert "".join(texts) == "ab" and last["error"]["message"] == SAID_LATER and last["error"]["code"] == "bad_request"


def test_an_eos_that_the_vocabulary_has_not_is_no_end_of_the_server(server, shared_llm, monkeypatch):
    monkeypatch.setattr(shared_llm.engine, "eos_token_ids", frozenset({256, 260, 999}))
    assert ok(complete(server, min_tokens=2, max_tokens=3))["choices"][0]["text"] == after("tea", 3)
    assert (
        "allowed_token_ids and min_tokens together" in refusal(complete(server, min_tokens=2, allowed_token_ids=[256]))["message"]
    )


@pytest.fixture
def few(server, monkeypatch):
    """The server, where every request has allowed_token_ids that it did not give: Responses and Messages have no such field."""
    given = server.engine.default_sampling_params.with_(allowed_token_ids=ids('{"abx'))
    monkeypatch.setattr(server.engine, "default_sampling_params", given)
    return server


BROKEN_OFF = {"type": "object", "properties": {"abcd": {"type": "null"}}, "required": ["abcd"], "additionalProperties": False}
SAID_BROKEN_OFF = (
    "allowed_token_ids and structured_outputs (or response_format, or tools) together forbid every token after 4 tokens"
)


def test_a_stream_of_responses_ends_in_an_event(few):
    form = {"type": "json_schema", "name": "x", "schema": BROKEN_OFF}
    body = {"input": "tea", "temperature": 0, "text": {"format": form}}
    assert refusal(few.client.post("/v1/responses", json=body))["message"].startswith(SAID_BROKEN_OFF)
    answer = few.client.post("/v1/responses", json=body | {"stream": True})
    assert answer.status_code == 200
    events = named_events(answer.text)
    assert "".join(data["delta"] for name, data in events if name == "response.output_text.delta") == '{"ab'
    name, data = events[-1]
    assert name == "response.failed" and data["response"]["status"] == "failed"
    fault = data["response"]["error"]
    assert fault["code"] == "invalid_prompt" and fault["message"].startswith(SAID_BROKEN_OFF)


def test_a_response_in_the_background_says_why_it_failed(few):
    form = {"type": "json_schema", "name": "x", "schema": BROKEN_OFF}
    body = {"input": "tea", "temperature": 0, "text": {"format": form}, "background": True}
    made = ok(few.client.post("/v1/responses", json=body))
    few.wait_idle()
    while made["status"] in ("queued", "in_progress"):
        made = ok(few.client.get(f"/v1/responses/{made['id']}"))
    assert made["status"] == "failed" and made["error"]["code"] == "invalid_prompt"
    assert made["error"]["message"].startswith(SAID_BROKEN_OFF)


def test_a_stream_of_messages_ends_in_an_event(few):
    config = {"format": {"type": "json_schema", "schema": BROKEN_OFF}}
    body = {"model": "alphabet", "max_tokens": 30, "temperature": 0, "messages": [{"role": "user", "content": "tea"}]}
    body["output_config"] = config
    whole = few.client.post("/v1/messages", json=body)
    assert whole.status_code == 400 and whole.json()["error"]["message"].startswith(SAID_BROKEN_OFF)
    answer = few.client.post("/v1/messages", json=body | {"stream": True})
    assert answer.status_code == 200
    events = named_events(answer.text)
    assert "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta") == '{"ab'
    name, data = events[-1]
    assert name == "error" and data["error"]["type"] == "invalid_request_error"
    assert data["error"]["message"].startswith(SAID_BROKEN_OFF)
    assert "message_stop" not in [name for name, _ in events]


def test_generate_says_so_too(server):
    params = {"structured_outputs": LATER["structured_outputs"], "stop_token_ids": ids("ab"), "min_tokens": 3}
    body = {"token_ids": ids("tea"), "sampling_params": params, "stream": False}
    assert (
        "min_tokens and structured_outputs together" in refusal(server.client.post("/inference/v1/generate", json=body))["message"]
    )


def test_nobody_else_is_lost(server):
    """Requests of the same steps have the tokens that they have alone, those of the same form too."""
    others = [{"max_tokens": 20}, {"structured_outputs": LATER["structured_outputs"]}, {"max_tokens": 20, "n": 2}]
    with ThreadPoolExecutor(12) as pool:
        found = [pool.submit(complete, server, "a", **body) for body in [*others, LATER, NEVER[0][0], NEVER[2][0]] * 4]
        found = [future.result() for future in found]
    for i, response in enumerate(found):
        if i % 6 > 2:
            refusal(response)
            continue
        texts = [choice["text"] for choice in ok(response)["choices"]]
        assert texts == (["abc"] if i % 6 == 1 else [after("a", 20)] * (1 + i % 6 // 2))
    stats = server.engine.stats
    assert stats.num_failures == 0 and stats.broken is None


def test_it_is_no_failure_of_the_server(server):
    before = metric(server, "request_failures_total")
    refusal(complete(server, **LATER))
    assert metric(server, "request_failures_total") == before


def test_what_parameters_leave_is_sampled(server):
    """The same parameters where one token is left: no refusal goes too far."""
    yes = YES | {"allowed_token_ids": ids("yes"), "bad_words": ["n"], "min_tokens": 3, "temperature": 1}
    assert ok(complete(server, **yes))["choices"][0]["text"] == "yes"
    word = {"allowed_token_ids": ids("ab"), "bad_words": ["ab", "aa"], "logit_bias": {str(ord("b")): 50}, "max_tokens": 6}
    assert ok(complete(server, **word))["choices"][0]["text"] == "bbbbbb"
