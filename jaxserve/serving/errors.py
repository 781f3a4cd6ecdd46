"""Errors in the forms that OpenAI's and Anthropic's clients expect, and the HTTP status of each.

Owns the mapping from exceptions to statuses. Knows nothing of what raised them.
"""

from __future__ import annotations

import contextlib
import http
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from jaxserve.sampling.nothing_allowed import NothingAllowedError
from jaxserve.serving.dialects.anthropic_forms import MessagesError, MessagesErrorDetail
from jaxserve.serving.messages import DeadlineError, FailedError, QueueFullError, UnavailableError
from jaxserve.serving.responses import Error, ErrorResponse, encode
from jaxserve.serving.vllm_fields import MISSING
from jaxserve.serving.vllm_routes import instead_of
from jaxserve.structured.grammars import GrammarError

logger: logging.Logger = logging.getLogger("jaxserve")

MESSAGES = "/v1/messages"  # whose errors, and those of the paths below it, have Anthropic's form
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
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
    except NothingAllowedError as error:
        raise _nothing_allowed(error, form_field) from error
    except (ValueError, NotImplementedError) as error:
        named = re.match(r"([a-z_]+)[=:]", str(error))
        raise RefusedError(str(error), param=named[1] if named else None) from error


def _nothing_allowed(error: NothingAllowedError, form_field: str) -> RefusedError:
    """The request's own parameters forbid every token; its form has the name that the request gave it."""
    return RefusedError(str(error).replace("structured_outputs", form_field), param=error.names[0])


def error_of(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorResponse:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorResponse(Error(message, kind, param, code or http.HTTPStatus(status).phrase.lower().replace(" ", "_")))


def as_messages_error(status: int, error: ErrorResponse, request_id: str | None = None) -> MessagesError:
    """An error in Anthropic's form."""
    kind = _MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return MessagesError(MessagesErrorDetail(kind, error.error.message), request_id)


def in_form_of(path: str, status: int, error: ErrorResponse, request_id: str | None = None) -> bytes:
    """The body of an answer with an error, as clients of this path expect it."""
    if path == MESSAGES or path.startswith(MESSAGES + "/"):
        return encode(as_messages_error(status, error, request_id))
    return encode(error)


def error_response(
    scope: Scope,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer to the request of this scope."""
    return _answer(scope, status, error_of(status, message, param=param, code=code), dict(headers or {}))


def _answer(scope: Scope, status: int, error: ErrorResponse, headers: dict[str, str]) -> Response:
    body = in_form_of(scope["path"], status, error, scope.get("state", {}).get("request_id"))
    return Response(body, status, headers, "application/json")


def response_to(scope: Scope, error: Exception) -> Response:
    """The answer to the request of this scope, which raised an exception."""
    return _answer(scope, *describe(error))


def describe(error: Exception) -> tuple[int, ErrorResponse, dict[str, str]]:
    """(status, body, headers) of the answer to an exception."""
    if isinstance(error, NothingAllowedError):  # after the first token: which field gave the form is not known here
        error = _nothing_allowed(error, "structured_outputs (or response_format, or tools)")
    message = str(error)
    if isinstance(error, RefusedError):
        return error.status, error_of(error.status, message, param=error.param, code=error.code), {}
    if isinstance(error, RequestValidationError):
        param, code, message = _first_mistake(error)
        return 400, error_of(400, message, param=param, code=code), {}
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


def _without_slash(request: Request) -> str | None:
    """The address of the same path without a slash at its end, such as "../models" for /v1/models/, if there is a route of it."""
    path = request.scope["path"].removesuffix("/")
    shorter = dict(request.scope) | {"path": path}
    if path == request.scope["path"] or all(route.matches(shorter)[0] is Match.NONE for route in request.app.routes):
        return None
    query = request.scope["query_string"].decode("latin-1")
    return f"../{quote(path.rpartition('/')[2])}" + (f"?{query}" if query else "")


async def on_error(request: Request, error: Exception) -> Response:
    """The answer to a request that raised an exception. Of a path that vLLM has it says what there is instead; a path that has a
    slash too many is sent to the right one, as vLLM does."""
    if isinstance(error, HTTPException) and error.status_code == 404 and (address := _without_slash(request)) is not None:
        return Response(status_code=307, headers={"Location": address})
    is_lost = isinstance(error, HTTPException) and error.status_code in (404, 405)  # 405: such as /v1/responses/render
    if is_lost and (instead := instead_of(request.url.path)) is not None:
        error = HTTPException(404, f"this server does not have {request.url.path}: {instead}")
    return response_to(request.scope, error)


def _first_mistake(error: RequestValidationError) -> tuple[str | None, str, str]:
    """(first wrong parameter, what is wrong with it in pydantic's word, message). Mistakes of one parameter, such as those of a
    union's alternatives, are joined."""
    by_param: dict[str, list[str]] = {}
    for mistake in error.errors():
        place = [part for part in mistake["loc"] if part not in ("<chat>", "<completion>")]  # which of several a body is
        mistake = mistake | {"loc": tuple(place)}
        said = _in_words(mistake)
        where, *inside = mistake["loc"]
        param = str(inside[0]) if inside else ""
        if where == "query":  # as vLLM says it: a body may have the same name
            param = f"query.{param}"
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
    return next(iter(by_param)) or None, error.errors()[0]["type"], "; ".join(lines)


def _in_words(mistake: Mapping[str, Any]) -> str:
    if mistake["type"] == "json_invalid":
        return f"the body is not JSON: {mistake.get('ctx', {}).get('error', mistake['msg'])}"
    inside = ".".join(str(part) for part in mistake["loc"][2:] if isinstance(part, int) or str(part).isidentifier())
    said, given = mistake["msg"].removeprefix("Value error, "), mistake.get("input")
    if mistake["type"] == "extra_forbidden":
        is_top = len(mistake["loc"]) == 2 or mistake["loc"][1:-1] == ("sampling_params",)
        missing = MISSING.get(str(mistake["loc"][-1])) if is_top else None
        said = "unknown parameter" if missing is None else f"this server does not have it: {missing.instead}"
    elif mistake["type"] == "literal_error" and isinstance(given, str) and len(given) <= 64:
        said += f", not {given!r}"
    elif mistake["type"] in ("greater_than_equal", "less_than_equal"):
        said += f" [{mistake['type']}]"  # pydantic's word, which clients of vLLM's look for
    return f"{said} (at {inside})" if inside else said
