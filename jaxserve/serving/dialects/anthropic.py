"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

Owns what a message's request means as a chat, and how the chat's answer is written as a message, whole or as events.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from msgspec import Struct
from starlette.responses import Response

from jaxserve.serving.chat import render
from jaxserve.serving.chat_protocol import ChatRequest
from jaxserve.serving.dialects.anthropic_forms import (
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    CountedTokens,
    Ending,
    InputDelta,
    Message,
    MessageDelta,
    MessagesError,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputTokensDetails,
    Ping,
    StopReason,
    TextAnswer,
    TextDelta,
    ThinkingAnswer,
    ThinkingDelta,
    ToolUseAnswer,
)
from jaxserve.serving.dialects.anthropic_protocol import (
    AutoChoice,
    MessagesPrompt,
    MessagesRequest,
    NoChoice,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolUseBlock,
)
from jaxserve.serving.dialects.turn import Block, Turn, beside, chat_request, renaming
from jaxserve.serving.errors import RefusedError, as_messages_error, checking, describe
from jaxserve.serving.generation import Served
from jaxserve.serving.openapi import answers
from jaxserve.serving.protocol import check_model
from jaxserve.serving.responses import encode
from jaxserve.serving.streaming import unless_gone

ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)
RENAMED = {
    "response_format": "output_config",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking",
    "reasoning_effort": "output_config",
    "continue_final_message": "messages",
}


def messages_routes(app: FastAPI, served: Served) -> None:
    """Adds the routes."""
    streamed = "text/event-stream"

    @app.post("/v1/messages", response_model=None, **answers(Message, *ERRORS, also=streamed, error=MessagesError))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        request.state.user = body.metadata.user_id if body.metadata else None
        return await create_message(served, body, request)

    @app.post(
        "/v1/messages/count_tokens",
        response_model=None,
        **answers(CountedTokens, 400, 401, 404, 408, 413, 500, error=MessagesError),
    )
    async def count_tokens(body: MessagesPrompt, request: Request) -> Response:
        size = len(await request.body())
        counted = await unless_gone(request, served.engine.aside(size, lambda: num_tokens(served, body)))
        return Response(encode(CountedTokens(counted)), media_type="application/json")


async def create_message(served: Served, body: MessagesRequest, request: Request) -> Response:
    """The message that answers a request, once it is complete, or a stream of its events."""
    check_model(body.model, served.names)
    with renaming(RENAMED):
        chat = await beside(served, request, lambda: to_chat(served, body))
        turn = await unless_gone(request, Turn.open(served, chat, request))
    if body.stream:
        return served.stream(_events(turn), turn.stream.close)
    return Response(encode(await unless_gone(request, _whole(turn))), media_type="application/json")


def num_tokens(served: Served, body: MessagesPrompt) -> int:
    """Tokens of the prompt that a request makes."""
    check_model(body.model, served.names)
    with renaming(RENAMED), checking():
        chat = to_chat(served, body)
        text = render(served, chat, with_tools=bool(chat.shown_tools))
        return len(served.engine.get_tokenizer().encode(text, add_special_tokens=False))


def to_chat(served: Served, body: MessagesPrompt) -> ChatRequest:
    """The chat that a request asks for. Raises RefusedError."""
    last = body.messages[-1]
    continued = last.role == "assistant"
    if continued and not isinstance(last.content, str) and any(isinstance(block, ToolUseBlock) for block in last.content):
        raise RefusedError("messages: a turn that calls tools must be followed by their results", param="messages")
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": body.chat_messages(),
        "continue_final_message": True if continued else None,
        "chat_template_kwargs": _template_variables(served, body),
        **_tools(body),
    }
    if body.output_config and body.output_config.format:
        named = {"name": "output", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    if body.output_config:
        fields["reasoning_effort"] = body.output_config.effort
    if isinstance(body.thinking, ThinkingEnabled):
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if isinstance(body.thinking, ThinkingEnabled | ThinkingAdaptive) and body.thinking.display == "omitted":
        fields["include_reasoning"] = False
    if isinstance(body, MessagesRequest):
        fields["stop"] = body.stop_sequences
        for name in ("max_tokens", "temperature", "top_p", "top_k", "cache_salt", "priority", "timeout"):
            fields[name] = getattr(body, name)
    return chat_request(fields)


def _template_variables(served: Served, body: MessagesPrompt) -> dict[str, Any] | None:
    """The variables of the chat template that a request sets, that of `thinking` among them."""
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body.thinking, ThinkingDisabled) and served.notation.reasoning:
        with checking():
            has_switch = "enable_thinking" in served.engine.get_tokenizer().template_variables()
        if not has_switch:
            raise RefusedError("thinking: this model's chat template has no switch that turns it off", param="thinking")
        variables["enable_thinking"] = False
    return variables or None


