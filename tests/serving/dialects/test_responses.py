"""`/v1/responses`: through the openai package and its helpers, and event by event."""

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest

from jaxserve.serving.dialects.response_events import Answer
from jaxserve.serving.dialects.response_store import SQLiteStore
from jaxserve.serving.dialects.responses import _items
from jaxserve.serving.dialects.responses_forms import ResponseObject
from jaxserve.serving.dialects.responses_protocol import SaidItem, chat_messages
from jaxserve.serving.parsers import CallPart, Content, Reasoning
from tests.alphabet_model import after, ids
from tests.serving.calls import ok, refusal
from tests.serving.dialects.answers import collected, named_events, turn_of
from tests.serving.http_server import serving, slow_down

NO_BLANKS = {"logit_bias": {str(ord(c)): -100 for c in " \n\r\t"}}
TOOL = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False},
    "strict": True,
}


@pytest.fixture(scope="module")
def shared(tools_llm):
    with serving(tools_llm) as server:
        yield server


def create(client, given: Any = "a", **body):
    return client.responses.create(model="alphabet", input=given, **{"temperature": 0, "max_output_tokens": 3} | body)


def post(server, given="a", **body):
    return server.client.post("/v1/responses", json={"input": given, "temperature": 0, "max_output_tokens": 3} | body)


# ---- through the package


def test_a_response(client):
    response = create(client, instructions="be")
    assert response.output_text == "BCD" and response.object == "response"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == len("s:be;u:a;A") and response.usage.output_tokens == 3
    details = response.usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == 8, "in pages of 4"
    assert response.temperature == 0 and response.model == "alphabet" and response.store
    stopped = create(client, extra_body={"stop": "D"})
    assert stopped.output_text == "BC" and stopped.status == "completed" and stopped.completed_at


def test_a_response_goes_on_from_another(client):
    first = create(client, instructions="be")
    second = create(client, "x", previous_response_id=first.id)
    assert second.usage.input_tokens == len("u:a;a:BCD;u:x;A"), "instructions are of one response alone"
    third = create(client, "y", previous_response_id=second.id)
    assert third.usage.input_tokens == len("u:a;a:BCD;u:x;a:BCD;u:y;A")
    assert client.responses.retrieve(second.id).output_text == "BCD"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError) as gone:
        create(client, "y", previous_response_id=second.id)
    assert gone.value.param == "previous_response_id"
    assert create(client, "z", previous_response_id=third.id).usage.input_tokens == len("u:a;a:BCD;u:x;a:BCD;u:y;a:BCD;u:z;A"), (
        "what came before is kept with each"
    )


def test_the_prompt_and_the_whole_answer_as_text_and_token_ids(thinking):
    body = {"input": "?", "temperature": 0, "max_output_tokens": 4, "enable_response_messages": True}
    body |= {"chat_template_kwargs": {"opening": "<think>"}}
    (prompt, answer), text = ("u:?;<think>", after(">", 4)), "raw_message_tokens"
    made = ok(thinking.client.post("/v1/responses", json=body))
    assert made["input_messages"] == [{"type": text, "message": prompt, "tokens": ids(prompt)}]
    assert made["output_messages"] == [{"type": text, "message": answer, "tokens": ids(answer)}]
    streamed = named_events(thinking.client.post("/v1/responses", json=body | {"stream": True}).text)[-1][1]["response"]
    assert [streamed[name] for name in ("input_messages", "output_messages")] == [made["input_messages"], made["output_messages"]]
    assert "input_messages" not in ok(thinking.client.post("/v1/responses", json=body | {"enable_response_messages": None}))


def test_a_response_is_not_stored_if_nobody_wants_it(client):
    response = create(client, store=False)
    assert not response.store
    with pytest.raises(openai.NotFoundError, match="is not kept"):
        client.responses.retrieve(response.id)


def test_items_of_an_answer_can_be_sent_back(client):
    first = create(client)
    again = create(client, [{"role": "user", "content": "a"}, *first.output, {"role": "user", "content": "x"}])
    assert again.usage.input_tokens == len("u:a;a:BCD;u:x;A")


class Flag(pydantic.BaseModel):
    a: bool


def test_the_parse_helper(client):
    parsed = client.responses.parse(
        model="alphabet", input="a", temperature=0, max_output_tokens=60, text_format=Flag, extra_body=NO_BLANKS
    )
    assert isinstance(parsed.output_parsed, Flag) and parsed.status == "completed"


def test_the_streaming_helper(client):
    with client.responses.stream(model="alphabet", input="a", temperature=0, max_output_tokens=60, extra_body={"stop": "F"}) as s:
        kinds = [event.type for event in s]
        final = s.get_final_response()
    assert final.output_text == "BCDE" and kinds.count("response.output_text.delta") >= 4
    assert client.responses.retrieve(final.id).output_text == "BCDE", "it is kept before its last event is sent"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}], ids=["required", "named"])
