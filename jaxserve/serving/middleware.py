"""Middleware of every HTTP request: its id, the access log, the API key, the limits of its body.

It is plain ASGI, which costs a wrapper for each request and nothing for each chunk. Prompts and answers are never logged.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.serving.errors import error_response, response_to
from jaxserve.serving.responses import encode

access_log: logging.Logger = logging.getLogger("jaxserve.access")
OPEN_PATHS = ("/", "/health", "/ping", "/metrics", "/version")  # need no API key
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class RequestLog:
    """Gives each request an id, and logs a line. A client's own X-Request-Id is used if it has at most 128 letters, digits and
    signs of ".:_-".

    paths: returns the paths that exist; others are counted as "other".
    count: called with (path, status) at the end.
    answers_id: whether answers have the id as X-Request-Id.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Callable[[], frozenset[str]],
        count: Callable[[str, int], None],
        answers_id: bool = True,
    ):
        self.app = app
        self._paths, self._count, self._answers_id = paths, count, answers_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        named = _REQUEST_ID.fullmatch(given) is not None
        request_id = given if named else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"], state["named_by_client"] = request_id, named
        started, status = time.monotonic(), 499  # nginx's status for a client that disconnected before an answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._answers_id:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            status = 500 if status == 499 else status
            raise
        finally:
            path = _path_of(scope, self._paths())
            self._count(path, status)
            client, user = scope.get("client"), state.get("user")
            access_log.info(
                "%s %s %s %d %.3fs %s%s",
                client[0] if client else "-",
                scope["method"],
                path,
                status,
                time.monotonic() - started,
                request_id,
                f" user={user!r:.80}" if user else "",
            )


def _path_of(scope: Scope, paths: frozenset[str]) -> str:
    """The path of a request; of a route whose path has a name in it, the route's."""
    given = scope["path"] if scope["path"] in paths else getattr(scope.get("route"), "path", "")
    return given if given in paths else "other"


class RootPath:
    """Takes root_path, under which a proxy shows the server, from the paths of requests that have it."""

    def __init__(self, app: ASGIApp, root_path: str):
        self.app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            raw = scope.get("raw_path") or b""
            root = self._root.encode()
            scope = dict(scope) | {
                "path": scope["path"][len(self._root) :],
                "raw_path": raw[len(root) :] if raw.startswith(root) else raw,
            }
        await self.app(scope, receive, send)


class LoadReport:
    """Adds the engine's load to answers whose request asks for it, in Envoy's ORCA form, as vLLM does: the request's header
    endpoint-load-metrics-format is TEXT or JSON, and the answer's is endpoint-load-metrics. Any other format is passed over.

    load: returns the named metrics.
    """

    def __init__(self, app: ASGIApp, load: Callable[[], Mapping[str, float]]):
        self.app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = Headers(scope=scope).get("endpoint-load-metrics-format", "").upper() if scope["type"] == "http" else ""
        if form not in ("TEXT", "JSON"):
            await self.app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start":
                load = self._load()
                text = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
                said = text if form == "TEXT" else encode({"named_metrics": load}).decode()
                message["headers"] = [*message.get("headers", ()), (b"endpoint-load-metrics", f"{form} {said}".encode())]
            await send(message)

        await self.app(scope, receive, send_with_load)


class ApiKey:
    """Answers 401 unless the request has one of the keys, as a bearer token or as Anthropic's X-Api-Key. Without keys, every
    request passes."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS and not self._knows(scope):
            headers = {"WWW-Authenticate": "Bearer"}
            message = "no valid API key was given; send it as 'Authorization: Bearer KEY'"
            await error_response(scope, 401, message, code="invalid_api_key", headers=headers)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        tokens = [token if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        matches = [hmac.compare_digest(given.encode(), key) for given in tokens for key in self._keys]  # all: time tells nothing
        return any(matches)


class LastResort:
    """Answers 500 for an exception that no handler knows, and logs its traceback. The connection stays open."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_and_see(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_see)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await response_to(scope, error)(scope, receive, send)


class BodyLimit:
    """Answers 413 for a body of more than max_bytes, and 408 for one that takes longer than max_seconds to arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float):
        self.app = app
        self._max_bytes, self._max_seconds = max_bytes, max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        said = Headers(scope=scope).get("content-length", "0")
        if said.isdecimal() and int(said) > self._max_bytes:
            await error_response(scope, 413, self._too_large(), headers={"Connection": "close"})(scope, receive, send)
            return
        num_bytes, complete, deadline = 0, False, asyncio.get_running_loop().time() + self._max_seconds

        async def receive_some() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {self._max_seconds:g} s") from None
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._too_large())
            return message

        await self.app(scope, receive_some, send)

    def _too_large(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"
