"""Clients that others wrote, unchanged, each where its package is installed (`make clients` installs them): langchain-openai,
litellm, instructor, pydantic-ai. They send and read what their users do."""

import asyncio
import gc
import json
import os
from typing import Any, Literal

import openai
import pydantic
import pytest

from scripts.bench.replay_engine import replay_llm
from tests.alphabet_model import after
from tests.serving.dialects.conftest import tools_llm
from tests.serving.http_server import serving
from tests.serving.test_tools import TEMPLATE

__all__ = ["tools_llm"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of these packages, and of what they stand on

KEY = "secret"
NO_BLANKS = {str(ord(c)): -100 for c in " \t\r\n"}  # the alphabet's model would go on with them for ever
SAID = [{"role": "user", "content": "a"}]
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>END'
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")  # else the model would add properties without end

    name: str = pydantic.Field(max_length=4)
    age: Literal[1, 20]


@pytest.fixture(scope="module")
def shared(tools_llm):
    with serving(tools_llm, options={"api_keys": (KEY,)}) as server:
        yield server


@pytest.fixture(scope="module")
def caller():
    """A server whose model calls a tool if it is shown one, in these words."""
    with serving(replay_llm(8, text=CALL, chat_template=TEMPLATE.removesuffix("</think>")), names=("caller",)) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def url(server):
    return f"{server.url}/v1"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """None of them has a reason to ask anybody else."""
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS", "DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "True")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield
    gc.collect()  # while warnings about what they leave open are ignored


# ---- langchain-openai


@pytest.fixture
def langchain():
    return pytest.importorskip("langchain_openai")


def test_langchain_chats(langchain, url):
    chat = langchain.ChatOpenAI(model="alphabet", base_url=url, api_key=KEY, temperature=0, max_tokens=5, max_retries=0)
    answer = chat.invoke("a")
    assert answer.content == "BCDEF" and answer.usage_metadata["output_tokens"] == 5
    assert answer.response_metadata["finish_reason"] == "length"
    chunks = list(chat.stream([("system", "be"), ("human", "a")]))
    assert "".join(chunk.content for chunk in chunks) == "BCDEF" and len(chunks) > 4
    assert [answer.content for answer in chat.batch(["a", "x"])] == ["BCDEF", "BCDEF"]
    assert asyncio.run(chat.ainvoke("a")).content == "BCDEF"
    with pytest.raises(openai.AuthenticationError):
        langchain.ChatOpenAI(model="alphabet", base_url=url, api_key="wrong", max_retries=0).invoke("a")


def test_langchain_completions_and_responses(langchain, url):
    complete = langchain.OpenAI(model="alphabet", base_url=url, api_key=KEY, temperature=0, max_tokens=5, max_retries=0)
    assert complete.invoke("a") == after("a", 5) and "".join(complete.stream("a")) == after("a", 5)
    responses = langchain.ChatOpenAI(
        model="alphabet", base_url=url, api_key=KEY, temperature=0, max_tokens=5, use_responses_api=True, max_retries=0
    )
    assert responses.invoke("a").text == "BCDEF"


def test_langchain_outputs_of_a_form(langchain, url):
    chat = langchain.ChatOpenAI(
        model="alphabet", base_url=url, api_key=KEY, temperature=1, seed=3, max_tokens=80, logit_bias=NO_BLANKS, max_retries=0
    )
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke("a"), Person)
    found = chat.with_structured_output(Person, method="json_schema", include_raw=True).invoke("a")
    assert found["parsed"] == Person.model_validate_json(found["raw"].content) and found["parsing_error"] is None


