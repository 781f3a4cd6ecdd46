"""Reasoning and tool calls over HTTP, through the `openai` package, from an engine that says them word for word."""

import json

import openai
import pytest

from scripts.bench.replay_engine import replay_llm
from tests.serving.http_server import serving

TEMPLATE = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}</think>"
TEXT = '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>END'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASKED = {"model": "replay", "messages": [{"role": "user", "content": "?"}], "stop": "END", "max_tokens": 500}


@pytest.fixture(scope="module")
def client():
    with serving(replay_llm(8, text=TEXT, chat_template=TEMPLATE), names=("replay",)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client


def test_whole(client):
    (choice,) = client.chat.completions.create(**ASKED, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "hm"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Rome"}


def test_streamed(client):
    with client.chat.completions.stream(**ASKED, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "Let me see."
    (call,) = final.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Rome"}
    parts = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(parts) > 5, "the arguments come as they are said"
    chunks = [event.chunk for event in events if event.type == "chunk" and event.chunk.choices]
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks) == "hm"


def test_tools_that_are_not_shown_are_not_looked_for(client):
    (choice,) = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice="none").choices
    assert choice.finish_reason == "stop" and "<tool_call>" in choice.message.content and not choice.message.tool_calls
