"""OpenAI's Responses API: `/v1/responses`, and the routes of a response that is kept.

Owns what a request means as a chat, the responses that run in the background, and how an answer is written as a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from jaxserve.serving.chat_protocol import ChatRequest
from jaxserve.serving.dialects.event_log import EndedLogs, EventLog, EventsGoneError
from jaxserve.serving.dialects.response_events import Answer
from jaxserve.serving.dialects.response_store import MemoryStore, ResponseStore, StoreBeside, StoredResponse, StoreError
from jaxserve.serving.dialects.responses_forms import DeletedResponse, ErrorEvent, RawMessage, ResponseObject
from jaxserve.serving.dialects.responses_protocol import (
    LOGPROBS,
    PASSED_ON,
    InputItem,
    NamedFunction,
    ResponsesRequest,
    SchemaFormat,
    chat_messages,
)
from jaxserve.serving.dialects.turn import Turn, beside, chat_request, renaming
from jaxserve.serving.errors import RefusedError
from jaxserve.serving.generation import Served
from jaxserve.serving.keys import KeyUse
from jaxserve.serving.messages import UnavailableError
from jaxserve.serving.middleware import key_use
from jaxserve.serving.openapi import answers
from jaxserve.serving.options import needs_one
from jaxserve.serving.protocol import check_model
from jaxserve.serving.responses import encode
from jaxserve.serving.streaming import unless_gone

logger: logging.Logger = logging.getLogger("jaxserve")
MAX_UNKEPT, MAX_UNKEPT_BYTES = 64, 16 << 20
MAX_STREAMED_BYTES = 1 << 20  # of a response that begins, which several events of a kept stream repeat
ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)
RENAMED = {"response_format": "text", "max_tokens": "max_output_tokens", "messages": "input", "reasoning_effort": "reasoning"}
_EventNumber = Annotated[int | None, Query(ge=0, description="With stream: the number of the last event that came.")]
_items: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])


def responses_routes(app: FastAPI, responses: Responses) -> None:
    """Adds the routes: that of what is kept only where something is."""
    streamed = "text/event-stream"

    @app.post("/v1/responses", response_model=None, **answers(ResponseObject, *ERRORS, also=streamed))
    async def create(body: ResponsesRequest, request: Request) -> Response:
        request.state.user = body.safety_identifier or body.user
        return await responses.create(body, request)

    if not responses.keeps:
        return

    @app.get("/v1/responses/{response_id}", response_model=None, **answers(ResponseObject, 400, 401, 404, 503, also=streamed))
    async def retrieve(response_id: str, stream: bool = False, starting_after: _EventNumber = None) -> Response:
        if stream:
            return await responses.follow(response_id, 0 if starting_after is None else starting_after + 1)
        if starting_after is not None:
            raise RefusedError("starting_after: only with stream=true", param="starting_after")
        return _json(await responses.get(response_id))

    @app.delete("/v1/responses/{response_id}", response_model=None, **answers(DeletedResponse, 401, 404, 503))
    async def delete(response_id: str) -> Response:
        await responses.delete(response_id)
        return _json(encode(DeletedResponse(response_id)))

    @app.post("/v1/responses/{response_id}/cancel", response_model=None, **answers(ResponseObject, 400, 401, 404, 503))
    async def cancel(response_id: str) -> Response:
        return _json(await responses.cancel(response_id))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


@dataclass(frozen=True)
class _Running:
    """A response that runs in the background. kept: ends when it has ended and is kept. log: its events, where they are wanted."""

    answer: Answer
    log: EventLog | None
    task: asyncio.Task[None]
    kept: asyncio.Task[None]


@contextlib.contextmanager
def _available() -> Iterator[None]:
    """Wraps what needs the store: a client may try again."""
    try:
        yield
    except StoreError as error:
        raise UnavailableError(f"the responses that are kept can't be read: {error}") from error


class Responses:
    """The responses of a server: it makes them, keeps them in a store, and runs some in the background.

    store: None: it is one of several servers, any of which may be asked next, and keeps nothing. one_of_several: then the option
    that says so, as make_app's.
    """

    def __init__(self, served: Served, store: ResponseStore | None, one_of_several: str | None = None):
        self._served = served
        self._one_of = one_of_several or "replicas"
        self.keeps: bool = store is not None
        self._store = StoreBeside(MemoryStore(0, 0) if store is None else store)
        self._unkept = MemoryStore(MAX_UNKEPT, MAX_UNKEPT_BYTES)  # background ones that the store could not take
        self._running: dict[str, _Running] = {}
        self._ended = EndedLogs()

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """The response to a request, once it is complete; a stream of its events; in the background, the response as it begins."""
        check_model(body.model, self._served.names)
        self._check_keeps_nothing(body)
        items = [*await self._items_before(body), *body.items]
        with renaming(RENAMED):
            chat = await beside(self._served, request, lambda: to_chat(body, items))
            turn = await unless_gone(request, Turn.open(self._served, chat, request))
        answer = Answer(self._begun(body, turn), turn, items)
        if body.enable_response_messages:
            await self._tell_prompt(answer, turn)
        if body.background:
            if body.stream:
                self._check_size(answer.response, turn)
            log = self._begin(answer, bool(body.stream), key_use(request))
            return _json(encode(answer.response)) if log is None else self._stream(log, 0)
        if body.stream:
            return self._served.stream(self._events(answer), turn.stream.close)
        await unless_gone(request, answer.whole())
        await self._keep(answer)
        return _json(encode(answer.response))

    def _check_size(self, response: ResponseObject, turn: Turn) -> None:
        """Raises RefusedError for a response that is too large to be repeated in a stream that is kept."""
        if (size := len(encode(response))) > MAX_STREAMED_BYTES:
            turn.stream.close()
            said = f"of at most {MAX_STREAMED_BYTES} in the background: shorten instructions, tools or whatever it repeats"
            raise RefusedError(f"stream: the response has {size} bytes before there is any output, {said}", param="stream")

    def _begin(self, answer: Answer, is_streamed: bool, use: KeyUse | None) -> EventLog | None:
        """Begins to answer in the background. Returns the log of events, if they are wanted."""
        log = EventLog() if is_streamed else None
        task = asyncio.create_task(_run(answer) if log is None else _record(answer, log))
        kept = asyncio.create_task(self._keep_at_end(answer, task, log))
        self._running[answer.response.id] = _Running(answer, log, task, kept)
        if use is not None:
            use.hold()
            task.add_done_callback(lambda _: use.end())
        return log

    async def follow(self, response_id: str, begin: int) -> Response:
        """The stream of a response that was asked for in the background and as a stream, from the event of this number on.

        Raises:
          RefusedError: as `get`; it was not asked for so, or these events are not kept any more.
        """
        running = self._running.get(response_id)
        if running is None:
            await self._stored(response_id)
        log = self._ended.get(response_id) if running is None else running.log
        if log is None:
            said = "only of a response made with background=true and stream=true, and not for ever; GET it without stream"
            raise RefusedError(f"stream: there are no events, {said}", param="stream")
        if begin < log.first:
            raise RefusedError(f"starting_after: the events before {log.first} are not kept any more", param="starting_after")
        if log.ended and begin > log.count:
            raise RefusedError(f"starting_after={begin - 1}: the last event is {log.count - 1}", param="starting_after")
        return self._stream(log, begin)

    def _stream(self, log: EventLog, begin: int) -> Response:
        async def events() -> AsyncGenerator[bytes]:
            try:
                async for event in log.follow(begin):
                    yield event
            except EventsGoneError as error:
                yield b"event: error\ndata: %s\n\n" % encode(ErrorEvent(code="events_gone", message=str(error)))

        return self._served.stream(events(), lambda: None)

    def _check_keeps_nothing(self, body: ResponsesRequest) -> None:
        """Raises RefusedError (501) for what needs a response that is kept, where none is."""
        needs = {"store": body.store, "background": body.background, "previous_response_id": body.previous_response_id}
        if not self.keeps and (asked := [name for name, value in needs.items() if value]):
            raise RefusedError(f"{asked[0]} {needs_one(self._one_of)}", status=501, param=asked[0])

    async def get(self, response_id: str) -> bytes:
        """A response as JSON. Raises RefusedError (404) if it is not kept, UnavailableError if the store can't be read."""
        if response_id in self._running:
            return encode(self._running[response_id].answer.response)
        return (await self._stored(response_id)).response

    async def delete(self, response_id: str) -> None:
        """Forgets a response; one that runs in the background is cancelled. Raises as `get`."""
        if response_id in self._running:
            await self.cancel(response_id)
        with _available():
            gone = self._unkept.delete(response_id) or await self._store.delete(response_id)
        self._ended.delete(response_id)
        if not gone:
            await self._stored(response_id)

    async def cancel(self, response_id: str) -> bytes:
        """Cancels a response that runs in the background, and returns it; one that has ended is returned as it is.

        Raises:
          RefusedError: as `get`, or the response does not run in the background.
        """
        if response_id in self._running:
            running = self._running[response_id]
            running.task.cancel()
            await asyncio.wait([running.kept])
            return encode(running.answer.response)
        stored = (await self._stored(response_id)).response
        if not msgspec.json.decode(stored)["background"]:
            raise RefusedError("Cannot cancel a synchronous response. Only one with background=true can be cancelled.")
        return stored

    async def close(self) -> None:
        """Ends the responses that run in the background, and closes the store."""
        running = list(self._running.values())
        for one in running:
            one.task.cancel()
        await asyncio.gather(*(one.kept for one in running), return_exceptions=True)
        await self._store.close()

    async def _stored(self, response_id: str, param: str | None = None) -> StoredResponse:
        with _available():
            found = self._unkept.get(response_id) or await self._store.get(response_id)
        if found is None:
            raise RefusedError(f"Response with id {response_id!r} not found: it is not kept.", status=404, param=param)
        return found

    async def _items_before(self, body: ResponsesRequest) -> list[Any]:
        """The items of the conversation that the request goes on with."""
        if body.previous_response_id is None:
            return []
        running = self._running.get(body.previous_response_id)
        if running is not None and running.task.done():
            await asyncio.wait([running.kept])
        elif running is not None:
            raise RefusedError("previous_response_id: this response is not complete yet", param="previous_response_id")
        stored = await self._stored(body.previous_response_id, "previous_response_id")
        return _items.validate_python(msgspec.json.decode(stored.items))

    async def _keep_at_end(self, answer: Answer, task: asyncio.Task[None], log: EventLog | None) -> None:
        """Keeps a response that runs in the background when it has ended or was cancelled, and then ends its events."""
        await asyncio.wait([task])
        if task.cancelled():
            answer.cancel()
        try:
            await self._keep(answer)
        finally:
            del self._running[answer.response.id]
            if log is not None:
                log.add(answer.end())
                log.end()
                self._ended.put(answer.response.id, log)

    async def _events(self, answer: Answer) -> AsyncGenerator[bytes]:
        async for event in answer.events():
            yield event
        await self._keep(answer)
        yield answer.end()

    async def _keep(self, answer: Answer) -> None:
        """Keeps a response that is to be kept. One that can't be is answered all the same."""
        if not answer.response.store:
            return
        try:
            await self._store.put(answer.response.id, StoredResponse(encode(answer.response), encode(answer.all_items())))
        except StoreError as error:
            logger.error("%s is not kept: %s", answer.response.id, error)
            if answer.response.background:  # nobody has it yet
                self._unkept.put(answer.response.id, StoredResponse(encode(answer.response), encode(answer.all_items())))

    def _begun(self, body: ResponsesRequest, turn: Turn) -> ResponseObject:
        """The response before there is any output."""
        (ask,) = turn.stream.asks.values()
        given = body.model_dump(
            mode="json", by_alias=True, exclude_none=True, include={"text", "tools", "tool_choice", "reasoning"}
        )
        return ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="queued" if body.background else "in_progress",
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=turn.record.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": None, "summary": None} | given.get("reasoning", {}),
            store=self.keeps and body.store is not False,
            temperature=ask.params.temperature,
            text={"format": {"type": "text"}} | given.get("text", {}),
            tool_choice=given.get("tool_choice", "auto"),
            tools=given.get("tools", []),
            top_logprobs=body.top_logprobs or 0,
            top_p=ask.params.top_p,
            user=body.user,
        )

    async def _tell_prompt(self, answer: Answer, turn: Turn) -> None:
        """Writes the prompt into the response, which will tell the whole answer too."""
        (ask,) = turn.stream.asks.values()
        ids, engine = ask.prompt_token_ids, self._served.engine
        try:
            text = await engine.aside(len(ids), lambda: engine.get_tokenizer().decode(ids, skip_special_tokens=False))
        except BaseException:
            turn.stream.close()
            raise
        answer.response.input_messages, answer.response.output_messages = [RawMessage(text, ids)], []


