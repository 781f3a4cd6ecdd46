"""What clients send: OpenAI's requests with vLLM's extra fields, as pydantic models, and the table that leads to SamplingParams.

Owns names, types and ranges; whatever is not named here is refused, and null means that a field was left out. Ranges that depend on
the model are the engine's to check (openapi.py writes them into the published schema).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from jaxserve.request import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

DECIMAL_TOKEN_ID = r"^(0|[1-9][0-9]{0,9})$"
MAX_STOPS = 12  # stop strings, and stop token ids, of a request


def _integral(value: Any) -> Any:
    """JSON does not tell 3.0 from 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_integral(values: Any) -> Any:
    return [_integral(x) for x in values] if isinstance(values, list) and any(type(x) is float for x in values) else values


def _only_false(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported")
    return value


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
SomeTokenIds = Annotated[list[TokenId], BeforeValidator(_all_integral)]
TokenIds = Annotated[list[TokenId], Field(min_length=1), BeforeValidator(_all_integral)]
Prompt = Text | Annotated[list[Text], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
OnlyFalse = Annotated[bool, AfterValidator(_only_false), WithJsonSchema({"const": False, "type": "boolean"})]
TokenIdText = Annotated[str, Field(pattern=DECIMAL_TOKEN_ID)]

PASSED_ON = (  # fields that are SamplingParams' own, by the same name
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)


class Model(BaseModel):
    """Refuses unknown fields, and values of another type than JSON gave them."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: Any) -> Any:
        return {name: _integral(value) for name, value in given.items()} if isinstance(given, dict) else given


def _if_given(name: str, kind: str, needed: str) -> dict[str, Any]:
    """A JSON schema's way to say that `name`, where it is given, needs `needed` to be true."""
    return {
        "if": {"properties": {name: {"type": kind}}, "required": [name]},
        "then": {"properties": {needed: {"const": True}}, "required": [needed]},
    }


class StreamOptions(Model):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(Model):
    type: Literal["text"]


class GenerationRequest(Model):
    """What completions and chats have in common."""

    model_config: ClassVar[ConfigDict] = ConfigDict(json_schema_extra=_if_given("stream_options", "object", "stream"))

    model: str | None = Field(None, description="One of /v1/models; by default the one that is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only with stream=true.")
    n: int | None = Field(None, ge=1, le=128, description="Samples of each prompt.")
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="Nothing ends the output before; max_tokens does.")
    temperature: float | None = Field(None, ge=0, le=1000, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**53), le=2**53, description="What JSON can say exactly.")
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: SomeTokenIds | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[TokenIdText, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, description="Token id, in decimal, to what is added to its logit."
    )
    allowed_token_ids: TokenIds | None = None
    bad_words: list[Annotated[str, Field(pattern=r"\S")]] | None = Field(None, max_length=MAX_BAD_WORDS // 2)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = Field(None, description="Put the model's special tokens (often a BOS) around texts.")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Lower is served first, if the server was told to.")
    cache_salt: Text | None = Field(None, description="Prompts share cached prefixes only under one salt.")
    user: str | None = Field(None, description="Kept in the access log.")
    response_format: TextFormat | None = None
    store: OnlyFalse | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self):
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only with stream=true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and (self.stream_options.include_usage or self.stream_options.continuous_usage_stats))

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The server's defaults, changed by what was given. Raises ValueError or NotImplementedError for what can't be served."""
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(i): bias for i, bias in self.logit_bias.items()}
        if max_tokens is not None and self.min_tokens is not None:
            given["min_tokens"] = min(self.min_tokens, max_tokens)
        return defaults.with_(**given, max_tokens=max_tokens, logprobs=logprobs)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompt = Field(description="A text, texts, token ids, or lists of token ids.")
    echo: bool | None = Field(None, description="Put the prompt before the completion.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of so many likeliest tokens.")
    suffix: None = Field(None, description="Not supported.")
    best_of: int | None = Field(None, ge=1, le=1, description="Only 1; use n.")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


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
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return self.model_dump(exclude_none=True) | ({"role": "system"} if self.role == "developer" else {})


class ToolMessage(Model):
    """What a tool answered."""

    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class AssistantTurn(Model):
    """What the model said; a field that this server's answers never fill may only be null."""

    role: Literal["assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="What it thought before its content.")
    tool_calls: list[ToolCall] | None = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it: a tool call's arguments are no string, where they are JSON."""
        plain = {"content": ""} | self.model_dump(exclude_none=True)
        for call in plain.get("tool_calls", ()):
            with contextlib.suppress(json.JSONDecodeError):  # what a model wrote may not be JSON; then it stays as it is
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        return plain


Message = Annotated[SaidMessage | ToolMessage | AssistantTurn, Field(discriminator="role")]


class FunctionSchema(Model):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: OnlyFalse | None = Field(None, description="Calls are not yet held to their schema.")


class Tool(Model):
    type: Literal["function"]
    function: FunctionSchema


RESERVED_VARIABLES = ("messages", "tools", "chat_template", "add_generation_prompt")  # that chat_template_kwargs must not hold


class Chat(Model):
    """What a chat's prompt is made of."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template, as enable_thinking.")
    add_generation_prompt: bool | None = Field(None, description="End with the opening of the assistant's turn (true).")

    def template_variables(self, *, with_tools: bool = True) -> dict[str, Any]:
        given = dict(self.chat_template_kwargs or {})
        taken = given.keys() & set(RESERVED_VARIABLES)
        if taken:
            raise ValueError(f"chat_template_kwargs must not hold {', '.join(sorted(taken))}")
        if self.tools and with_tools:
            given["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return given | {"add_generation_prompt": self.add_generation_prompt is not False}


class ChatRequest(GenerationRequest, Chat):
    """`POST /v1/chat/completions`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={
            "allOf": [_if_given("stream_options", "object", "stream"), _if_given("top_logprobs", "integer", "logprobs")],
            "not": {"required": ["max_tokens", "max_completion_tokens"]},
        }
    )

    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Only with logprobs=true.")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="Whether the tools are shown to the model.")
    parallel_tool_calls: bool | None = Field(None, description="false keeps the first tool call alone.")
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _pairs(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs may be given only with logprobs=true")
        if {"max_tokens", "max_completion_tokens"} <= self.model_fields_set:
            raise ValueError("give max_tokens or max_completion_tokens, not both")
        return self


class TokenizeCompletionRequest(Model):
    """`POST /tokenize` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(Chat):
    """`POST /tokenize` of a chat."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Model):
    model: str | None = None
    tokens: SomeTokenIds


class UpdateWeightsRequest(Model):
    path: Text = Field(description="A folder or file on the server.")
    in_flight: Literal["refuse", "recompute", "keep"] = Field("refuse", description="What becomes of requests that have begun.")


class SleepRequest(Model):
    level: int = Field(1, ge=1, le=2, description="1: the weights go to the host's memory; 2: they are let go.")


def check_model(given: str | None, served: Sequence[str]) -> None:
    """LookupError for a model that is not served."""
    if given is not None and given not in served:
        raise LookupError(f"The model {given!r} does not exist; there is {', '.join(served)}")
