"""What the server answers in Anthropic's Messages API: messages, events of streams, errors. Every field is Anthropic's but
weight_versions, which a server has whose weights may change."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from jaxserve.serving.responses import WeightVersions


class MessagesErrorDetail(Struct):
    type: str
    message: str


class MessagesError(Struct, tag="error", tag_field="type"):
    """An error; in a stream, an event."""

    error: MessagesErrorDetail
    request_id: str | None = None


class TextAnswer(Struct, tag="text", tag_field="type"):
    text: str


class ThinkingAnswer(Struct, tag="thinking", tag_field="type"):
    """signature is always empty: nobody checks what comes back."""

    thinking: str
    signature: str = ""


class ToolUseAnswer(Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]  # the last: the engine was paused


class OutputTokensDetails(Struct):
    thinking_tokens: int


class MessagesUsage(Struct):
    """Three counts make up the prompt. cache_read_input_tokens: whose KV was found; cache_creation_input_tokens: whose KV was
    computed, and is found by the next request; input_tokens: the others."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET  # of models that reason


class Message(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    weight_versions: WeightVersions = UNSET


class CountedTokens(Struct):
    input_tokens: int


# ---- events of a stream


class MessageStart(Struct, tag="message_start", tag_field="type"):
    message: Message


class Ping(Struct, tag="ping", tag_field="type"):
    pass


class BlockStart(Struct, tag="content_block_start", tag_field="type"):
    index: int
    content_block: AnswerBlock


class TextDelta(Struct, tag="text_delta", tag_field="type"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta", tag_field="type"):
    thinking: str


class InputDelta(Struct, tag="input_json_delta", tag_field="type"):
    partial_json: str


class BlockDelta(Struct, tag="content_block_delta", tag_field="type"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Struct, tag="content_block_stop", tag_field="type"):
    index: int


class Ending(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta", tag_field="type"):
    delta: Ending
    usage: MessagesUsage
    weight_versions: WeightVersions = UNSET


class MessageStop(Struct, tag="message_stop", tag_field="type"):
    pass