def _tools(body: MessagesPrompt) -> dict[str, Any]:
    """The chat's fields of tools."""
    fields: dict[str, Any] = {}
    if body.tools is not None:
        fields["tools"] = [{"type": "function", "function": tool.function()} for tool in body.tools]
    choice = body.tool_choice
    if isinstance(choice, AutoChoice):
        fields["tool_choice"] = "auto" if choice.type == "auto" else "required"
    elif choice is not None:
        fields["tool_choice"] = "none" if isinstance(choice, NoChoice) else {"type": "function", "function": {"name": choice.name}}
    if choice is not None and not isinstance(choice, NoChoice) and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


# ---- answers


def _usage(turn: Turn) -> MessagesUsage:
    used, cached, written = turn.record.usage(), turn.record.num_cached_tokens, turn.record.num_written_tokens
    usage = MessagesUsage(used.prompt_tokens - cached - written, used.completion_tokens, written, cached)
    if turn.record.reasoning_tokens is not None:
        usage.output_tokens_details = OutputTokensDetails(turn.record.reasoning_tokens)
    return usage


def _ending(turn: Turn) -> Ending:
    others: dict[str | None, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}
    if turn.finish_reason == "repetition":
        return Ending("end_turn", None)  # there is no word for it
    if turn.finish_reason in others:
        return Ending(others[turn.finish_reason], None)
    found = isinstance(turn.stop_reason, str)
    reason: StopReason = "stop_sequence" if found else "end_turn"
    return Ending(reason, turn.stop_reason if isinstance(turn.stop_reason, str) else None)


def _answer_block(block: Block) -> AnswerBlock | None:
    """A block of the whole answer. None for a call that was cut short: nobody should run it."""
    if block.kind == "text":
        return TextAnswer(block.text)
    if block.kind == "reasoning":
        return ThinkingAnswer(block.text)
    return ToolUseAnswer(_tool_use_id(), block.name, block.arguments()) if block.closed else None


def _tool_use_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"


async def _whole(turn: Turn) -> Message:
    content = [made for block in await turn.blocks() if (made := _answer_block(block)) is not None]
    ending, record = _ending(turn), turn.record
    return Message(
        id=f"msg_{record.id.removeprefix('chatcmpl-')}",
        model=record.model,
        content=content,
        stop_reason=ending.stop_reason,
        stop_sequence=ending.stop_sequence,
        usage=_usage(turn),
        weight_versions=turn.weight_versions,
    )


def _event(made: Struct) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (str(made.__struct_config__.tag).encode(), encode(made))


async def _events(turn: Turn) -> AsyncGenerator[bytes]:
    """The events of a message, in Anthropic's order. An error is one too, since the status has been sent by then."""
    record = turn.record
    begun = Message(
        id=f"msg_{record.id.removeprefix('chatcmpl-')}",
        model=record.model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=_usage(turn),
    )
    async with turn.stream:
        yield _event(MessageStart(begun))
        yield _event(Ping())
        try:
            async for change in turn.changes():
                yield _event(_block_event(change.what, change.block, change.text))
            yield _event(MessageDelta(_ending(turn), _usage(turn), turn.weight_versions))
            yield _event(MessageStop())
        except Exception as error:
            yield _event(as_messages_error(*describe(error)[:2]))


def _block_event(what: str, block: Block, text: str) -> Struct:
    if what == "begin":
        kinds = {
            "text": lambda: TextAnswer(""),
            "reasoning": lambda: ThinkingAnswer(""),
            "call": lambda: ToolUseAnswer(_tool_use_id(), block.name, {}),
        }
        return BlockStart(block.index, kinds[block.kind]())
    if what == "end":
        return BlockStop(block.index)
    delta = {"text": TextDelta, "reasoning": ThinkingDelta, "call": InputDelta}[block.kind](text)
    return BlockDelta(block.index, delta)