async def _run(answer: Answer) -> None:
    """Answers in the background. What goes wrong is written into the response."""
    try:
        await answer.whole()
    except Exception as error:
        answer.fail(error)


async def _record(answer: Answer, log: EventLog) -> None:
    """Answers in the background, event by event. What goes wrong is written into the response."""
    try:
        async for event in answer.events():
            log.add(event)
    except Exception as error:
        answer.fail(error)


def to_chat(body: ResponsesRequest, items: list[Any]) -> ChatRequest:
    """The chat that a request asks for. items: the conversation up to its end. Raises RefusedError."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in PASSED_ON}
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields["messages"] = system + chat_messages(items)
    fields["max_tokens"] = body.max_output_tokens
    fields["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        fields["logprobs"], fields["top_logprobs"] = True, body.top_logprobs or 0
    if body.text and body.text.format:
        made = body.text.format.model_dump(by_alias=True, exclude_none=True)
        if isinstance(body.text.format, SchemaFormat):
            del made["type"]
            made = {"type": "json_schema", "json_schema": made}
        fields["response_format"] = made
    if body.tools is not None:
        fields["tools"] = [{"type": "function", "function": tool.function()} for tool in body.tools]
    if isinstance(body.tool_choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    else:
        fields["tool_choice"] = body.tool_choice
    return chat_request(fields)
