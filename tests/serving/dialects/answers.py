"""Answers that a test writes down piece by piece, as a dialect is given them, and the events that it makes of them."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from jaxserve.serving.dialects.turn import Turn
from jaxserve.serving.generation import CallRecord
from jaxserve.serving.messages import Delta
from jaxserve.serving.parsers import Piece


class ScriptedAnswer:
    """Stands in for a ChatAnswer: `pieces` come one by one, then the end."""

    def __init__(self, pieces: Sequence[Piece], finish_reason: str = "stop", stop_reason: int | str | None = None):
        self._pieces, self._end = pieces, (finish_reason, stop_reason)
        self.stream: Any = contextlib.nullcontext()
        self.record = CallRecord("chatcmpl-1", "alphabet", 7, created=3, paged_tokens={"r": 6})

    def logprobs(self, delta):
        return None

    async def parts(self):
        for piece in self._pieces:
            delta = Delta("r", 0, "", [1], num_cached_tokens=4)
            self.record.add(delta)
            yield [piece], delta
        yield [], Delta("r", 0, "", [], None, *self._end, num_cached_tokens=4)


def turn_of(*pieces: Piece, **ending: Any) -> Turn:
    answer: Any = ScriptedAnswer(pieces, **ending)
    return Turn(answer)


def collected(events) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each of an asynchronous generator's server-sent events."""

    async def collect():
        return [event async for event in events]

    return [parsed(event.decode()) for event in asyncio.run(collect())]


def parsed(event: str) -> tuple[str, dict[str, Any]]:
    first, second = event.strip().split("\n")
    return first.removeprefix("event: "), json.loads(second.removeprefix("data: "))


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Those of a whole stream."""
    assert text.endswith("\n\n")
    return [parsed(event) for event in text.split("\n\n")[:-1]]
