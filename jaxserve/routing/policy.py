"""Which of several servers a request goes to: by the prefix that one of them has probably cached, by load, or in turn.

Owns the choice, and an estimate of what each server's prefix cache holds. It takes values and returns a Choice. It knows no HTTP,
no clock and no randomness, so a router and a simulator of several replicas share it.

A prompt is given by the hashes of its blocks. Each hash covers all blocks before it (`hash_blocks`, or a chain of page_pool.py).
Prompts are not tokenised here: texts with a common prefix have tokens with a common prefix.
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
        """4 * waiting + running: a request that waits delays a new one more than a running one does. The factors are those of
        vLLM's data-parallel load balancer."""
        return 4 * self.waiting + self.running


@dataclass(frozen=True, slots=True)
class Choice:
    """A server for a request.

    num_matched: leading blocks of the prompt that the server has seen before.
    reason: "prefix": it has the longest match. "overloaded": servers with a longer match are too busy. "load": no server has a
    match.
        "turn": it was its turn.
    """

    server: str
    num_matched: int
    reason: Reason


class RoutingPolicy(Protocol):
    def choose(self, blocks: Sequence[Hashable], loads: Mapping[str, Load]) -> Choice:
        """Chooses one of the servers in `loads` for a prompt of these blocks. Raises ValueError if `loads` is empty."""
        ...

    def forget(self, server: str) -> None:
        """The server has lost its cache."""
        ...


def hash_blocks(data: bytes, block_bytes: int, root: bytes = b"", max_blocks: int | None = None) -> list[bytes]:
    """The chained hashes of the full blocks of `data`, of the first max_blocks at most.

    root: a hash of what else prompts must have in common. Token ids are hashed as `array("i", ids).tobytes()`, four bytes each.

    Raises:
      ValueError: block_bytes is below 1.
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

    A prompt's blocks are noted from its last to its first. A block is then always more recent than the blocks after it, and
    dropping the least recent never drops one before its successors. PagePool evicts pages in the same order.
    """

    def __init__(self, max_blocks: int):
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[Hashable]) -> int:
        """How many leading blocks are known. O(log n), by bisection: all blocks before a known one are known."""
        if not blocks or blocks[0] not in self._blocks:
            return 0  # as of most servers
        low, high = 1, len(blocks)
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
    """When each server was last chosen."""

    def __init__(self):
        self._last: dict[str, int] = {}
        self._serials = itertools.count(1)

    def last(self, server: str) -> int:
        """The serial number of a server's last turn; 0 if it had none."""
        return self._last.get(server, 0)

    def take(self, server: str) -> None:
        self._last[server] = next(self._serials)


class PrefixAware:
    """Chooses the server with the longest matched prefix among those that are not too busy. Ties go to the least load
    (`4 * waiting + running`), then to the server that was chosen longest ago.

    Args:
      max_blocks: blocks remembered for each server, about 200 bytes each. The least recent are dropped.
      slack, ratio: a server is too busy if its load exceeds `slack + ratio * least`, where `least` is the least load of all. No
        request then waits for a popular prefix while a server is idle. A prefix that all requests share is soon known to every
        server, and no longer decides.

    Consistent hashing with bounded loads (Mirrokni et al., 2018) bounds by the mean load instead. With the least load, a single
    idle server takes requests from the others, however many busy ones there are.

    Raises:
      ValueError: an argument out of its range.
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
        """The load above which a server is too busy."""
        return self.slack + self.ratio * min(load.cost for load in loads.values())

    def choose(self, blocks: Sequence[Hashable], loads: Mapping[str, Load]) -> Choice:
        """As `RoutingPolicy.choose`. The prompt counts as cached at that server from now on."""
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
    """Chooses the least `4 * waiting + running`; of equals, the server that was chosen longest ago."""

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
    """Chooses each server in turn, whatever its load; a baseline for comparisons."""

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
    """The policy of that name with its defaults. Raises ValueError where the name is not in ROUTING_POLICIES."""
    if name not in ROUTING_POLICIES:
        raise ValueError(f"{name=} must be one of {', '.join(ROUTING_POLICIES)}")
    return {"prefix_aware": PrefixAware, "least_loaded": LeastLoaded, "round_robin": RoundRobin}[name]()


def _check(loads: Mapping[str, Load]) -> None:
    if not loads:
        raise ValueError("loads is empty: there is no server to choose")
