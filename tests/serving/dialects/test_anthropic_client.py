"""`/v1/messages` through the anthropic package, which sends and reads what its users do."""

import json

import pytest

from tests.alphabet_model import after
from tests.serving.http_server import serving

anthropic = pytest.importorskip("anthropic")

SAID = [{"role": "user", "content": "a"}]
GREEDY = {"extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def shared(tools_llm):
    """A server with a key, whose chat template has tools."""
    with serving(tools_llm, options={"api_keys": ("secret",)}) as server:
        yield server


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        yield client


def num_input_tokens(usage) -> int:
    """Of the prompt: cached, in whole pages that are cached now, and the rest, which is less than a page."""
    assert usage.input_tokens < 4
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_a_message(client):
    message = client.messages.create(model="alphabet", max_tokens=3, messages=SAID, system="be", **GREEDY)
    assert message.role == "assistant" and message.type == "message" and message.id.startswith("msg_")
    assert [block.text for block in message.content] == ["BCD"] and message.stop_reason == "max_tokens"
    assert num_input_tokens(message.usage) == len("s:be;u:a;A")
    assert message.usage.output_tokens == 3


def test_a_stop_sequence(client):
    message = client.messages.create(model="alphabet", max_tokens=9, messages=SAID, stop_sequences=["X", "EF"], **GREEDY)
    assert message.content[0].text == "BCD"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "EF")


def test_the_streaming_helper(client):
    with client.messages.stream(model="alphabet", max_tokens=5, messages=SAID, **GREEDY) as stream:
        assert "".join(stream.text_stream) == "BCDEF"
        final = stream.get_final_message()
    assert final.content[0].text == "BCDEF" and final.usage.output_tokens == 5 and final.stop_reason == "max_tokens"


def test_a_conversation_goes_on(client):
    """What the server answered is sent back as it came; a last turn of the assistant is gone on with."""
    first = client.messages.create(model="alphabet", max_tokens=2, messages=SAID, **GREEDY)
    turns = [*SAID, {"role": "assistant", "content": first.content}, {"role": "user", "content": "x"}]
    again = client.messages.create(model="alphabet", max_tokens=2, messages=turns, **GREEDY)
    assert num_input_tokens(again.usage) == len("u:a;a:BC;u:x;A")
    prefilled = client.messages.create(
        model="alphabet", max_tokens=2, messages=[*SAID, {"role": "assistant", "content": "kl"}], **GREEDY
    )
    assert prefilled.content[0].text == after("l", 2)


def test_tokens_are_counted(client):
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "yz"}]
    counted = client.messages.count_tokens(model="alphabet", messages=[{"role": "user", "content": parts}], system="s")
    assert counted.input_tokens == len("s:s;u:x\nyz;A")


TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}}
TOOL["input_schema"]["additionalProperties"] = False


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}], ids=["any", "tool"])
def test_a_tool_is_called_and_answers(client, choice):
    asked = {"model": "alphabet", "max_tokens": 120, "messages": SAID, "tools": [TOOL], **GREEDY}
    message = client.messages.create(**asked, tool_choice=choice | {"disable_parallel_tool_use": True})
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "f" and call.input["x"] in (1, 2)
    with client.messages.stream(**asked, tool_choice=choice | {"disable_parallel_tool_use": True}) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == call.input and final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "7"}]}
    turns = [*SAID, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model="alphabet", max_tokens=2, messages=turns, **GREEDY)
    assert answer.content[0].text == "BC"


def test_output_of_a_schema(client):
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    made = client.messages.create(
        model="alphabet",
        max_tokens=60,
        messages=SAID,
        output_config={"format": {"type": "json_schema", "schema": {"enum": [schema["type"]]}}},
        **GREEDY,
    )
    assert json.loads(made.content[0].text) == "object" and made.stop_reason == "end_turn"


def test_errors(client, server):
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(model="alphabet", max_tokens=1, messages=SAID, extra_body={"top_q": 1})
    assert wrong.value.body["error"] == {"type": "invalid_request_error", "message": "top_q: unknown parameter"}
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="other", max_tokens=1, messages=SAID)
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model="alphabet", max_tokens=1, messages=SAID)
