"""What each replica has to do, as far as who chooses one knows. Knows nothing of Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from jaxserve.routing.policy import Load

STATS_SECONDS = 1.0  # between two looks at what a replica says
STALE_SECONDS = 2 * STATS_SECONDS  # in which a request that was sent may not be in the load that is known


class Loads:
    """What replicas said last, and what they were sent since: a request counts as running for STALE_SECONDS, whether it is in what
    its replica says or has ended. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._said: dict[str, Load] = {}
        self._sent: dict[str, deque[float]] = {}

    def hear(self, said: Mapping[str, Load]) -> set[str]:
        """These are the replicas, and what they say. Returns those that are gone."""
        gone = self._said.keys() - said.keys()
        self._said = dict(said)
        self._sent = {name: self._sent.get(name, deque()) for name in said}
        return gone

    def send(self, name: str, now: float) -> None:
        """A request goes to this replica."""
        self._sent.setdefault(name, deque()).append(now)

    def of(self, names: Sequence[str], now: float) -> dict[str, Load]:
        """Of each of these replicas; of one that nobody has heard of, what it was sent."""
        found = {}
        for name in names:
            sent, said = self._sent.get(name, deque[float]()), self._said.get(name, Load())
            while sent and sent[0] <= now - STALE_SECONDS:
                sent.popleft()
            found[name] = Load(said.waiting, said.running + len(sent))
        return found
