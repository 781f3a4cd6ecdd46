"""`/v1/messages`: what is refused, event by event, and the chat that a request asks for."""

import pytest

from jaxserve.serving.dialects.anthropic import _events, to_chat
from jaxserve.serving.dialects.anthropic_protocol import MessagesRequest
from jaxserve.serving.generation import Served
from jaxserve.serving.options import ServerOptions
from jaxserve.serving.parsers import CallPart, Content, Notation, Reasoning
from tests.serving.dialects.answers import collected, named_events, turn_of
from tests.serving.http_server import serving

SAID = [{"role": "user", "content": "a"}]
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}}
TOOL["input_schema"]["additionalProperties"] = False


@pytest.fixture(scope="module")
def shared(tools_llm):
    """A server with a key, whose chat template has tools."""
    with serving(tools_llm, options={"api_keys": ("secret",)}) as server:
        yield server


def post(server, path="/v1/messages", **body):
    return server.client.post(path, json={"model": "alphabet"} | body, headers={"X-Api-Key": "secret", "X-Request-Id": "mine"})


def test_thinking(thinking):
    body = {
        "model": "alphabet",
        "max_tokens": 4,
        "temperature": 0,
        "messages": [*SAID, {"role": "assistant", "content": "<think>ab"}],
    }
    message = thinking.client.post("/v1/messages", json=body).json()
    assert message["content"] == [{"type": "thinking", "thinking": "cdef", "signature": ""}]
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    hidden = body | {"thinking": {"type": "adaptive", "display": "omitted"}}
    assert thinking.client.post("/v1/messages", json=hidden).json()["content"] == []
    off = thinking.client.post("/v1/messages", json=body | {"thinking": {"type": "disabled"}})
    assert off.status_code == 400 and "no switch" in off.json()["error"]["message"]


# ---- what is refused, in Anthropic's form and words


@pytest.mark.parametrize(
    "change, said",
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "only where tools are given"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config: "),
        ({"output_config": {"effort": "low"}}, "output_config: this model's chat template reads neither"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking: this model's chat template knows no reasoning"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(server, change, said):
    answer = post(server, **{"messages": SAID, "max_tokens": 3} | change)
    assert answer.status_code == 400 and set(answer.json()) == {"type", "error", "request_id"}
    assert answer.json()["type"] == "error" and said in answer.json()["error"]["message"]
    assert answer.json()["request_id"] == "mine"


def test_a_body_that_is_too_large(folder, shared_llm):
    with serving(shared_llm, options={"max_body_bytes": 100}) as server:
        answer = post(server, messages=SAID * 100, max_tokens=1)
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "request_too_large"


# ---- the stream


def test_events_of_text(server):
    answer = post(server, messages=SAID, max_tokens=2, temperature=0, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = named_events(answer.text)
    assert all(data["type"] == name for name, data in events)
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0][1]["message"]["content"] == [] and events[0][1]["message"]["stop_reason"] is None
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_events_of_every_kind_of_block():
    turn = turn_of(
        Reasoning("th"),
        Reasoning("ink"),
        Content("so"),
        CallPart(0, "f", ""),
        CallPart(0, None, '{"x"'),
        CallPart(0, None, ":1}"),
        CallPart(1, "g", "{}"),
        finish_reason="tool_calls",
    )
    events = collected(_events(turn))
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert [start["name"] for start in starts[2:]] == ["f", "g"] and starts[2]["id"] != starts[3]["id"]
    deltas = [(data["index"], data["delta"]) for name, data in events if name == "content_block_delta"]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "th"}),
        (0, {"type": "thinking_delta", "thinking": "ink"}),
        (1, {"type": "text_delta", "text": "so"}),
        (2, {"type": "input_json_delta", "partial_json": '{"x"'}),
        (2, {"type": "input_json_delta", "partial_json": ":1}"}),
        (3, {"type": "input_json_delta", "partial_json": "{}"}),
    ]
    begun = [data["index"] for name, data in events if name == "content_block_start"]
    assert begun == [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2, 3]
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    usage = events[-2][1]["usage"]
    counts = {"input_tokens": 1, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2, "output_tokens": 7}
    assert {name: usage[name] for name in counts} == counts


def test_an_error_ends_the_stream():
    events = collected(_events(turn_of(Content("so"), finish_reason="error", stop_reason="NaN")))
    assert events[-1] == ("error", {"type": "error", "error": {"type": "api_error", "message": "NaN"}, "request_id": None})


# ---- the chat that is asked for


def test_a_request_as_a_chat(server):
    given = {
        "model": "alphabet",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}],
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [TOOL | {"strict": True}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["end"],
    }
    chat = to_chat(_served(server), MessagesRequest.model_validate(given))
    assert [message.plain() for message in chat.messages] == [
        {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no"},
        {"role": "user", "content": "go on"},
    ]
    (tool,) = chat.tools or []
    assert tool.function.strict and tool.function.parameters == TOOL["input_schema"]
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.stop, chat.max_tokens) == ("auto", False, ["end"], 5)


def test_thinking_is_held_to_its_budget(thinking):
    given = {"model": "alphabet", "max_tokens": 4, "messages": SAID, "thinking": {"type": "enabled", "budget_tokens": 2000}}
    assert to_chat(_served(thinking), MessagesRequest.model_validate(given)).thinking_token_budget == 2000
    refused = thinking.client.post("/v1/messages", json=given)  # this model's <think> is several tokens
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("thinking: ")


def _served(server):
    return Served(server.engine, ServerOptions(names=("alphabet",)), Notation())
