"""Texts in one array, and where pairs of their tokens occurred before: what suffix decoding searches.

Owns the tokens and the chains that join equal pairs, as LZ77 compressors have them (RFC 1951, section 4): of each place the last
one before it with the same pair. Searches are numpy's, for all sequences of a step at once: a sequence costs no Python of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_OCCURRENCES = 8  # of a pair of tokens, that are looked at: the most recent
_COMPARED = 8  # tokens that are compared at once
NUM_HEADS = 1 << 22  # chains; pairs whose hashes are alike share one
_FACTORS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9  # odd: Fibonacci hashing, and two of xxHash's primes


class Found(NamedTuple):
    """Where the last tokens of n sequences occurred. Of each the longest matches, the most recent first."""

    places: np.ndarray  # i64[n, MAX_OCCURRENCES]: where each match goes on; 0: there is none
    lengths: np.ndarray  # i64[n]: tokens that agree before them


class TextIndex:
    """Texts by their places in one array. Place 0 holds nothing, nor does the one behind each text.

    A text belongs to a group, and is found by searches in that group alone.
    """

    def __init__(self, size: int):
        self.tokens: np.ndarray = np.zeros(size, np.int32)  # ids + 1; 0 where nothing is
        self.groups: np.ndarray = np.zeros(size, np.int64)  # of the token at each place
        self._before: np.ndarray = np.zeros(size, np.int32)  # of a pair's second token: that of the pair before in its chain
        self._heads: np.ndarray = np.zeros(NUM_HEADS, np.int32)  # the last one of each chain

    def write(self, begin: int, ids: Sequence[int] | np.ndarray, group: int) -> None:
        """A text of its own, where nothing stands yet."""
        end = begin + len(ids)
        self.tokens[begin:end] = ids
        self.tokens[begin:end] += 1
        self.groups[begin:end] = group
        self._link(np.arange(begin + 1, end))

    def append(self, places: np.ndarray, ids: np.ndarray, groups: np.ndarray) -> None:
        """One token or more behind each of several texts, at their places; those of one text in order."""
        self.tokens[places] = ids + 1
        self.groups[places] = groups
        self._link(places)

    def erase(self, begin: int, end: int) -> None:
        """Forgets what stands there, from then on in no search."""
        self.tokens[begin:end] = 0

    def _chains(self, places: np.ndarray, groups: np.ndarray) -> np.ndarray:  # of the pairs that end at these places
        a, b, c = (np.uint64(factor) for factor in _FACTORS)
        mixed = self.tokens[places - 1].astype(np.uint64) * a
        mixed += self.tokens[places].astype(np.uint64) * b
        mixed += groups.astype(np.uint64) * c
        mixed ^= mixed >> np.uint64(29)
        return ((mixed * a) >> np.uint64(42)).astype(np.intp)

    def _link(self, places: np.ndarray) -> None:
        if not len(places):
            return
        chains = self._chains(places, self.groups[places])
        order = np.argsort(chains, kind="stable")
        chains, places = chains[order], places[order]
        before = self._heads[chains]
        same = chains[1:] == chains[:-1]
        before[1:][same] = places[:-1][same]
        self._before[places] = before
        self._heads[chains] = places  # of equal chains the last counts

    def search(self, ends: np.ndarray, groups: np.ndarray, own: np.ndarray, depth: int) -> Found:
        """Where the last tokens of texts occurred, two at least and `depth` at most. ends: i64[n], behind each text's last token.
        groups: i64[n]: where to search. own: bool[n]: in a text itself, not counting its end."""
        n = len(ends)
        places = np.zeros((n, MAX_OCCURRENCES), np.int64)
        last, second_last = self.tokens[ends - 1], self.tokens[ends - 2]
        at = np.where(own, self._before[ends - 1], 0)
        if not own.all():
            at[~own] = self._heads[self._chains(ends[~own] - 1, groups[~own])]
        (live,) = at.nonzero()
        for i in range(MAX_OCCURRENCES):
            if not len(live):
                break
            x = at[live]
            fits = (self.tokens[x] == last[live]) & (self.tokens[x - 1] == second_last[live]) & (self.groups[x] == groups[live])
            places[live, i] = np.where(fits, x + 1, 0)
            at[live] = self._before[x]
            live = live[at[live] > 0]
        places[places == ends[:, None]] = 0
        # A place that was used anew may lead back to where the walk has been.
        (several,) = ((places > 0).sum(1) > 1).nonzero()
        some = places[several]
        again = (some[:, :, None] == some[:, None]) & np.tri(MAX_OCCURRENCES, k=-1, dtype=bool)
        places[several] = np.where(again.any(2), 0, some)
        return self._longest(places, ends, depth)

    def _longest(self, places: np.ndarray, ends: np.ndarray, depth: int) -> Found:
        lengths = np.zeros(places.shape, np.int64)
        rows, columns = places.nonzero()
        if len(rows):
            at, end = places[rows, columns], ends[rows]
            agree, live = np.full(len(at), 2), np.arange(len(at))
            for j in range(2, depth, _COMPARED):
                back = 1 + j + np.arange(min(_COMPARED, depth - j))
                # At the array's beginning the last places are read; the 0 behind a text's beginning came before them.
                tokens = self.tokens[at[live, None] - back]
                alike = np.logical_and.accumulate((tokens == self.tokens[end[live, None] - back]) & (tokens != 0), 1)
                agree[live] += alike.sum(1)
                live = live[alike[:, -1]]
                if not len(live):
                    break
            lengths[rows, columns] = agree
        longest = lengths.max(1)
        return Found(np.where(lengths == longest[:, None], places, 0), longest)

    def go_on(self, places: np.ndarray, begins: np.ndarray, counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Matches at `places`, i64[n, P], of texts that have grown: those that go on with the same tokens, so much further; 0 for
        the others. begins: i64[n], where each text ended before; counts: i64[n], tokens since."""
        moved = np.zeros_like(places)
        rows, columns = places.nonzero()
        at = places[rows, columns]
        for j in range(int(counts.max()) if len(rows) else 0):
            # Behind a text nothing stands: no match goes on past its end.
            stands = (counts[rows] <= j) | (self.tokens[at + j] == self.tokens[begins[rows] + j])
            rows, columns, at = rows[stands], columns[stands], at[stands]
        stands = self.groups[at] == groups[rows]
        rows, columns, at = rows[stands], columns[stands], at[stands]
        moved[rows, columns] = at + counts[rows]
        return moved
