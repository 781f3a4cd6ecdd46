"""Middleware of every HTTP request: its id, the access log, the API key and its limits, the limits of its body.

It is plain ASGI, which costs a wrapper for each request and nothing for each chunk. Prompts and answers are never logged.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.serving.errors import error_response, response_to
from jaxserve.serving.keys import KeyLimitError, KeyRing, KeyUse, ShownKey
from jaxserve.serving.options import HTTPOptions
from jaxserve.serving.responses import encode

access_log: logging.Logger = logging.getLogger("jaxserve.access")
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
            client, user, use = scope.get("client"), state.get("user"), state.get("key_use")
            access_log.info(
                "%s %s %s %d %.3fs %s%s%s",
                client[0] if client else "-",
                scope["method"],
                path,
                status,
                time.monotonic() - started,
                request_id,
                f" key={use.key.name}" if use is not None and use.key.name else "",
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


class KeyCheck:
    """Answers 401 unless the request has one of the keys, as a bearer token or as Anthropic's X-Api-Key, 403 for a control route
    that the key does not open, and 429 where one of its limits is reached. Without keys, every request passes.

    The request's `state.key_use` is then what its key has used.

    open_paths: need no key. control_paths: need one that may control.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str], control_paths: Collection[str] = ()):
        self.app = app
        self._keys, self._open, self._control = keys, frozenset(open_paths), frozenset(control_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._keys.is_open or scope["path"] in self._open:
            await self.app(scope, receive, send)
            return
        use = self._keys.find(_tokens(scope))
        if use is None:
            headers = {"WWW-Authenticate": "Bearer"}
            message = "no valid API key was given; send it as 'Authorization: Bearer KEY'"
            await error_response(scope, 401, message, code="invalid_api_key", headers=headers)(scope, receive, send)
            return
        scope.setdefault("state", {})["key_use"] = use
        shown: ShownKey | None = scope["state"].get("shown_key")  # of the connection, where this server holds it
        is_brief = _is_brief(scope)
        try:
            if shown is not None:
                shown.show(use)
            if scope["path"] in self._control and not use.key.may_control:
                message = f"key {use.key.name!r} does not open {scope['path']}: that takes one with may_control"
                await error_response(scope, 403, message)(scope, receive, send)
                return
            use.begin(is_brief=is_brief)
        except KeyLimitError as error:
            headers = {"Retry-After": str(error.retry_after)}
            if error.limit == "max_connections":
                headers["Connection"] = "close"
            response = error_response(scope, 429, str(error), code="rate_limit_exceeded", headers=headers)
            await response(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            if not is_brief:
                use.end()


def _is_brief(scope: Scope) -> bool:
    """Whether a request makes no answer of its own: it reads, forgets or cancels what others made."""
    return scope["method"] != "POST" or scope["path"].endswith("/cancel")


def _tokens(scope: Scope) -> list[bytes]:
    """What a request has shown as a key: nothing is no key."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return [text.encode() for text in (token if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")) if text]


def key_use(request: Request) -> KeyUse | None:
    """What the request's key has used; None where no key is asked for."""
    return getattr(request.state, "key_use", None)


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
    """Answers 413 for a body of more than max_bytes, 408 for one that takes longer than max_seconds to arrive, and 429 where the
    bodies of all requests under way would have more than max_held_bytes together."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float, max_held_bytes: int):
        self.app = app
        self._max_bytes, self._max_seconds, self._max_held = max_bytes, max_seconds, max_held_bytes
        self.num_held_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        said = Headers(scope=scope).get("content-length", "0")
        announced = int(said) if said.isdecimal() else 0
        if (refusal := self._refusal(announced, announced)) is not None:
            headers = dict(refusal.headers or {}) | {"Connection": "close"}  # nothing of it has been read
            await error_response(scope, refusal.status_code, refusal.detail, headers=headers)(scope, receive, send)
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
            num_new = len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if (refusal := self._refusal(num_bytes + num_new, num_new)) is not None:
                raise refusal
            num_bytes += num_new
            self.num_held_bytes += num_new
            return message

        try:
            await self.app(scope, receive_some, send)
        finally:
            self.num_held_bytes -= num_bytes

    def _refusal(self, size: int, num_new: int) -> HTTPException | None:
        """The answer to a body of this size, whose last part is of num_new bytes, if it is not to be taken."""
        if size > self._max_bytes:
            return HTTPException(413, f"the body is larger than {self._max_bytes} bytes")
        if num_new and self.num_held_bytes + num_new > self._max_held:
            held = f"{self.num_held_bytes} bytes, of at most {self._max_held}"
            message = f"requests under way have bodies of {held}; try again in 1 s"
            return HTTPException(429, message, {"Retry-After": "1"})
        return None


def body_limit(options: HTTPOptions) -> Middleware:
    """A BodyLimit as the options have it."""
    return Middleware(
        BodyLimit,
        max_bytes=options.max_body_bytes,
        max_seconds=options.body_seconds,
        max_held_bytes=options.max_held_bytes,
    )
