"""What clients send to `/v1/responses`: OpenAI's requests as pydantic models, and the messages that their items make.

Owns names, types and ranges. What this server can't do, such as images, files and the tools that OpenAI runs, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from jaxserve.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS
from jaxserve.serving.chat_protocol import FunctionSchema
from jaxserve.serving.forms import JsonObjectFormat, NamedSchema, StructuredOutputs, TextFormat
from jaxserve.serving.protocol import MAX_STOPS, RequestId
from jaxserve.serving.strict_model import ITEMS, PARTS, SOME_PARTS, Model, SomeTokenIds, Text, TokenIdText
from jaxserve.serving.vllm_fields import VLLMModel

ItemStatus = Literal["in_progress", "completed", "incomplete"]
LOGPROBS = "message.output_text.logprobs"
PASSED_ON = (  # fields that are a chat's own, by the same name
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "include_reasoning",
    "structured_outputs",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "cache_salt",
    "priority",
    "timeout",
    "request_id",
)


# ---- items of the input


class InputText(Model):
    type: Literal["input_text"]
    text: str


class OutputText(Model):
    """Text that the model wrote. annotations and logprobs: not read."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class SaidItem(Model):
    """What the user, the system or a developer says."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    content: str | Annotated[list[InputText], SOME_PARTS]
    id: str | None = None
    status: ItemStatus | None = None


class AnswerItem(Model):
    """What the model said."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: str | Annotated[list[Annotated[OutputText | InputText, Field(discriminator="type")]], SOME_PARTS]
    id: str | None = None
    status: ItemStatus | None = None
    phase: None = None


class FunctionCallItem(Model):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str = Field(description="A JSON object, as a string.")
    id: str | None = None
    status: ItemStatus | None = None


class FunctionOutputItem(Model):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: str | Annotated[list[InputText], PARTS]
    id: str | None = None
    status: ItemStatus | None = None


class ReasoningText(Model):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Model):
    """What the model thought before it answered. Summaries are not read: this server writes none."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: Annotated[list[ReasoningText], PARTS] | None = None
    encrypted_content: None = None
    status: ItemStatus | None = None


def _kind(item: Any) -> str:
    """Which of the items it is: messages need no type."""
    given = item if isinstance(item, dict) else getattr(item, "__dict__", {})  # what is no object is refused as a message
    kind = given.get("type", "message")
    return "answer" if kind == "message" and given.get("role") == "assistant" else str(kind)


InputItem = Annotated[
    Annotated[SaidItem, Tag("message")]
    | Annotated[AnswerItem, Tag("answer")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def chat_messages(items: Iterable[Any]) -> list[dict[str, Any]]:
    """The messages of a chat that items make. Reasoning, text and calls that follow each other are one turn of the assistant."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's, to which more may come
    for item in items:
        if isinstance(item, SaidItem):
            messages.append({"role": item.role, "content": _content(item.content)})
            turn = None
        elif isinstance(item, FunctionOutputItem):
            text = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            turn = None
        else:
            if turn is None or _begins_a_turn(item, turn):
                turn = {"role": "assistant"}
                messages.append(turn)
            _add(item, turn)
    return messages


def _content(content: str | list[InputText]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


def _begins_a_turn(item: Any, turn: dict[str, Any]) -> bool:
    if isinstance(item, FunctionCallItem):
        return False
    return "tool_calls" in turn or "content" in turn or (isinstance(item, ReasoningItem) and "reasoning_content" in turn)


def _add(item: Any, turn: dict[str, Any]) -> None:
    if isinstance(item, FunctionCallItem):
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        turn.setdefault("tool_calls", []).append(call)
    elif isinstance(item, ReasoningItem):
        turn["reasoning_content"] = "".join(part.text for part in item.content or [])
    else:
        turn["content"] = item.content if isinstance(item.content, str) else "".join(part.text for part in item.content)


# ---- the request


class FunctionTool(Model):
    """A function that the client runs."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Hold the arguments of its calls to its parameters.")

    def function(self) -> FunctionSchema:
        return FunctionSchema(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)


class NamedFunction(Model):
    """The function that must be called."""

    type: Literal["function"]
    name: Text


class SchemaFormat(NamedSchema):
    """JSON that a schema describes."""

    type: Literal["json_schema"]


class TextConfig(Model):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ReasoningConfig(Model):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="For chat templates that read reasoning_effort or enable_thinking."
    )
    summary: None = None


_CALLS_NEED_TOOLS: dict[str, Any] = {
    "if": {"properties": {"tool_choice": {"anyOf": [{"const": "required"}, {"type": "object"}]}}, "required": ["tool_choice"]},
    "then": {"properties": {"tools": {"type": "array", "minItems": 1}}, "required": ["tools"]},
}
_BACKGROUND: dict[str, Any] = {
    "if": {"properties": {"background": {"const": True}}, "required": ["background"]},
    "then": {"properties": {"store": {"enum": [True, None]}}},
}
_ONE_FORM: dict[str, Any] = {
    "if": {"properties": {"structured_outputs": {"type": "object"}}, "required": ["structured_outputs"]},
    "then": {"properties": {"text": {"type": "null"}}},
}


class ResponsesRequest(VLLMModel):
    """`POST /v1/responses`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(json_schema_extra={"allOf": [_CALLS_NEED_TOOLS, _BACKGROUND, _ONE_FORM]})

    model: str | None = Field(None, description="One of /v1/models; by default the one that is served.")
    input: Text | Annotated[list[InputItem], ITEMS]
    instructions: str | None = Field(None, description="A system message for this response alone.")
    previous_response_id: str | None = Field(None, description="The response that this one follows; it must be stored.")
    store: bool | None = Field(None, description="Keep the response (true), within the server's bounds.")
    background: bool | None = Field(None, description="Answer at once; GET the response later, or its events with stream.")
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], PARTS] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: one tool call at most.")
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], PARTS] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="With include: message.output_text.logprobs.")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    temperature: float | None = Field(None, ge=0, le=1000, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = Field(None, description="Kept in the access log.")
    safety_identifier: str | None = Field(None, description="The newer name of user.")
    prompt_cache_key: str | None = Field(None, description="Not needed: prefixes are found whatever it says.")
    # vLLM's, and ours
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**53), le=2**53)
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: SomeTokenIds | None = Field(None, max_length=MAX_STOPS)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[TokenIdText, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    include_reasoning: bool | None = Field(None, description="false: leave out what the model thinks before it answers.")
    enable_response_messages: bool | None = Field(
        None, description="The prompt and the whole answer too, as text and token ids, as input_messages and output_messages."
    )
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template, as enable_thinking.")
    cache_salt: Text | None = Field(None, description="Prompts share cached prefixes only under one salt.")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Lower is served first, if the server was told to.")
    timeout: float | None = Field(None, gt=0, description="Ours: seconds from its arrival that it may take; then 504.")
    request_id: RequestId | None = Field(None, description="Of the answer in logs and for /inference/v1/abort_requests.")

    @model_validator(mode="after")
    def _goes_together(self):
        if self.background and self.store is False:
            raise ValueError("background can only be used when `store` is true: nobody could read the response")
        if self.structured_outputs is not None and self.text is not None:
            raise ValueError("give text or structured_outputs, not both")
        return self

    @property
    def items(self) -> list[Any]:
        """The input's items."""
        return [SaidItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
