"""A server behind a router: its checks, its load, and how requests are sent to it.

Owns the checks, the estimate of a server's load, and the connection to it. What follows from the checks is health.py's. Knows
nothing of which request goes to which server.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import re
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from jaxserve.routing.health import BackendHealth
from jaxserve.routing.policy import Load

logger: logging.Logger = logging.getLogger("jaxserve")


class _SaidHealth(msgspec.Struct):
    """What of a server's /health is read."""

    role: str = ""
    weight_version: str | None = None


UNANSWERED: tuple[type[Exception], ...] = (
    aiohttp.ClientError,
    OSError,
    TimeoutError,
)  # raised by a request to a server that can't be reached, or that breaks off
UNREACHED: tuple[type[Exception], ...] = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
)  # those of UNANSWERED after which the server cannot have seen the request
_LOADS = re.compile(r"^\w+:num_requests_(waiting|running)(?:\{.*\})? (\S+)$", re.MULTILINE)  # our servers', and vLLM's
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a lost machine is noticed within a minute


class Backend:
    """One server.

    Its load is what its /metrics said last (vLLM's names under any prefix), plus requests sent since, minus requests ended since.
    For a server without such metrics that is the number of requests in flight.

    Args:
      url: "http://host:port".
      session: the HTTP client.
      health: counts its checks.
      key: sent as bearer token in place of the client's. None: the client's is passed on.
      on_down: called when the server goes down.
    """

    def __init__(
        self, url: str, session: aiohttp.ClientSession, health: BackendHealth, key: str | None, on_down: Callable[[], None]
    ):
        self.url: str = url
        self.health: BackendHealth = health
        self._session, self._key, self._on_down = session, key, on_down
        self._waiting = self._running = self._since = 0
        self._asking: set[asyncio.Timeout] = set()  # each around one that waits for the first byte of an answer
        self.role: str = ""  # as it says: "prefill", "decode" or, of one that does both, nothing
        self.weight_version: str | None = None  # as it said last; None: its weights do not change
        self.num_expected: int = 0  # requests that will be sent to it, when their prompt is computed elsewhere
        self.num_in_flight: int = 0
        self.num_unanswered: int = 0
        self.num_refused: int = 0
        self.num_broken: int = 0

    @property
    def load(self) -> Load:
        return Load(self._waiting, max(0, self._running + self._since) + self.num_expected)

    async def watch(self, interval: float, timeout: float) -> None:
        """Checks the server every `interval` seconds until it is cancelled. timeout: seconds that a check may take."""
        while True:
            await asyncio.sleep(interval)
            try:
                await self.check(timeout)
            except Exception:  # no answer of a server may end the checks
                logger.exception("the check of %s failed", self.url)

    async def check(self, timeout: float) -> None:
        """Asks for the server's health and, if that is good, its load. timeout: seconds for each."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.get(f"{self.url}/health", headers=headers, timeout=limit) as answer:
                well = answer.status == 200
                said = await answer.read() if well else b""
            if well:
                health = _read_health(said)
                self.role, self.weight_version = health.role, health.weight_version
                async with self._session.get(f"{self.url}/metrics", headers=headers, timeout=limit) as answer:
                    self._take_load(await answer.text(errors="replace") if answer.status == 200 else "")
        except UNANSWERED as error:
            self._note(self.health.fail)
            # The server hangs, so requests that it has not begun to answer are ended. One that refuses connections may be
            # finishing its requests, so there they go on.
            if self.health.gone and isinstance(error, TimeoutError):
                while self._asking:
                    self._asking.pop().reschedule(0.0)  # raises TimeoutError there
        else:
            self._note(self.health.succeed if well else self.health.refuse)

    def _take_load(self, metrics: str) -> None:
        said = {"waiting": 0.0, "running": 0.0}
        found = _LOADS.findall(metrics)
        try:
            for name, value in found:
                said[name] += float(value)
        except ValueError:  # no number
            return
        if found and all(map(math.isfinite, said.values())):
            self._waiting, self._running, self._since = int(said["waiting"]), int(said["running"]), 0

    def _note(self, event: Callable[[], None]) -> None:
        """Records an event of its health, and logs it if the server goes down or comes up by it."""
        was_up = self.health.up
        event()
        if was_up and not self.health.up:
            logger.warning("%s is down", self.url)
            self._on_down()
        elif self.health.up and not was_up:
            logger.info("%s is up", self.url)

    async def ask(self, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Answer:
        """Sends a request, and returns its answer once the first bytes of the body have come.

        target: path and query, as the client sent them. headers: those to pass on.

        Raises:
          one of UNANSWERED: the server can't be reached, breaks off before the first byte of the body, or hangs by its checks.
        """
        given = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in headers]
        if self._key:
            given = [*((key, value) for key, value in given if key != "authorization"), ("authorization", f"Bearer {self._key}")]
        self.num_in_flight += 1
        self._since += 1
        response, asking = None, asyncio.timeout(None)
        self._asking.add(asking)
        try:
            content = io.BytesIO(body) if body or method not in ("GET", "HEAD", "OPTIONS", "DELETE") else None
            async with asking:
                response = await self._session.request(
                    method, URL(self.url + target, encoded=True), headers=given, data=content, allow_redirects=False
                )
                first = await response.content.readany()
        except BaseException as error:
            if response is not None:
                response.close()
            self.ended()
            if isinstance(error, UNANSWERED):
                self.num_unanswered += 1
                self._note(self.health.fail)
            raise
        finally:
            self._asking.discard(asking)
        self.health.answer()
        return Answer(self, response, first)

    def ended(self) -> None:
        self.num_in_flight -= 1
        self._since -= 1


class Answer:
    """What a server answered: the status, the headers, and the body as it comes. It must be closed."""

    def __init__(self, backend: Backend, response: aiohttp.ClientResponse, first: bytes):
        self.backend: Backend = backend
        self.status: int = response.status
        self.raw_headers: Sequence[tuple[bytes, bytes]] = response.raw_headers
        self._response, self._first, self._closed = response, first, False

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the body as it arrives. Raises ConnectionAbortedError if the server breaks off."""
        try:
            data = self._first
            while data:
                yield data
                data = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            self.backend.num_broken += 1
            logger.warning("%s broke off an answer: %s", self.backend.url, error)
            raise ConnectionAbortedError(f"{self.backend.url} broke off") from error

    def close(self) -> None:
        """Returns the connection to the pool if the answer is complete. Else closes it, so that the server stops."""
        if self._closed:
            return
        self._closed = True
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()
        self.backend.ended()


def _read_health(health: bytes) -> _SaidHealth:
    """The answer of a server's /health; nothing where it is no JSON: vLLM's is empty."""
    try:
        return msgspec.json.decode(health, type=_SaidHealth)
    except msgspec.DecodeError:
        return _SaidHealth()


def open_session(connect_seconds: float = 5.0) -> aiohttp.ClientSession:
    """An HTTP client that changes nothing: it adds no headers, decompresses nothing, and has no cookies, redirects or limits."""
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=3,  # less than the 5 s after which uvicorn closes an idle connection: none is closed under a request
        socket_factory=_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _socket(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection")
    + (b"te", b"trailer", b"transfer-encoding", b"upgrade")
)


def end_to_end(headers: Iterable[tuple[bytes, bytes]], *also: bytes) -> list[tuple[bytes, bytes]]:
    """The headers that a proxy passes on (RFC 9110, 7.6.1): all but those of one connection, those that the Connection header
    names, and `also`. Names are in lower case."""
    lower = [(key.lower(), value) for key, value in headers]
    named = {word.strip().lower() for key, value in lower if key == b"connection" for word in value.split(b",")}
    dropped = _HOP_BY_HOP | named | set(also)
    return [(key, value) for key, value in lower if key not in dropped]
