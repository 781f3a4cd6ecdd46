"""The answer to a request for a response, as it comes: the response's items, and the events of a stream, in OpenAI's order."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from jaxserve.serving.dialects.responses_forms import (
    FunctionCallOutput,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    ItemStatus,
    Lifecycle,
    MessageOutput,
    OutputItem,
    OutputTextPart,
    OutputTokensDetails,
    PartEvent,
    RawMessage,
    ReasoningOutput,
    ReasoningPart,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
    TextEvent,
)
from jaxserve.serving.dialects.turn import Block, Change, Turn
from jaxserve.serving.errors import describe
from jaxserve.serving.responses import encode


class Answer:
    """Fills `response` with what a turn brings. Either `whole` or `events` is called, once; after `events`, `end`.

    items: of the conversation before the answer.
    """

    def __init__(self, response: ResponseObject, turn: Turn, items: list[Any]):
        self.response: ResponseObject = response
        self._turn, self._items = turn, items
        self._num_events = 0

    def all_items(self) -> list[Any]:
        """The conversation up to the answer's end."""
        return [item.model_dump(exclude_none=True) for item in self._items] + msgspec.to_builtins(self.response.output)

    async def whole(self) -> None:
        """Waits for the end of the answer. Raises RequestError if it fails."""
        async with self._turn.stream:
            async for change in self._turn.changes():
                for _ in self._take(change):
                    pass
        self._complete()

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a stream up to the last one, which is `end`'s: server-sent events, whole. An error is not raised, since the
        status has been sent by then: the response has failed."""
        async with self._turn.stream:
            yield self._lifecycle("created")
            waits = self.response.status == "queued"
            yield self._lifecycle("queued" if waits else "in_progress")
            try:
                async for change in self._turn.changes():
                    made = self._take(change)
                    if waits:
                        self.response.status, waits = "in_progress", False
                        yield self._lifecycle("in_progress")
                    for one in made:
                        yield self._event(one)
                self._complete()
            except Exception as error:
                self.fail(error)

    def end(self) -> bytes:
        """The last event of a stream. The response is as it will be kept."""
        return self._lifecycle(self.response.status)

    def fail(self, error: Exception) -> None:
        """The response has failed, by the request's own mistake or by the server's fault."""
        status, said, _ = describe(error)
        code = "invalid_prompt" if status == 400 else "server_error"
        self.response.status, self.response.error = "failed", ResponseFault(code, said.error.message)
        self._account()

    def cancel(self) -> None:
        """The response is wanted no more."""
        self._turn.stream.close()
        self.response.status = "cancelled"
        self._account()

    def _complete(self) -> None:
        response = self.response
        response.status, response.completed_at = "completed", int(time.time())
        if self._turn.finish_reason == "length":
            response.status, response.completed_at = "incomplete", None
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        elif self._turn.finish_reason == "abort":  # the engine was paused
            response.status, response.completed_at = "cancelled", None
        self._account()
        if isinstance(response.output_messages, list):
            response.output_messages = [RawMessage(self._turn.text, self._turn.token_ids)]

    def _account(self) -> None:
        """Writes what the response has used, and which weights sampled it."""
        used = self._turn.record.usage()
        self.response.weight_versions = self._turn.weight_versions
        self.response.usage = ResponseUsage(
            used.prompt_tokens,
            InputTokensDetails(self._turn.record.num_cached_tokens, self._turn.record.num_written_tokens),
            used.completion_tokens,
            OutputTokensDetails(self._turn.record.reasoning_tokens or 0),
            used.total_tokens,
        )

    def _lifecycle(self, what: str) -> bytes:
        return self._event(Lifecycle(type=f"response.{what}", sequence_number=0, response=self.response))

    def _event(self, made: Lifecycle | ItemEvent | PartEvent | TextEvent) -> bytes:
        made.sequence_number, self._num_events = self._num_events, self._num_events + 1
        return b"event: %s\ndata: %s\n\n" % (made.type.encode(), encode(made))

    def _take(self, change: Change) -> Iterator[ItemEvent | PartEvent | TextEvent]:
        """The events of a change, which is written into the response as they are taken."""
        if self.response.status == "queued":
            self.response.status = "in_progress"
        if change.what == "begin":
            yield from self._begin(change.block)
        elif change.what == "more":
            yield self._more(change)
        else:
            yield from self._end(change.block)

    def _begin(self, block: Block) -> Iterator[ItemEvent | PartEvent]:
        item = _item(block)
        self.response.output.append(item)
        yield ItemEvent(type="response.output_item.added", sequence_number=0, output_index=block.index, item=item)
        if not isinstance(item, FunctionCallOutput):
            part = OutputTextPart("") if isinstance(item, MessageOutput) else ReasoningPart("")
            item.content.append(part)  # pyright: ignore[reportArgumentType]
            yield self._part("added", block, item, part)

    def _part(self, what: str, block: Block, item: OutputItem, part: OutputTextPart | ReasoningPart) -> PartEvent:
        kind = f"response.content_part.{what}"
        return PartEvent(type=kind, sequence_number=0, item_id=item.id, output_index=block.index, part=part)

    def _more(self, change: Change) -> TextEvent:
        item = self.response.output[change.block.index]
        made = _text_event(item, "delta", change.block.index)
        made.delta = change.text
        if isinstance(item, FunctionCallOutput):
            item.arguments += change.text
        else:
            item.content[0].text += change.text
            if isinstance(item, MessageOutput):
                made.logprobs = change.logprobs
                item.content[0].logprobs.extend(change.logprobs)
        return made

    def _end(self, block: Block) -> Iterator[ItemEvent | PartEvent | TextEvent]:
        item = self.response.output[block.index]
        cut = self._turn.finish_reason in ("length", "abort") or (block.kind == "call" and not block.closed)
        item.status = "incomplete" if cut else "completed"
        made = _text_event(item, "done", block.index)
        if isinstance(item, FunctionCallOutput):
            item.arguments = made.arguments = block.text
            made.name = item.name
            yield made
        else:
            (part,) = item.content
            made.text = part.text
            if isinstance(part, OutputTextPart):
                made.logprobs = part.logprobs
            yield made
            yield self._part("done", block, item, part)
        yield ItemEvent(type="response.output_item.done", sequence_number=0, output_index=block.index, item=item)


def _item(block: Block) -> OutputItem:
    status: ItemStatus = "in_progress"
    name = uuid.uuid4().hex
    if block.kind == "call":
        return FunctionCallOutput(id=f"fc_{name}", call_id=f"call_{name[:24]}", name=block.name, arguments="", status=status)
    if block.kind == "reasoning":
        return ReasoningOutput(id=f"rs_{name}", status=status, content=[])
    return MessageOutput(id=f"msg_{name}", status=status, content=[])


def _text_event(item: OutputItem, what: str, output_index: int) -> TextEvent:
    if isinstance(item, FunctionCallOutput):
        kind = f"response.function_call_arguments.{what}"
        return TextEvent(type=kind, sequence_number=0, item_id=item.id, output_index=output_index)
    kind = f"response.{'output_text' if isinstance(item, MessageOutput) else 'reasoning_text'}.{what}"
    return TextEvent(type=kind, sequence_number=0, item_id=item.id, output_index=output_index, content_index=0)
