"""Control calls of a fleet: each goes to every server, and the answer has what each of them said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from jaxserve.routing.backends import UNANSWERED, Backend
from jaxserve.serving.fleet_answers import FleetAnswer, Said, answer_of_all

EMPTY_CACHES = ("/update_weights_from_path", "/reset_prefix_cache", "/sleep")  # calls after which no prefix is cached any more


async def ask_all(
    backends: Mapping[str, Backend], method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> tuple[int, FleetAnswer]:
    """Asks all servers at once, also those that take no requests at present. Returns as `answer_of_all`."""
    headers = list(headers)
    said = await asyncio.gather(*(_ask(backend, method, target, headers, body) for backend in backends.values()))
    return answer_of_all(dict(zip(backends, said, strict=True)))


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
    said = Said.of(answer.status, content)
    if said.weight_version is not None:
        backend.weight_version = said.weight_version  # before the next check says so
    return said
