"""The answer to a control call that several servers or replicas got: what each of them said, and what that comes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType


class Said(Struct, omit_defaults=True):
    """What one server said. status, answer: its HTTP status and body. error: why there is neither."""

    status: int | UnsetType = UNSET
    answer: Any = UNSET
    error: str | UnsetType = UNSET

    @classmethod
    def of(cls, status: int, body: bytes) -> Said:
        """As an answer says it: its JSON, or its text."""
        try:
            return cls(status, msgspec.json.decode(body))
        except msgspec.DecodeError:
            return cls(status, body.decode(errors="replace"))

    @property
    def weight_version(self) -> str | None:
        """The name of its weights, if it says it."""
        found = self.answer.get("weight_version") if isinstance(self.answer, dict) else None
        return found if isinstance(found, str) else None


class FleetAnswer(Struct):
    """status: "ok" where all servers did it. servers: by their names. weight_version: where they all name the same."""

    status: Literal["ok", "error"]
    servers: dict[str, Said]
    weight_version: str | UnsetType = UNSET


def answer_of_all(servers: Mapping[str, Said]) -> tuple[int, FleetAnswer]:
    """(a status, the answer): 200 if all did it, what all of them say if that is the same, else 502."""
    statuses = {said.status for said in servers.values()}
    done = all(status is not UNSET and status < 300 for status in statuses)
    status = 200 if done else next(iter(statuses)) if len(statuses) == 1 else 502
    answer = FleetAnswer("ok" if done else "error", dict(servers))
    versions = {said.weight_version for said in servers.values()}
    if len(versions) == 1 and (version := versions.pop()) is not None:
        answer.weight_version = version
    return 502 if status is UNSET else status, answer