def test_langchain_tools(langchain, caller):
    chat = langchain.ChatOpenAI(model="caller", base_url=caller, api_key="none", max_tokens=200, stop=["END"], max_retries=0)
    with_tools = chat.bind_tools([WEATHER])
    (call,) = with_tools.invoke("?").tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    whole: Any = None
    for chunk in with_tools.stream("?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == {"city": "Rome"} and whole.content == "Let me see."


# ---- litellm


@pytest.fixture
def litellm(offline):
    return pytest.importorskip("litellm")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(litellm, url, provider):
    asked: dict[str, Any] = {"model": f"{provider}/alphabet", "api_base": url, "api_key": KEY, "messages": SAID}
    asked |= {"temperature": 0, "max_tokens": 5, "num_retries": 0}
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content == "BCDEF" and answer.usage.completion_tokens == 5
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "BCDEF"
    assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == "BCDEF"
    made = litellm.completion(**asked | {"max_tokens": 80, "temperature": 1}, seed=3, logit_bias=NO_BLANKS, response_format=Person)
    Person.model_validate_json(made.choices[0].message.content)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked | {"api_key": "wrong"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked | {"temperature": -1})


def test_litellm_tools_and_completions(litellm, url, caller):
    asked = {"model": "hosted_vllm/caller", "api_base": caller, "messages": SAID, "max_tokens": 200, "stop": "END"}
    (call,) = litellm.completion(**asked, tools=[WEATHER]).choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Rome"}
    asked = {"model": "hosted_vllm/alphabet", "api_base": url, "api_key": KEY, "prompt": "a", "max_tokens": 5, "temperature": 0}
    assert litellm.text_completion(**asked).choices[0].text == after("a", 5)


# ---- instructor


@pytest.fixture
def instructor():
    return pytest.importorskip("instructor")


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_instructor(instructor, url, mode):
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        patched = instructor.from_openai(client, mode=instructor.Mode[mode])
        person, answer = patched.chat.completions.create_with_completion(
            model="alphabet",
            messages=[{"role": "user", "content": "a"}],
            response_model=Person,
            max_tokens=150,
            temperature=1,
            seed=3,
            logit_bias=NO_BLANKS,
            max_retries=1,
            **({} if mode == "JSON_SCHEMA" else {"parallel_tool_calls": False}),
        )
    assert isinstance(person, Person) and answer.usage.completion_tokens > 0


# ---- pydantic-ai


@pytest.fixture
def pydantic_ai():
    pytest.importorskip("pydantic_ai.models.openai")
    return pytest.importorskip("pydantic_ai")


def agent_of(pydantic_ai, url: str, name: str = "alphabet", kind: str = "OpenAIChatModel", **options: Any):
    models, providers = (pytest.importorskip(f"pydantic_ai.{part}.openai") for part in ("models", "providers"))
    provider = providers.OpenAIProvider(base_url=url, api_key=KEY)
    return pydantic_ai.Agent(getattr(models, kind)(name, provider=provider), **options)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(pydantic_ai, url, kind):
    settings = {"temperature": 0.0, "max_tokens": 5}
    agent = agent_of(pydantic_ai, url, kind=kind, model_settings=settings)
    result = asyncio.run(agent.run("a"))
    assert result.output == "BCDEF" and result.usage().output_tokens == 5

    async def streamed() -> list[str]:
        async with agent.run_stream("a") as stream:
            return [text async for text in stream.stream_text(delta=True, debounce_by=None)]

    assert "".join(asyncio.run(streamed())) == "BCDEF"
    again = asyncio.run(agent.run("x", message_history=result.all_messages()))
    assert again.output == "BCDEF" and again.usage().input_tokens == len("u:a;a:BCDEF;u:x;A")


def test_pydantic_ai_outputs_of_a_form(pydantic_ai, url):
    settings = {"temperature": 1.0, "seed": 3, "max_tokens": 100, "logit_bias": NO_BLANKS}
    for output in (pydantic_ai.NativeOutput(Person), pydantic_ai.ToolOutput(Person)):
        agent = agent_of(pydantic_ai, url, output_type=output, model_settings=settings, retries=0)
        assert isinstance(asyncio.run(agent.run("a")).output, Person)


def test_pydantic_ai_tools(pydantic_ai, caller):
    """The tool is called with what the model says; then the model would call it again, which a limit ends."""
    cities: list[str] = []
    agent = agent_of(pydantic_ai, caller, "caller", model_settings={"max_tokens": 200, "stop_sequences": ["END"]})

    @agent.tool_plain(strict=False)  # the model that repeats its words knows no end, which a form needs
    def weather(city: str) -> str:
        cities.append(city)
        return "sunny"

    limits = pydantic_ai.usage.UsageLimits(request_limit=2)
    with pytest.raises(pydantic_ai.exceptions.UsageLimitExceeded):
        asyncio.run(agent.run("?", usage_limits=limits))
    assert cities == ["Rome", "Rome"]
