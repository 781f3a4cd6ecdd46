"""What clients send of a chat: messages, tools, and OpenAI's request for its completion.

Owns names, types and ranges, as protocol.py does for what is no chat's own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from jaxserve.moved import forward
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.serving.protocol import ONE_FORM, CompletionRequest, GenerationRequest
from jaxserve.serving.strict_model import ITEMS, PARTS, Model, Text, if_given
from jaxserve.serving.vllm_fields import VLLMModel


class TextPart(Model):
    type: Literal["text"]
    text: str


class FunctionCall(Model):
    name: Text
    arguments: str = Field(description="A JSON object, as a string.")


class ToolCall(Model):
    id: str
    type: Literal["function"]
    function: FunctionCall


class SaidMessage(Model):
    """What the system or the user says; a developer's message is the system's."""

    role: Literal["system", "developer", "user"]
    content: str | Annotated[list[TextPart], PARTS]
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return self.model_dump(exclude_none=True) | ({"role": "system"} if self.role == "developer" else {})


class ToolMessage(Model):
    """What a tool answered."""

    role: Literal["tool"]
    content: str | Annotated[list[TextPart], PARTS]
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class AssistantTurn(Model):
    """What the model said; a field that this server's answers never fill may only be null."""

    role: Literal["assistant"]
    content: str | Annotated[list[TextPart], PARTS] | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="What it thought before its content.")
    reasoning: str | None = Field(None, description="The same, by vLLM's newer name.")
    tool_calls: Annotated[list[ToolCall], PARTS] | None = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it: a tool call's arguments are no string, where they are JSON."""
        plain = {"content": ""} | self.model_dump(exclude_none=True)
        if (reasoning := plain.pop("reasoning", None)) is not None:  # templates read the older name
            plain.setdefault("reasoning_content", reasoning)
        for call in plain.get("tool_calls", ()):
            with contextlib.suppress(ValueError, RecursionError):  # what a model wrote may not be JSON; then it stays as it is
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        return plain


ChatMessage = Annotated[SaidMessage | ToolMessage | AssistantTurn, Field(discriminator="role")]


class FunctionSchema(Model):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Hold the arguments of its calls to its parameters.")


class Tool(Model):
    type: Literal["function"]
    function: FunctionSchema


class FunctionName(Model):
    name: Text


class NamedTool(Model):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


# What chat_template_kwargs must not hold.
NO_DEFAULTS: Mapping[str, Any] = {}
RESERVED_VARIABLES = ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")


class Chat(VLLMModel):
    """What a chat's prompt is made of."""

    messages: Annotated[list[ChatMessage], ITEMS] = Field(
        description="The conversation: text of the roles system, developer, user, assistant, tool."
    )
    tools: Annotated[list[Tool], PARTS] | None = Field(
        None, description="Functions that the model may call, which the client then runs."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template, as enable_thinking.")
    add_generation_prompt: bool | None = Field(None, description="End with the opening of the assistant's turn (true).")
    continue_final_message: bool | None = Field(None, description="Go on with the last message; nothing follows it in the prompt.")
    chat_template: Text | None = Field(None, description="Jinja source in place of the model's, if the server trusts that.")
    documents: Annotated[list[Annotated[dict[str, str], Field(max_length=64)]], PARTS] | None = Field(
        None, description="For chat templates that read documents."
    )

    @model_validator(mode="after")
    def _one_end(self):
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("give continue_final_message=true or add_generation_prompt=true, not both")
        return self

    @property
    def continued(self) -> str:
        """The text that the answer goes on with; "" where it begins a turn."""
        return self.last_text if self.continue_final_message else ""

    @property
    def last_text(self) -> str:
        """The text of the last message."""
        content = self.messages[-1].content
        return "\n".join(part.text for part in content) if isinstance(content, list) else content or ""

    @property
    def role(self) -> str | None:
        """The role in which the answer goes on; None where it begins a turn."""
        ends_open = self.continue_final_message or self.add_generation_prompt is False
        return self.messages[-1].role if ends_open else None

    def template_variables(self, *, with_tools: bool = True, defaults: Mapping[str, Any] = NO_DEFAULTS) -> dict[str, Any]:
        """What the chat template is given beside the messages. defaults: of variables that the request does not set."""
        given = {**defaults, **(self.chat_template_kwargs or {})}
        taken = given.keys() & set(RESERVED_VARIABLES)
        if taken:
            raise ValueError(f"chat_template_kwargs must not hold {', '.join(sorted(taken))}")
        if self.documents:
            given["documents"] = self.documents
        if self.tools and with_tools:
            given["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if self.continue_final_message:
            return given | {"add_generation_prompt": False, "continue_final_message": True}
        return given | {"add_generation_prompt": self.add_generation_prompt is not False}


CALLS_NEED_TOOLS: dict[str, Any] = {
    "if": {"properties": {"tool_choice": {"anyOf": [{"const": "required"}, {"type": "object"}]}}, "required": ["tool_choice"]},
    "then": {"properties": {"tools": {"type": "array", "minItems": 1}}, "required": ["tools"]},
}


class ChatRequest(GenerationRequest, Chat):
    """`POST /v1/chat/completions`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={
            "allOf": [
                if_given("stream_options", "object", "stream"),
                if_given("top_logprobs", "integer", "logprobs"),
                ONE_FORM,
                CALLS_NEED_TOOLS,
            ]  # no fifth: schemathesis could not generate requests any more
        }
    )

    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="The newer name of max_tokens; not both.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the output's tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="And of so many likeliest tokens in each place; only with logprobs=true."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="Whether the tools are shown to the model (none), may be called (auto), or must be."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one tool call at most.")
    include_reasoning: bool | None = Field(None, description="false: leave out what the model thinks before it answers.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that read it, or enable_thinking, which is true unless it is none."
    )
    echo: bool | None = Field(None, description="The answer begins with the message that it goes on with.")
    return_prompt_text: bool | None = Field(None, description="Answer with the rendered prompt too.")
    modalities: Annotated[list[Literal["text"]], PARTS] | None = Field(None, description="Only text.")

    @model_validator(mode="after")
    def _pairs(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs may be given only with logprobs=true")
        if self.logprob_token_ids and not self.logprobs:
            raise ValueError("logprob_token_ids may be given only with logprobs=true")
        if {"max_tokens", "max_completion_tokens"} <= self.model_fields_set:
            raise ValueError("give max_tokens or max_completion_tokens, not both")
        return self

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The JSON schema of each tool's parameters, by the tool's name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.shown_tools}

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []


def _kind(given: Any) -> str:
    is_chat = "messages" in given if isinstance(given, Mapping) else isinstance(given, Chat)
    return "<chat>" if is_chat else "<completion>"


# `POST /invocations`, by which SageMaker asks for either.
Invocation = Annotated[
    Annotated[ChatRequest, Tag("<chat>")] | Annotated[CompletionRequest, Tag("<completion>")], Discriminator(_kind)
]


class TokenizeChatRequest(Chat):
    """`POST /tokenize` of a chat."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
