"""Which of several servers a request goes to: by the prefix that one of them has probably cached, by load, or in turn.

Owns the choice, and a guess at what each server's prefix cache holds. Pure values in, a Choice out: it knows no HTTP, no clock and
no randomness, so that a router and a simulator of several replicas share it.

A prompt is known by the hashes of its blocks, each of which covers all that comes before it (`hash_blocks`; a chain from
page_pool.py will do as well). Nobody tokenises here: texts that begin alike have tokens that begin alike.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["prefix", "overloaded", "load", "turn"]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that wait and that run on a server."""

    waiting: int = 0
    running: int = 0

    @property
    def cost(self) -> int:
        """A request that waits delays a new one more than one that runs beside it: the weights are vLLM's, of its data-parallel
        load balancer."""
        return 4 * self.waiting + self.running


@dataclass(frozen=True, slots=True)
class Choice:
    """server: where to. num_matched: leading blocks of the prompt that it has seen before. reason: "prefix" (the longest match),
    "overloaded" (whoever has a longer match is too busy), "load" (nobody has a match), "turn" (in turn)."""

    server: str
    num_matched: int
    reason: Reason


class RoutingPolicy(Protocol):
    def choose(self, blocks: Sequence[Hashable], loads: Mapping[str, Load]) -> Choice:
        """The server, of those in `loads`, for a prompt of these blocks. ValueError if there is none."""
        ...

    def forget(self, server: str) -> None:
        """The server has lost its cache."""
        ...


def hash_blocks(data: bytes, block_bytes: int, root: bytes = b"", max_blocks: int | None = None) -> list[bytes]:
    """The chained hash of each full block of `data`, of the first max_blocks at most. root: what else prompts must share.

    Token ids hash as `array("i", ids).tobytes()`, four bytes each.
    """
    if block_bytes < 1:
        raise ValueError(f"{block_bytes=} must be at least 1")
    num_blocks = len(data) // block_bytes
    if max_blocks is not None:
        num_blocks = min(num_blocks, max_blocks)
    hashes, parent, view = list[bytes](), root, memoryview(data)
    for start in range(0, num_blocks * block_bytes, block_bytes):
        block = hashlib.blake2b(parent, digest_size=16)
        block.update(view[start : start + block_bytes])
        parent = block.digest()
        hashes.append(parent)
    return hashes


class SeenBlocks:
    """The blocks that one server was sent last, at most max_blocks of them.

    Noted from a prompt's tail to its head, so that a block is always more recent than any block after it, and whatever is
    dropped as the least recent leaves every prompt's beginning whole. That is the order in which PagePool gives up pages, too.
    """

    def __init__(self, max_blocks: int):
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[Hashable]) -> int:
        """How many leading blocks are known, by bisection: known blocks have known beginnings. O(log n)."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def note(self, blocks: Sequence[Hashable]) -> None:
        for block in reversed(blocks[: self._max_blocks]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        for _ in range(len(self._blocks) - self._max_blocks):
            self._blocks.popitem(last=False)


class _Turns:
    """Who was chosen longest ago."""

    def __init__(self):
        self._last: dict[str, int] = {}
        self._serials = itertools.count(1)

    def last(self, server: str) -> int:
        """The serial number of a server's last turn; 0 if it had none."""
        return self._last.get(server, 0)

    def take(self, server: str) -> None:
        self._last[server] = next(self._serials)


class PrefixAware:
    """The longest matched prefix, if that server is not too busy; otherwise the least `4 * waiting + running`.

    Args:
      max_blocks: blocks remembered a server (each about 200 bytes), the least recent dropped.
      slack, ratio: a server is too busy if its cost exceeds `slack + ratio` * the least cost there is. So nobody waits behind a
        popular prefix while others idle, and a prefix that everyone shares is soon known everywhere, where it no longer decides.

    Ties go to the least cost, then to whoever was chosen longest ago. Consistent hashing with bounded loads (Mirrokni et al.,
    2018) bounds by the mean cost instead; by the least, one idle server is enough, however many busy ones there are.
    """

    def __init__(self, *, max_blocks: int = 2**16, slack: float = 16, ratio: float = 1.5):
        if max_blocks < 1 or slack < 0 or ratio < 1:
            raise ValueError(f"{max_blocks=} must be at least 1, {slack=} at least 0 and {ratio=} at least 1")
        self.max_blocks: int = max_blocks
        self.slack: float = slack
        self.ratio: float = ratio
        self._seen: dict[str, SeenBlocks] = {}
        self._turns = _Turns()

    def bound(self, loads: Mapping[str, Load]) -> float:
        """The cost above which a server is too busy."""
        return self.slack + self.ratio * min(load.cost for load in loads.values())

    def choose(self, blocks: Sequence[Hashable], loads: Mapping[str, Load]) -> Choice:
        """As RoutingPolicy's. The prompt counts as cached there from now on."""
        _check(loads)
        matched = {server: self._seen[server].match(blocks) if server in self._seen else 0 for server in loads}
        bound = self.bound(loads)
        free = [server for server, load in loads.items() if load.cost <= bound]
        server = min(free, key=lambda s: (-matched[s], loads[s].cost, self._turns.last(s)))
        most = max(matched.values())
        reason: Reason = "load" if not most else "prefix" if matched[server] == most else "overloaded"
        self._seen.setdefault(server, SeenBlocks(self.max_blocks)).note(blocks)
        self._turns.take(server)
        return Choice(server, matched[server], reason)

    def forget(self, server: str) -> None:
        self._seen.pop(server, None)


class LeastLoaded:
    """The least `4 * waiting + running`; of equals, whoever was chosen longest ago."""

    def __init__(self):
        self._turns = _Turns()

    def choose(self, blocks: Sequence[Hashable], loads: Mapping[str, Load]) -> Choice:
        _check(loads)
        server = min(loads, key=lambda s: (loads[s].cost, self._turns.last(s)))
        self._turns.take(server)
        return Choice(server, 0, "load")

    def forget(self, server: str) -> None:
        pass  # nothing is known of its cache


class RoundRobin:
    """Each in turn, whatever its load: the control of a comparison."""

    def __init__(self):
        self._turns = _Turns()

    def choose(self, blocks: Sequence[Hashable], loads: Mapping[str, Load]) -> Choice:
        _check(loads)
        server = min(loads, key=self._turns.last)
        self._turns.take(server)
        return Choice(server, 0, "turn")

    def forget(self, server: str) -> None:
        pass


ROUTING_POLICIES = ("prefix_aware", "least_loaded", "round_robin")


def make_policy(name: str) -> RoutingPolicy:
    """A policy by its name in ROUTING_POLICIES, with its defaults."""
    if name not in ROUTING_POLICIES:
        raise ValueError(f"{name=} must be one of {', '.join(ROUTING_POLICIES)}")
    return {"prefix_aware": PrefixAware, "least_loaded": LeastLoaded, "round_robin": RoundRobin}[name]()


def _check(loads: Mapping[str, Load]) -> None:
    if not loads:
        raise ValueError("loads is empty: there is no server to choose")
