"""Reads the JSON of requests' bodies: short ones on the event loop, long ones on a thread, while the loop goes on.

json's scanner in C holds the interpreter's lock until it has read everything: 12 ms for a MiB of messages, 43 for a MiB of `{}`.
Above INTERRUPTIBLE json's scanner in Python reads instead, which hands the lock over between two values. It takes ten times as long
for each value, but strings are still read in C, so that a body of long texts costs the same.

Owns how a body becomes the object that its route takes. Knows no request.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine
from json.scanner import py_make_scanner  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

LONG: int = 64 * 2**10  # bytes of a body above which a thread reads it: up to here it takes 20 ms at most
INTERRUPTIBLE: int = 256 * 2**10  # and above which it lets others go on between two values
MAX_CONTAINERS: int = 2**18  # objects and lists of such a body
Beside = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a function on a thread


class _Decoder(json.JSONDecoder):
    """One whose scanner is Python. ValueError for a body of more than MAX_CONTAINERS objects and lists: whether they are still in
    use is asked of all of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self._num_containers = 0
        self.parse_object, self.parse_array = self._counted(self.parse_object), self._counted(self.parse_array)
        self.scan_once = py_make_scanner(self)

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def parse_one(*given: Any, **named: Any) -> Any:
            self._num_containers += 1
            if self._num_containers > MAX_CONTAINERS:
                raise json.JSONDecodeError(f"it has more than {MAX_CONTAINERS} objects and lists", "", 0)
            return parse(*given, **named)

        return parse_one


def read_json(body: bytes) -> Any:
    """What a body says. Raises as json.loads."""
    return json.loads(body, cls=_Decoder) if len(body) > INTERRUPTIBLE else json.loads(body)


class _RefusedBody(HTTPException):
    """FastAPI passes exceptions of this kind on from where a body is read."""

    def __init__(self, error: RequestValidationError):
        super().__init__(400)
        self.error = error


class _LongBody(Request):
    """A request whose `json` is the object that its route takes, if the body is long: FastAPI then has nothing left to check."""

    def __init__(self, request: Request, route: APIRoute, beside: Beside):
        super().__init__(request.scope, request.receive)
        self._route, self._beside = route, beside

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LONG:
            return await super().json()
        made, mistakes = await self._beside(lambda: self._read(body))
        if mistakes:
            raise _RefusedBody(RequestValidationError(mistakes))
        return made

    def _read(self, body: bytes) -> tuple[Any, list[Any]]:
        """(object, mistakes in the form that FastAPI has them in)."""
        assert self._route.body_field is not None
        return self._route.body_field.validate(read_json(body), {}, loc=("body",))


def reading_route(beside: Beside) -> type[APIRoute]:
    """The class of routes that read long bodies so."""

    class ReadingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle

            async def read_and_handle(request: Request) -> Response:
                try:
                    return await handle(_LongBody(request, self, beside))
                except _RefusedBody as refused:
                    raise refused.error from None

            return read_and_handle

    return ReadingRoute
