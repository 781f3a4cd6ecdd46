"""What clients send to `/v1/messages`: Anthropic's requests as pydantic models, and the chat that each asks for.

Owns names, types and ranges. What this server can't do, such as images and the tools that Anthropic runs, is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from jaxserve.serving.chat_protocol import FunctionSchema
from jaxserve.serving.protocol import MAX_STOPS
from jaxserve.serving.strict_model import MAX_ITEMS, PARTS, SOME_PARTS, Model, Text
from jaxserve.serving.vllm_fields import VLLMModel


class CacheControl(Model):
    """Asks for what is done anyway: prefixes are cached where caching is on."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Model):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(Model):
    """What the model thought before it answered. signature: not read."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | Annotated[list[TextBlock], PARTS] | None = None
    is_error: bool | None = Field(None, description='true: the model reads "Error: " before the content.')

    def plain(self) -> dict[str, Any]:
        content = [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]
        text = "\n".join(content)
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": f"Error: {text}" if self.is_error else text}


def _parts(blocks: list[TextBlock]) -> str | list[dict[str, str]]:
    """Text blocks as the content of a chat's message."""
    texts = [block.text for block in blocks]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


class UserTurn(Model):
    role: Literal["user"]
    content: str | Annotated[list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]], SOME_PARTS]

    def plain(self) -> Iterator[dict[str, Any]]:
        """The chat's messages: each result of a tool is one."""
        if isinstance(self.content, str):
            yield {"role": "user", "content": self.content}
            return
        yield from (block.plain() for block in self.content if isinstance(block, ToolResultBlock))
        if said := [block for block in self.content if isinstance(block, TextBlock)]:
            yield {"role": "user", "content": _parts(said)}


class AssistantTurn(Model):
    role: Literal["assistant"]
    content: (
        str
        | Annotated[
            list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]],
            SOME_PARTS,
        ]
    )

    def plain(self) -> Iterator[dict[str, Any]]:
        if isinstance(self.content, str):
            yield {"role": "assistant", "content": self.content}
            return
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(block.text for block in self.content if isinstance(block, TextBlock)),
        }
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.input)}}
                for call in calls
            ]
        yield message


class SystemTurn(Model):
    """A system message between others."""

    role: Literal["system"]
    content: str | Annotated[list[TextBlock], SOME_PARTS]

    def plain(self) -> Iterator[dict[str, Any]]:
        yield {"role": "system", "content": self.content if isinstance(self.content, str) else _parts(self.content)}


class MessagesTool(Block):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Hold the input of its calls to the schema.")
    eager_input_streaming: Literal[True] | None = Field(None, description="Input is always streamed as it comes.")

    def function(self) -> FunctionSchema:
        return FunctionSchema(name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict)


class AutoChoice(Model):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Model):
    type: Literal["tool"]
    name: Text
    disable_parallel_tool_use: bool | None = None


class NoChoice(Model):
    type: Literal["none"]


class ThinkingEnabled(Model):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1024, le=2**31 - 1, description="Most tokens of thinking; then its end is forced.")
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Model):
    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = Field(None, description="omitted: leave out the blocks of thinking.")


class ThinkingDisabled(Model):
    type: Literal["disabled"]


class OutputFormat(Model):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Model):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that read reasoning_effort or enable_thinking."
    )


class Metadata(Model):
    user_id: str | None = Field(None, description="Kept in the access log.")


_CALLS_NEED_TOOLS: dict[str, Any] = {
    "if": {
        "properties": {"tool_choice": {"type": "object", "properties": {"type": {"enum": ["any", "tool"]}}, "required": ["type"]}},
        "required": ["tool_choice"],
    },
    "then": {"properties": {"tools": {"type": "array", "minItems": 1}}, "required": ["tools"]},
}


class MessagesPrompt(VLLMModel):
    """What a message's prompt is made of: `POST /v1/messages/count_tokens`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(json_schema_extra={"allOf": [_CALLS_NEED_TOOLS]})

    model: Text
    messages: Annotated[
        list[Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]],
        Field(
            min_length=1,
            max_length=MAX_ITEMS,
            fail_fast=True,
            description="If the assistant's is the last, the answer goes on with its text.",
        ),
    ]
    system: str | Annotated[list[TextBlock], PARTS] | None = None
    tools: Annotated[list[MessagesTool], PARTS] | None = None
    tool_choice: Annotated[AutoChoice | ToolChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="vLLM's: variables of the chat template.")

    def chat_messages(self) -> list[dict[str, Any]]:
        """The messages of the chat."""
        system: list[dict[str, Any]] = []
        if self.system:
            system = [{"role": "system", "content": self.system if isinstance(self.system, str) else _parts(self.system)}]
        return system + [message for turn in self.messages for message in turn.plain()]


class MessagesRequest(MessagesPrompt):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1000, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1 are off.")
    stop_sequences: Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_salt: Text | None = Field(None, description="vLLM's: prompts share cached prefixes only under one salt.")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="vLLM's: lower is served first.")
    timeout: float | None = Field(None, gt=0, description="Ours: seconds that it may take; then 504.")
