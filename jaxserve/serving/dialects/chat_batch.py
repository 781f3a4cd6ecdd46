"""`/v1/chat/completions/batch`: several conversations in one request, as vLLM has it; the answer has a choice for each."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from jaxserve.serving.chat import complete_chat
from jaxserve.serving.chat_protocol import ChatMessage, ChatRequest, Tool
from jaxserve.serving.dialects.turn import beside
from jaxserve.serving.generation import Served
from jaxserve.serving.openapi import answers
from jaxserve.serving.protocol import check_model
from jaxserve.serving.responses import ChatCompletion, Usage, encode
from jaxserve.serving.streaming import unless_gone
from jaxserve.serving.strict_model import ITEMS, SOME_PARTS

ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)


class BatchChatRequest(ChatRequest):
    """`POST /v1/chat/completions/batch`: a chat's fields, for several conversations. No tools, no stream, one sample each."""

    messages: Annotated[list[Annotated[list[ChatMessage], ITEMS]], SOME_PARTS]  # pyright: ignore[reportIncompatibleVariableOverride]
    stream: Literal[False] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    stream_options: None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    n: Literal[1] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    tools: Annotated[list[Tool], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def chats(self) -> list[ChatRequest]:
        """A request for each conversation. What they share has been checked, and may not be what the client wrote any more."""
        names = self.model_fields_set
        shared = {name: getattr(self, name) for name in names}
        return [ChatRequest.model_construct(names, **shared | {"messages": messages}) for messages in self.messages]


def chat_batch_routes(app: FastAPI, served: Served) -> None:
    """Adds the route."""

    @app.post("/v1/chat/completions/batch", response_model=None, **answers(ChatCompletion, *ERRORS))
    async def chat_completions_batch(body: BatchChatRequest, request: Request) -> Response:
        request.state.user = body.user
        check_model(body.model, served.names)
        answer = await unless_gone(request, _all(served, body, request))
        return Response(encode(answer), media_type="application/json")


async def _all(served: Served, body: BatchChatRequest, request: Request) -> ChatCompletion:
    """The answers as one. The first refusal or error is everybody's, and ends the others."""
    chats = await beside(served, request, body.chats)
    tasks = [asyncio.ensure_future(complete_chat(served, chat, request)) for chat in chats]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    answer = found[0]
    answer.choices = [choice for one in found for choice in one.choices]
    for i, choice in enumerate(answer.choices):
        choice.index = i
    answer.usage = _sum([one.usage for one in found])
    return answer


def _sum(usages: list[Usage]) -> Usage:
    total = usages[0]
    for usage in usages[1:]:
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += usage.completion_tokens
        total.total_tokens += usage.total_tokens
        if total.prompt_tokens_details and usage.prompt_tokens_details:
            total.prompt_tokens_details.cached_tokens += usage.prompt_tokens_details.cached_tokens
            total.prompt_tokens_details.created_cache_tokens += usage.prompt_tokens_details.created_cache_tokens
        if total.completion_tokens_details and usage.completion_tokens_details:
            total.completion_tokens_details.reasoning_tokens += usage.completion_tokens_details.reasoning_tokens
    return total
