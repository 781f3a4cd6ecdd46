"""Which requests' pages are saved to a store: all of them while that costs little or hits pay for it, else those of a share.

Owns the account, in seconds: what saving has cost, how long steps have run, and what hits have saved. It is a token bucket. Steps
fill it with a part of their time and hits with what they save; saves empty it. The share falls as it empties below nothing.

The part is COST_SHARE at first, and less the more saving has cost that no hit has paid for: a half at ALLOWANCE seconds, a third at
twice as much. So where nothing is ever hit, the cost grows as the square root of the steps' time, down to LEAST_SHARE of it.

What was not saved is remembered by its hashes, as in the ghost lists of ARC (Megiddo and Modha, FAST 2003): a request that computes
such a page again shows that saving it would have paid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

COST_SHARE = 0.01  # of the steps' time that saving may cost at first
LEAST_SHARE = 0.001  # and however long nothing is hit
ALLOWANCE = 0.1  # seconds that saving may cost before anything is hit; as far below nothing the share is 0
LIMIT = 2.0  # seconds that hits may fill in
MAX_DEBT = 5 * ALLOWANCE  # seconds that may be owed: at LEAST_SHARE 400 s of steps pass then before anything is saved
_MAX_UNPAID = ALLOWANCE * (COST_SHARE / LEAST_SHARE - 1)  # seconds, with which LEAST_SHARE is left
MAX_SKIPPED = 1 << 16  # pages that are remembered
_HASHES = 1 << 64  # numbers that the first eight bytes of a hash make


class SavePace:
    """The account of one engine. always: all requests' pages are saved, whatever it says."""

    def __init__(self, *, always: bool):
        self._always = always
        self._balance = ALLOWANCE  # seconds in the bucket, in [-MAX_DEBT, LIMIT]
        self._unpaid = 0.0  # seconds that saving has cost, less those that hits have saved, in [-LIMIT, _MAX_UNPAID]
        self._skipped: dict[bytes, None] = {}  # the oldest first

    def ran(self, seconds: float) -> None:
        """A step has run so long."""
        if self._balance < ALLOWANCE:
            part = COST_SHARE / (1 + max(self._unpaid, 0.0) / ALLOWANCE)
            self._balance = min(self._balance + part * seconds, ALLOWANCE)

    def saved(self, seconds: float) -> None:
        """Saving has cost so much."""
        self._balance = max(self._balance - seconds, -MAX_DEBT)
        self._unpaid = min(self._unpaid + seconds, _MAX_UNPAID)

    def hit(self, seconds: float) -> None:
        """Loads have saved so much, or would have."""
        self._balance = min(self._balance + seconds, LIMIT)
        self._unpaid = max(self._unpaid - seconds, -LIMIT)

    @property
    def share(self) -> float:
        """Of the requests whose pages are new, in [0, 1]."""
        return 1.0 if self._always else max(0.0, min(1.0, 1.0 + self._balance / ALLOWANCE))

    def chooses(self, hash_: bytes) -> bool:
        """Whether a request is in the share, by the hash of the first page that it computes: engines of equal shares choose alike,
        and what one with a small share chooses, one with a larger does too."""
        return int.from_bytes(hash_[:8]) < self.share * _HASHES

    def skip(self, hashes: Sequence[bytes]) -> int:
        """These pages were computed, and not saved. Returns of how many that was not known."""
        num_new = sum(hash_ not in self._skipped for hash_ in hashes)
        for hash_ in hashes:
            self._skipped.pop(hash_, None)
            self._skipped[hash_] = None
        while len(self._skipped) > MAX_SKIPPED:
            del self._skipped[next(iter(self._skipped))]
        return num_new

    @property
    def has_skipped(self) -> bool:
        """Whether any page is remembered that was not saved."""
        return bool(self._skipped)

    def missed(self, hashes: Iterable[bytes]) -> int:
        """How many of these pages, from the first on, were skipped. They are remembered no longer."""
        found = 0
        for hash_ in hashes:
            if hash_ not in self._skipped:
                break
            del self._skipped[hash_]
            found += 1
        return found