def test_a_function_is_called_and_answers(client, choice):
    response = create(client, tools=[TOOL], tool_choice=choice, max_output_tokens=120, parallel_tool_calls=False)
    (call,) = response.output
    assert call.type == "function_call" and call.name == "f" and call.arguments in ('{"x": 1}', '{"x": 2}')
    assert call.status == "completed" and response.status == "completed" and response.tools[0].name == "f"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    assert create(client, [result], previous_response_id=response.id).output_text == "BCD"


def test_logprobs(client):
    response = create(client, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == list("BCD") and [len(entry.top_logprobs) for entry in logprobs] == [2] * 3
    assert create(client).output[0].content[0].logprobs == []


# ---- in the background


def ended(client, response):
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        response = client.responses.retrieve(response.id)
    return response


def test_in_the_background(client, server):
    response = create(client, background=True)
    assert response.status == "queued" and response.output == [] and response.background
    response = ended(client, response)
    assert response.status == "incomplete" and response.output_text == "BCD"
    assert client.responses.cancel(response.id).status == "incomplete", "it has ended, and stays as it is"
    server.wait_idle()


def test_a_response_is_cancelled(client, server, tools_llm, monkeypatch):
    slow_down(monkeypatch, tools_llm)
    forever = {"background": True, "max_output_tokens": 200, "extra_body": {"ignore_eos": True}}
    response = create(client, **forever)
    assert response.status == "queued"
    deadline = time.monotonic() + 60
    while response.status == "queued":
        assert time.monotonic() < deadline
        response = client.responses.retrieve(response.id)
    assert response.status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="not complete yet"):
        create(client, previous_response_id=response.id)
    assert client.responses.cancel(response.id).status == "cancelled"
    server.wait_idle()
    assert client.responses.retrieve(response.id).status == "cancelled"
    deleted = create(client, **forever)
    client.responses.delete(deleted.id)
    server.wait_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.responses.cancel(create(client).id)


def test_a_failure_in_the_background_is_said(client, server, tools_llm, monkeypatch):
    slow_down(monkeypatch, tools_llm)
    late = {"timeout": 0.3, "ignore_eos": True}
    response = ended(client, create(client, background=True, max_output_tokens=200, extra_body=late))
    assert response.status == "failed" and "took longer than 0.3 s" in response.error.message
    server.wait_idle()


def test_a_server_that_ends_ends_what_runs_in_the_background(tools_llm, monkeypatch):
    slow_down(monkeypatch, tools_llm)
    with serving(tools_llm) as server:
        begun = ok(post(server, background=True, max_output_tokens=200, ignore_eos=True))
        assert begun["status"] == "queued"
    assert not tools_llm.engine.has_unfinished_requests()


def test_a_file_keeps_responses_for_the_next_server(tools_llm, tmp_path):
    options = {"response_store": str(tmp_path / "responses.sqlite")}
    with serving(tools_llm, options=options) as server:
        first = ok(post(server))
    with serving(tools_llm, options=options) as server:
        assert ok(server.client.get(f"/v1/responses/{first['id']}")) == first
        assert ok(post(server, "x", previous_response_id=first["id"]))["usage"]["input_tokens"] == len("u:a;a:BCD;u:x;A")


