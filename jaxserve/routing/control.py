"""Control calls of a fleet: each goes to every server, and the answer has what each of them said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from jaxserve.routing.backends import UNANSWERED, Backend

EMPTY_CACHES = ("/update_weights_from_path", "/reset_prefix_cache", "/sleep")  # calls after which no prefix is cached any more


class Said(Struct, omit_defaults=True):
    """What one server said. status, answer: its HTTP status and body. error: why there is neither."""

    status: int | UnsetType = UNSET
    answer: Any = UNSET
    error: str | UnsetType = UNSET


class FleetAnswer(Struct):
    """status: "ok" where all servers did it. weight_version: where they all name the same."""

    status: Literal["ok", "error"]
    servers: dict[str, Said]
    weight_version: str | UnsetType = UNSET


async def ask_all(
    backends: Mapping[str, Backend], method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> tuple[int, FleetAnswer]:
    """Asks all servers at once, also those that take no requests at present. Returns a status and the answer: 200 if all did it,
    what all of them say if that is the same, else 502."""
    headers = list(headers)
    said = await asyncio.gather(*(_ask(backend, method, target, headers, body) for backend in backends.values()))
    statuses = {one.status for one in said}
    done = all(status is not UNSET and status < 300 for status in statuses)
    status = 200 if done else next(iter(statuses)) if len(statuses) == 1 else 502
    answer = FleetAnswer("ok" if done else "error", dict(zip(backends, said, strict=True)))
    versions = {_version_of(one.answer) for one in said}
    if len(versions) == 1 and (version := versions.pop()) is not None:
        answer.weight_version = version
    return 502 if status is UNSET else status, answer


async def _ask(backend: Backend, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Said:
    try:
        answer = await backend.ask(method, target, headers, body)
    except UNANSWERED as error:
        return Said(error=str(error) or type(error).__name__)
    try:
        content = b"".join([chunk async for chunk in answer.chunks()])
    except ConnectionAbortedError as error:
        return Said(error=str(error))
    finally:
        answer.close()
    try:
        said = Said(answer.status, msgspec.json.decode(content))
    except msgspec.DecodeError:
        said = Said(answer.status, content.decode(errors="replace"))
    if (version := _version_of(said.answer)) is not None:
        backend.weight_version = version  # before the next check says so
    return said


def _version_of(answer: Any) -> str | None:
    found = answer.get("weight_version") if isinstance(answer, dict) else None
    return found if isinstance(found, str) else None
