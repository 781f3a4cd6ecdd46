"""Answers to a client that may disconnect: server-sent events, and whole answers. Both end when the client is gone.

Owns the race between writing an answer and the client's disconnecting. Knows nothing of what is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class ClientGoneError(Exception):
    """The client disconnected before its answer was ready."""


async def gone(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone[T](request: Request, answer: Awaitable[T]) -> T:
    """Waits for `answer` and returns its result. If the client disconnects first, cancels it and raises ClientGoneError."""
    task, watcher = asyncio.ensure_future(answer), asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients pass over


class EventStream(Response):
    """Server-sent events, sent as `events` yields them (bytes, whole events). keep_alive: seconds without one after which a comment
    is sent, for proxies that close what is silent; 0: none.

    When the client disconnects, or reads nothing for `patience` seconds, `events` and the connection are closed. `on_end` is called
    at the end in any case.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None], patience: float, keep_alive: float = 0):
        self._events, self._on_end, self._patience, self._keep_alive = events, on_end, patience, keep_alive
        self._num_sent, self._sending = 0, False
        self.status_code: int = 200
        self.background: None = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        watcher = asyncio.create_task(gone(receive))
        try:
            done: set[asyncio.Task] = set()
            while not done:
                num_sent = self._num_sent
                done, _ = await asyncio.wait((writer, watcher), timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
                if self._sending and self._num_sent == num_sent:
                    break
        finally:
            writer.cancel()
            watcher.cancel()
            await asyncio.gather(writer, watcher, return_exceptions=True)
            self._on_end()
            await self._events.aclose()
        if not writer.cancelled() and (error := writer.exception()) and not isinstance(error, OSError):
            raise error

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._with_comments() if self._keep_alive else self._events) as bodies:
            async for body in bodies:
                self._sending = True
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._sending = False
                self._num_sent += 1
        await send({"type": "http.response.body", "body": b""})

    async def _with_comments(self) -> AsyncGenerator[bytes]:
        while True:
            coming = asyncio.ensure_future(anext(self._events, b""))
            try:
                while not (await asyncio.wait((coming,), timeout=self._keep_alive))[0]:
                    yield KEEP_ALIVE
            finally:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            if not (body := coming.result()):
                return
            yield body
