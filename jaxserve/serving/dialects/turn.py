"""A chat with one answer, as the dialects read it: blocks of reasoning, text and tool calls, and how the answer ended.

Owns the translation of a dialect's fields to a ChatRequest, and the cutting of an answer into blocks. Knows no dialect.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import UNSET
from pydantic import ValidationError
from starlette.requests import Request

from jaxserve.serving.bodies import LONG
from jaxserve.serving.chat import ChatAnswer, open_chat
from jaxserve.serving.chat_protocol import ChatRequest
from jaxserve.serving.errors import RefusedError
from jaxserve.serving.generation import CallRecord, Served
from jaxserve.serving.messages import FailedError
from jaxserve.serving.parsers import CallPart, Piece, Reasoning
from jaxserve.serving.responses import TokenLogprob, WeightVersions
from jaxserve.serving.streams import AnswerStream


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """The chat that a dialect's request asks for; fields that are None are left out. RefusedError where they make no chat."""
    try:
        return ChatRequest(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise RefusedError(f"{place}: {message}" if place else message, param=str(first["loc"][0]) if place else None) from error


async def beside[T](served: Served, request: Request, work: Callable[[], T]) -> T:
    """What `work` makes of a request's body; a thread runs it where the body is long."""
    return work() if len(await request.body()) <= LONG else await served.engine.read_body(work)


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """A refusal names the dialect's field. names: a chat's field -> the dialect's."""
    try:
        yield
    except RefusedError as error:
        given, message = error.param, str(error)
        if given not in names or given is None:
            raise
        name = names[given]
        if message.startswith(given):
            message = name + message.removeprefix(given)
        raise RefusedError(message, status=error.status, param=name, code=error.code) from error


@dataclass
class Block:
    """A run of an answer that is of one kind. text: what has come of it; of a call, its arguments. name: a call's function."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    name: str = ""
    text: str = ""
    closed: bool = False  # a call's arguments are a whole JSON object

    def arguments(self) -> dict[str, Any]:
        """Those of a call that is closed. Half a surrogate pair, which no answer can hold, is a question mark."""
        written = json.dumps(json.loads(self.text), ensure_ascii=False)
        return json.loads(written.encode(errors="replace"))


@dataclass
class Change:
    """What happens to a block: it begins, gets more text, or ends. logprobs: those of the tokens of more text that is no call's
    and no reasoning, if the chat asks for any."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Turn:
    """The answer to a chat as it comes. finish_reason, stop_reason and weight_versions are known when `changes` has ended.

    text, token_ids: what has come, before it was cut into blocks.
    """

    def __init__(self, answer: ChatAnswer):
        self._answer = answer
        self.stream: AnswerStream = answer.stream
        self.record: CallRecord = answer.record
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.weight_versions: WeightVersions = UNSET
        self.text: str = ""
        self.token_ids: list[int] = []

    @classmethod
    async def open(cls, served: Served, body: ChatRequest, request: Request) -> Turn:
        """Queues the chat. Raises what refuses it."""
        return cls(await open_chat(served, body, request))

    async def changes(self) -> AsyncGenerator[Change]:
        """The answer's blocks, one after another. Raises FailedError for an answer that ends with an error."""
        block: Block | None = None
        num_blocks = 0
        logprobs: list[TokenLogprob] = []  # of tokens whose text has not come yet
        async for pieces, delta in self._answer.parts():
            self.text += delta.text
            self.token_ids += delta.token_ids
            if (found := self._answer.logprobs(delta)) is not None:
                logprobs += found.content
            for piece in pieces:
                kind, name, text = _described(piece)
                if block is None or kind != block.kind or name is not None:
                    if block is not None:
                        yield _end(block)
                    block = Block(num_blocks, kind, name or "")
                    num_blocks += 1
                    yield Change("begin", block)
                if text:
                    block.text += text
                    yield Change("more", block, text, logprobs if kind == "text" else [])
                logprobs = []
            if delta.finish_reason:
                self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
                self.weight_versions = self.record.weight_versions(delta)
        if block is not None:
            yield _end(block)
        if self.finish_reason == "error":
            raise FailedError(str(self.stop_reason))

    async def blocks(self) -> list[Block]:
        """All blocks of the whole answer."""
        async with self.stream:
            return [change.block async for change in self.changes() if change.what == "end"]


def _described(piece: Piece) -> tuple[Literal["reasoning", "text", "call"], str | None, str]:
    """(kind, the function where a call begins, new text) of a piece."""
    if isinstance(piece, CallPart):
        return "call", piece.name, piece.arguments
    return ("reasoning" if isinstance(piece, Reasoning) else "text"), None, piece.text


def _end(block: Block) -> Change:
    if block.kind == "call":
        block.text = block.text or "{}"
        block.closed = _is_object(block.text)
    return Change("end", block)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