def test_a_store_that_fails_fails_no_answer(tools_llm, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    caplog.set_level("ERROR")
    with serving(tools_llm, options={"response_store": str(tmp_path / "responses.sqlite")}) as server:
        kept = ok(post(server))["id"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            monkeypatch.setattr(SQLiteStore, "put", full)
            whole, background = create(client), ended(client, create(client, background=True))
            with client.responses.stream(model="alphabet", input="a", temperature=0, max_output_tokens=3) as stream:
                streamed = [event.type for event in stream][-1]
        assert whole.output_text == background.output_text == "BCD" and streamed == "response.incomplete"
        said = [line for line in caplog.messages if "is not kept: database or disk is full" in line]
        assert len(said) == 3 and whole.id in said[0]
        refusal(server.client.get(f"/v1/responses/{whole.id}"), 404)
        assert ok(server.client.get(f"/v1/responses/{kept}"))["output"]
        for method in ("get", "delete"):
            monkeypatch.setattr(SQLiteStore, method, full)
        for ask in (server.client.get, server.client.delete):
            assert "disk is full" in refusal(ask(f"/v1/responses/{kept}"), 503)["message"]
        refusal(post(server, previous_response_id=kept), 503)


def test_a_store_that_waits_holds_up_nobody(tools_llm, tmp_path, monkeypatch):
    """As behind another process that has the file locked."""
    put, go_on = SQLiteStore.put, threading.Event()

    def late(*given):
        assert go_on.wait(60)
        return put(*given)

    monkeypatch.setattr(SQLiteStore, "put", late)
    with serving(tools_llm, options={"response_store": str(tmp_path / "r.sqlite")}) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server)
        assert ok(post(server, store=False))["status"] == "incomplete" and not waiting.done()
        go_on.set()
        kept = ok(waiting.result(60))["id"]
        assert ok(server.client.get(f"/v1/responses/{kept}"))["id"] == kept


def test_what_is_kept_is_bounded(tools_llm):
    with serving(tools_llm, options={"max_stored_responses": 2}) as server:
        ids = [ok(post(server))["id"] for _ in range(3)]
        assert [server.client.get(f"/v1/responses/{i}").status_code for i in ids] == [404, 200, 200]


# ---- what is refused


@pytest.mark.parametrize(
    "change, param, said",
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "'input_image'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": []}, "input", "at least 1"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tool_choice": "required"}, "tool_choice", "only where tools are given"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}}}, "text", "text: "),
        ({"background": True, "store": False}, None, "only be used when `store` is true"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "reads neither"),
        ({"conversation": "c"}, "conversation", "unknown parameter"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(server, change, param, said):
    error = refusal(server.client.post("/v1/responses", json={"input": "a"} | change))
    assert said in error["message"] and (param is None or error["param"] == param)


# ---- the stream


def test_events_of_text(server):
    events = named_events(post(server, stream=True, max_output_tokens=2).text)
    assert all(data["type"] == name for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    data = [data for _, data in events]
    assert data[0]["response"]["status"] == "in_progress" and data[0]["response"]["output"] == []
    assert data[2]["item"]["content"] == [] and data[2]["item"]["status"] == "in_progress"
    assert [event["delta"] for event in data[4:6]] == ["B", "C"] and data[6]["text"] == data[7]["part"]["text"] == "BC"
    assert data[-1]["response"]["output"] == [data[-2]["item"]] and data[-1]["response"]["usage"]["output_tokens"] == 2


def response_object() -> ResponseObject:
    return ResponseObject(
        id="resp_1",
        created_at=1,
        status="in_progress",
        background=False,
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="alphabet",
        output=[],
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning={},
        store=True,
        temperature=0,
        text={},
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1,
        user=None,
    )


def events_of(answer: Answer):
    async def data():
        async for event in answer.events():
            yield event
        yield answer.end()

    return collected(data())


def test_events_of_every_kind_of_item():
    pieces = [Reasoning("hm"), Content("so"), CallPart(0, "f", ""), CallPart(0, None, '{"x"'), CallPart(0, None, ":1}")]
    answer = Answer(response_object(), turn_of(*pieces, finish_reason="tool_calls"), [SaidItem(role="user", content="q")])
    events = events_of(answer)
    items = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hm"}] and items[0]["summary"] == []
    assert items[2]["arguments"] == '{"x":1}' and items[2]["call_id"] and items[2]["status"] == "completed"
    (done,) = [data for name, data in events if name == "response.function_call_arguments.done"]
    assert (done["name"], done["arguments"]) == ("f", '{"x":1}')
    deltas = [data["delta"] for name, data in events if name == "response.function_call_arguments.delta"]
    assert deltas == ['{"x"', ":1}"]
    assert events[-1][0] == "response.completed" and events[-1][1]["response"]["output"] == items
    turns = chat_messages(_items.validate_python(answer.all_items()))
    assert turns == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "so",
            "tool_calls": [{"id": items[2]["call_id"], "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],
        },
    ]


def test_a_call_that_is_cut_is_incomplete():
    answer = Answer(response_object(), turn_of(CallPart(0, "f", '{"x'), finish_reason="length"), [])
    events = events_of(answer)
    assert events[-1][0] == "response.incomplete" and events[-1][1]["response"]["output"][0]["status"] == "incomplete"


def test_an_error_ends_the_stream():
    events = events_of(Answer(response_object(), turn_of(Content("so"), finish_reason="error", stop_reason="NaN"), []))
    assert events[-1][0] == "response.failed"
    assert events[-1][1]["response"]["error"] == {"code": "server_error", "message": "NaN"}


def test_reasoning_is_an_item(thinking):
    body = {"model": "alphabet", "input": "?", "temperature": 0, "max_output_tokens": 4}
    made = ok(thinking.client.post("/v1/responses", json=body | {"chat_template_kwargs": {"opening": "<think>"}}))
    (item,) = made["output"]
    assert item["type"] == "reasoning" and item["content"] == [{"type": "reasoning_text", "text": after(">", 4)}]
    assert made["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
