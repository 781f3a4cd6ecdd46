"""Tool calls that are held to their schemas, by a model that would say something else, through `openai` and its helpers."""

import json
from typing import Literal

import openai
import pydantic
import pytest

from jaxserve import LLM, BucketPlan
from tests import alphabet_model
from tests.alphabet_model import TURN, after
from tests.serving.http_server import serving

PLAN = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))
TEMPLATE = "{% if tools %}<tool_call>{% endif %}" + alphabet_model.CHAT_TEMPLATE


class Weather(pydantic.BaseModel):
    """The weather of a place."""

    city: str = pydantic.Field(max_length=4)
    unit: Literal["C", "F"]


class Sum(pydantic.BaseModel):
    terms: list[Literal[1, 2]] = pydantic.Field(max_length=3)


STRICT = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Sum)]
LOOSE = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("first", "second")]
ASKED = {"model": "alphabet", "messages": [{"role": "user", "content": "?"}], "max_tokens": 150, "temperature": 0}
CALLS = {"chat_template_kwargs": {"opening": TURN}}  # after this token comes <tool_call>, if it may


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """In its vocabulary <tool_call> is a token and </tool_call> is not."""
    folder = alphabet_model.save(tmp_path_factory.mktemp("tools"), chat_template=TEMPLATE, added_tokens=["<tool_call>"])
    with serving(LLM(folder, bucket_plan=PLAN, num_pages=200, page_size=4, compilation_cache_dir="")) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.wait_idle()


def called(choice) -> list:
    """(name, arguments) of each call of a choice that calls."""
    assert choice.finish_reason == "tool_calls", choice
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def test_required(client):
    (choice,) = client.chat.completions.create(**ASKED, tools=STRICT, tool_choice="required", parallel_tool_calls=False).choices
    ((name, arguments),) = called(choice)
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == json.dumps(arguments), "spaced as chat templates have it"
    {"Weather": Weather, "Sum": Sum}[name].model_validate(arguments)
    (choice,) = client.chat.completions.create(**ASKED, tools=LOOSE[:1], tool_choice="required", parallel_tool_calls=False).choices
    assert called(choice)[0][0] == "first", "whether it is strict or not"


def test_several_calls(client):
    """After the first call the model ends, or goes on with another."""
    asked = ASKED | {"logit_bias": {str(ord("\n")): 30}}
    nothing = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    (choice,) = client.chat.completions.create(**asked, tools=nothing, tool_choice="required").choices
    *calls, _ = choice.message.tool_calls  # the last is cut
    assert choice.finish_reason == "length" and len(calls) > 1
    assert all(call.function.name in "ab" and call.function.arguments == "{}" for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    one = client.chat.completions.create(**asked, tools=nothing, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert len(called(one)) == 1


@pytest.mark.parametrize("tool", [Weather, Sum])
def test_a_function_by_name(client, tool):
    choice = {"type": "function", "function": {"name": tool.__name__}}
    for seed in range(3):
        answer = client.chat.completions.create(**ASKED | {"temperature": 2, "seed": seed}, tools=STRICT, tool_choice=choice)
        ((name, arguments),) = called(answer.choices[0])
        assert name == tool.__name__ and answer.choices[0].message.content == ""
        tool.model_validate(arguments)


def test_auto_is_free_until_a_call_begins(client):
    (choice,) = client.chat.completions.create(**ASKED | {"max_tokens": 5}, tools=STRICT).choices
    assert choice.message.content == after("A", 5) and not choice.message.tool_calls
    (choice,) = client.chat.completions.create(**ASKED, tools=STRICT, parallel_tool_calls=False, extra_body=CALLS).choices
    ((name, arguments),) = called(choice)
    {"Weather": Weather, "Sum": Sum}[name].model_validate(arguments)
    (choice,) = client.chat.completions.create(**ASKED, tools=LOOSE, extra_body=CALLS).choices
    assert not choice.message.tool_calls, "nobody asked for calls that are well-formed"


def test_tools_that_are_not_strict_beside_one_that_is(client):
    (choice,) = client.chat.completions.create(
        **ASKED | {"seed": 1}, tools=[LOOSE[0], STRICT[1]], parallel_tool_calls=False, extra_body=CALLS
    ).choices
    if choice.finish_reason == "tool_calls":
        assert called(choice)[0][0] in ("first", "Sum")


def test_the_parse_helper(client):
    answer = client.chat.completions.parse(**ASKED, tools=STRICT, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather | Sum)


def test_the_streaming_helper(client):
    named = {"type": "function", "function": {"name": "Weather"}}
    with client.chat.completions.stream(**ASKED, tools=STRICT, tool_choice=named) as stream:
        events = list(stream)
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 3
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)


def strict(parameters) -> list:
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}]


SPACELESS = {"json": {"type": "object"}, "disable_any_whitespace": True}
REFUSED = [
    ({"tools": STRICT, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "there is no tool 'nobody'"),
    ({"tool_choice": "required"}, "only where tools are given"),
    ({"tools": [], "tool_choice": "required"}, "only where tools are given"),
    ({"tools": strict({"type": "object", "if": {}})}, "Unimplemented keys"),
    ({"tools": strict({"type": "string"})}, "the parameters of 'f' must be an object's schema"),
    ({"tools": strict({"properties": {"a": {"type": "nothing"}}})}, "tools: structural_tag: "),
    ({"tools": LOOSE, "extra_body": {"structured_outputs": {"regex": "a"}}}, "beside tools it may only be json_object"),
    ({"tools": LOOSE, "extra_body": {"structured_outputs": {"json": True}}}, "beside tools it may only be json_object"),
    ({"tools": LOOSE, "extra_body": {"structured_outputs": SPACELESS}}, "beside tools it may only be json_object"),
]


@pytest.mark.parametrize("body,said", REFUSED, ids=[said for _, said in REFUSED])
def test_refusals(client, body, said):
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(**ASKED, **body)


@pytest.mark.parametrize("tools", [STRICT, LOOSE], ids=["strict", "loose"])
def test_a_form_beside_tools(client, tools):
    """The answer is content of the form, or calls."""
    bias = {str(ord("}")): 20} | {str(ord(c)): -100 for c in " \t\r\n"}  # this model would go on with blanks for ever
    schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": Sum.model_json_schema()}}
    asked = ASKED | {"response_format": schema, "parallel_tool_calls": False, "logit_bias": bias}
    (choice,) = client.chat.completions.create(**asked, tools=tools).choices
    Sum.model_validate_json(choice.message.content)
    assert not choice.message.tool_calls and choice.finish_reason == "stop"
    asked["response_format"] = {"type": "json_object"}
    (choice,) = client.chat.completions.create(**asked, tools=tools).choices
    assert choice.message.content == "{}" and choice.finish_reason == "stop"
    (choice,) = client.chat.completions.create(**asked, tools=tools, extra_body=CALLS).choices
    ((name, _),) = called(choice)
    assert name in [tool["function"]["name"] for tool in tools] and choice.message.content is None
    required = client.chat.completions.create(**asked, tools=tools, tool_choice="required").choices[0]
    assert len(called(required)) == 1, "what must be called leaves no content to have a form"


def test_a_form_beside_tools_that_are_not_shown(client):
    (choice,) = client.chat.completions.create(
        **ASKED, tools=STRICT, tool_choice="none", extra_body={"structured_outputs": {"choice": ["x"]}}
    ).choices
    assert choice.message.content == "x"
