"""A connection of the HTTP server: uvicorn's, with a bound on everything that a client can make it hold.

Owns the bounds of what is not a request yet, or not any more: bytes and time of a request line and headers, requests sent ahead,
answers that nobody reads, and how many connections there are. Bodies are middleware.BodyLimit's. A connection tells its requests
which key it has shown before, by `state.shown_key`.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxserve.serving.keys import ShownKey
from jaxserve.serving.options import HTTPOptions

MAX_AHEAD = 16  # requests that a client may send before the first of them is answered
_PER_HEADER = 4  # bytes of a header's line beside its name and value


def bounded(options: HTTPOptions) -> type[HttpToolsProtocol]:
    """The protocol of a server with these options, for uvicorn's `http`."""

    class Connection(BoundedConnection):
        limits = options

    return Connection


class BoundedConnection(HttpToolsProtocol):
    """One connection.

    Two timers watch it. `_arriving` runs while something must come from the client: the first request of the connection, the rest
    of a request line and headers, or of a body whose request is answered already. `_unread` runs while an answer lies in the
    transport's buffer, and is satisfied by any progress.
    """

    limits: ClassVar[HTTPOptions] = HTTPOptions()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._refused = False
        self._running: RequestResponseCycle | None = None  # the request that is answered, or was last; `cycle` is the last one read
        self._reads: Literal["nothing", "head", "body"] = "nothing"  # the part of a request that has begun
        self._num_header_bytes = 0  # of the request that is read: its line, headers and trailers
        self._num_unparsed = 0  # bytes since the parser last found something in them
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._num_unread = 0
        self._shown_key = ShownKey()

    # -- the transport's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if len(self.connections) >= self.limits.max_connections:
            self.transport: Any = transport
            self._refused = True
            self._answer(b"503 Service Unavailable", f"{self.limits.max_connections} connections are open; try again in 10 s", 10)
            return
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        self._was_read()
        self._hang_up()
        self._shown_key.close()
        if not self._refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._num_unparsed += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_unparsed + self._num_header_bytes > self.limits.max_header_bytes:
            self._refuse(*self._too_large())
        elif self._arriving is None and not (self._is_answering() and self._reads != "head"):
            self._expect()  # the next request, if the last one has come: uvicorn's keep-alive timer has been cancelled

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_read()

    # -- the parser's side

    def on_message_begin(self) -> None:
        self._reads, self._num_header_bytes, self._num_unparsed = "head", 0, 0
        super().on_message_begin()
        self.scope.setdefault("state", {})["shown_key"] = self._shown_key

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _PER_HEADER)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._came()
        super().on_headers_complete()
        self._reads, self._num_unparsed = "body", 0
        if len(self.pipeline) > MAX_AHEAD:
            raise ValueError("too many requests before the first is answered")

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reads, self._num_header_bytes, self._num_unparsed = "nothing", 0, 0
        self._came()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._is_unread()
        if self._reads == "body" and self._arriving is None and not self._is_answering():
            self._expect()

    def send_400_response(self, msg: str) -> None:
        """What can't be parsed is answered, unless another answer is under way."""
        is_large = self._num_header_bytes > self.limits.max_header_bytes
        self._refuse(*(self._too_large() if is_large else (b"400 Bad Request", msg)))

    def _unsupported_upgrade_warning(self) -> None:
        """A request for another protocol is answered as any other is, without a word in the log."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # -- bounds

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        self._num_unparsed = 0
        if self._num_header_bytes > self.limits.max_header_bytes:
            raise ValueError("headers too large")  # ends the parsing, so that `send_400_response` is called

    def _too_large(self) -> tuple[bytes, str]:
        said = f"the request line and headers are larger than {self.limits.max_header_bytes} bytes"
        return b"431 Request Header Fields Too Large", said

    def _expect(self) -> None:
        """Something must come within header_seconds."""
        self._arriving = self.loop.call_later(self.limits.header_seconds, self._came_too_late)

    def _came(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _came_too_late(self) -> None:
        self._arriving = None
        if self._is_answering():  # meanwhile no more is read
            self._expect()
            return
        self._refuse(b"408 Request Timeout", f"the request did not come within {self.limits.header_seconds:g} s")

    def _is_unread(self) -> None:
        """Something may lie in the buffer: it must become less within `patience`."""
        if self._unread is None and (size := self.transport.get_write_buffer_size()):
            self._num_unread = size
            self._unread = self.loop.call_later(self.limits.patience, self._still_unread)

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _still_unread(self) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() >= self._num_unread:
            self._cut()
        else:
            self._is_unread()

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _hang_up(self) -> None:
        """Tells the request under way that its client has gone, also where others have come behind it, and uvicorn would not."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _cut(self) -> None:
        """Ends the connection at once. Nothing is written to it any more."""
        self._hang_up()
        self.transport.abort()

    def _refuse(self, status: bytes, said: str) -> None:
        """Closes the connection; with an answer, if something was asked that has none yet, and no other answer is under way."""
        if self.transport.is_closing():
            return
        if self._is_answering():
            self._cut()
        elif self._reads == "body" or (self._reads == "nothing" and not self._num_unparsed):
            self.transport.close()
        else:
            self._answer(status, said)

    def _answer(self, status: bytes, said: str, retry_after: int | None = None) -> None:
        body = said.encode()
        head = [b"HTTP/1.1 " + status, b"content-type: text/plain; charset=utf-8", b"content-length: %d" % len(body)]
        head += [b"connection: close", *([b"retry-after: %d" % retry_after] if retry_after else [])]
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        self.transport.close()
