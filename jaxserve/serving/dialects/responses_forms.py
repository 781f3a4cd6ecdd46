"""What the server answers in OpenAI's Responses API: responses, their items, events of streams."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from jaxserve.serving.responses import TokenLogprob, WeightVersions

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(Struct, tag="output_text", tag_field="type"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningPart(Struct, tag="reasoning_text", tag_field="type"):
    text: str


class MessageOutput(Struct, tag="message", tag_field="type", kw_only=True):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextPart]


class ReasoningOutput(Struct, tag="reasoning", tag_field="type", kw_only=True):
    """summary is always empty: content has all of the reasoning."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningPart]


class FunctionCallOutput(Struct, tag="function_call", tag_field="type", kw_only=True):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(Struct):
    """Why a response failed. code: OpenAI's; invalid_prompt is its word for a request that is at fault itself."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class RawMessage(Struct, tag="raw_message_tokens", tag_field="type"):
    """vLLM's: a prompt as the chat template wrote it, or an answer before it is cut into items; and its token ids."""

    message: str
    tokens: list[int]


class ResponseObject(Struct, kw_only=True):
    """OpenAI's, and with enable_response_messages vLLM's input_messages and output_messages; weight_versions as a chat's choice
    has it. status: queued is one in the background of which no token has come."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    input_messages: list[RawMessage] | UnsetType = UNSET
    output_messages: list[RawMessage] | UnsetType = UNSET
    weight_versions: WeightVersions = UNSET


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# ---- events of a stream: their type is "response." and more


class Lifecycle(Struct, kw_only=True):
    """response.created, .queued, .in_progress, .completed, .incomplete, .failed or .cancelled."""

    type: str
    sequence_number: int
    response: ResponseObject


class ErrorEvent(Struct, tag="error", tag_field="type", kw_only=True):
    """error: the stream ends without its end."""

    code: str
    message: str


class ItemEvent(Struct, kw_only=True):
    """response.output_item.added or .done."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(Struct, kw_only=True):
    """response.content_part.added or .done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputTextPart | ReasoningPart


class TextEvent(Struct, kw_only=True):
    """response.output_text, .reasoning_text or .function_call_arguments, each .delta or .done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
