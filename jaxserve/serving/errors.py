"""Errors in the form that OpenAI's clients expect, and the HTTP status of each.

Owns the mapping from exceptions to statuses. Knows nothing of what raised them.
"""

from __future__ import annotations

import contextlib
import http
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.serving.messages import DeadlineError, FailedError, QueueFullError, UnavailableError
from jaxserve.serving.responses import Error, ErrorResponse, encode
from jaxserve.serving.vllm_fields import MISSING
from jaxserve.structured.grammars import GrammarError

logger: logging.Logger = logging.getLogger("jaxserve")

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RefusedError(Exception):
    """The request is wrong, or asks for what this server can't do. param: the parameter that is wrong, if it is one."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status: int = status
        self.param: str | None = param
        self.code: str | None = code


@contextlib.contextmanager
def checking(form_field: str = "structured_outputs") -> Iterator[None]:
    """Wraps the code that checks a request: a ValueError or NotImplementedError there becomes a RefusedError. Elsewhere these are
    faults of the server.

    form_field: the parameter that says what form the output must have.
    """
    try:
        yield
    except GrammarError as error:
        message = str(error).removeprefix("structured_outputs: ")
        raise RefusedError(f"{form_field}: {message}", param=form_field) from error
    except (ValueError, NotImplementedError) as error:
        named = re.match(r"([a-z_]+)[=:]", str(error))
        raise RefusedError(str(error), param=named[1] if named else None) from error


def error_of(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorResponse:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorResponse(Error(message, kind, param, code or http.HTTPStatus(status).phrase.lower().replace(" ", "_")))


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = encode(error_of(status, message, param=param, code=code))
    return Response(body, status, dict(headers or {}), "application/json")


def describe(error: Exception) -> tuple[int, ErrorResponse, dict[str, str]]:
    """(status, body, headers) of the answer to an exception."""
    message = str(error)
    if isinstance(error, RefusedError):
        return error.status, error_of(error.status, message, param=error.param, code=error.code), {}
    if isinstance(error, RequestValidationError):
        param, message = _first_mistake(error)
        return 400, error_of(400, message, param=param), {}
    if isinstance(error, HTTPException):
        return error.status_code, error_of(error.status_code, str(error.detail)), dict(error.headers or {})
    if isinstance(error, QueueFullError):
        return 429, error_of(429, message), {"Retry-After": str(error.retry_after)}
    if isinstance(error, UnavailableError):
        return 503, error_of(503, message), {"Retry-After": "10"}
    if isinstance(error, DeadlineError):
        return 504, error_of(504, message, code="deadline_exceeded"), {}
    if isinstance(error, FailedError):
        return 500, error_of(500, message), {}
    logger.exception("a request failed", exc_info=error)
    return 500, error_of(500, f"internal error: {type(error).__name__}"), {}


async def on_error(_: Request, error: Exception) -> Response:
    """The answer to a request that raised an exception."""
    status, body, headers = describe(error)
    return Response(encode(body), status, headers, "application/json")


def _first_mistake(error: RequestValidationError) -> tuple[str | None, str]:
    """(first wrong parameter, message). Mistakes of one parameter, such as those of a union's alternatives, are joined."""
    by_param: dict[str, list[str]] = {}
    for mistake in error.errors():
        said = _in_words(mistake)
        param = next((str(part) for part in mistake["loc"][1:2]), "")
        if mistake["type"] == "json_invalid":
            param = ""
        elif not param and (named := re.match(r"([a-z_]+)=", said)):  # of fields together
            param = named[1]
        messages = by_param.setdefault(param, [])
        if said not in messages:
            messages.append(said)
    lines = [
        f"{param}: {' / '.join(messages)}" if param and not messages[0].startswith(f"{param}=") else " / ".join(messages)
        for param, messages in by_param.items()
    ]
    return next(iter(by_param)) or None, "; ".join(lines)


def _line(param: str, messages: list[str]) -> str:
    said = " / ".join(messages)
    return f"{param}: {said}" if param and not said.startswith(f"{param}=") else said


def _in_words(mistake: Mapping[str, Any]) -> str:
    if mistake["type"] == "extra_forbidden":
        missing = MISSING.get(str(mistake["loc"][-1])) if len(mistake["loc"]) == 2 else None
        return "unknown parameter" if missing is None else f"this server does not have it: {missing.instead}"
    if mistake["type"] == "json_invalid":
        return f"the body is not JSON: {mistake.get('ctx', {}).get('error', mistake['msg'])}"
    inside = ".".join(str(part) for part in mistake["loc"][2:] if isinstance(part, int) or str(part).isidentifier())
    said = mistake["msg"].removeprefix("Value error, ")
    return f"{said} (at {inside})" if inside else said
