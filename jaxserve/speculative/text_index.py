"""Texts in one array, and where pairs of their tokens occurred of late: what suffix decoding searches.

Owns the tokens and a table of hashed pairs, each with its last places, as LZ77 compressors have them (RFC 1951, section 4).
Searches are numpy's, for all sequences of a step at once: a sequence costs no Python of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_OCCURRENCES = 8  # of a pair of tokens, that are looked at: the most recent
_COMPARED = 8  # tokens that are compared at once
NUM_CHAINS = 1 << 22  # pairs whose hashes are alike share one
_FACTOR, _OF_GROUP = np.uint64(0x9E3779B97F4A7C15), np.int64(0x165667B19E3779F9)  # odd: Fibonacci hashing, a prime of xxHash's
SHIFT = np.uint64(42)  # of a hash, to a chain
_PLACES = np.arange(MAX_OCCURRENCES)


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
        self._pairs = np.ndarray(size - 1, np.int64, self.tokens.data, strides=(4,))  # the same: two tokens from each place on
        self.places: np.ndarray = np.zeros((NUM_CHAINS, MAX_OCCURRENCES), np.int32)  # of each chain, the last ones first

    def write(self, begin: int, ids: Sequence[int] | np.ndarray, group: int) -> None:
        """A text of its own, where nothing stands yet."""
        end = begin + len(ids)
        self.tokens[begin:end] = ids
        self.tokens[begin:end] += 1
        places = np.arange(begin + 1, end)
        self._link(places, self.chains(places, np.array([group])))

    def append(self, places: np.ndarray, ids: np.ndarray, groups: np.ndarray) -> np.ndarray:  # i32[m, MAX_OCCURRENCES]
        """One token or more behind each of several texts, at their places; those of one text in order. Returns where the pair that
        ends at each place occurred before, as `recent` does."""
        self.tokens[places] = ids + 1
        return self._link(places, self.chains(places, groups))

    def erase(self, begin: int, end: int) -> None:
        """Forgets what stands there, from then on in no search."""
        self.tokens[begin:end] = 0

    def recent(self, places: np.ndarray, groups: np.ndarray) -> np.ndarray:  # i32[n, MAX_OCCURRENCES]
        """Where second tokens of the pairs that end at these places stood in a group, the last ones first; 0: nowhere. Others of
        like hashes are among them."""
        return self.places.take(self.chains(places, groups), axis=0)

    def chains(self, places: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Of the pairs that end at these places, in a group."""
        mixed = self._pairs[places - 1] ^ (groups * _OF_GROUP)
        return ((mixed.view(np.uint64) * _FACTOR) >> SHIFT).view(np.int64)

    def _link(self, places: np.ndarray, chains: np.ndarray) -> np.ndarray:
        """What stood in the chain of each place before it."""
        before = self.places.take(chains, axis=0)
        ordered = np.sort(chains)
        if not (ordered[1:] == ordered[:-1]).any():
            self._put(chains, places, before)
            return before
        order = np.argsort(chains, kind="stable")
        chains, places = chains[order], places[order]
        begins = np.concatenate([[True], chains[1:] != chains[:-1]])
        at = np.arange(len(chains))
        ranks = at - np.maximum.accumulate(np.where(begins, at, 0))  # how many of the same chain come before each, here
        own = places[np.maximum(at[:, None] - 1 - _PLACES, 0)]
        older = np.take_along_axis(before[order], np.maximum(_PLACES - ranks[:, None], 0), 1)
        lists = np.where(_PLACES < ranks[:, None], own, older)
        ends = np.concatenate([begins[1:], [True]])
        self._put(chains[ends], places[ends], lists[ends])
        before[order] = lists
        return before

    def _put(self, chains: np.ndarray, places: np.ndarray, before: np.ndarray) -> None:
        lists = np.empty_like(before)
        lists[:, 0], lists[:, 1:] = places, before[:, :-1]
        self.places[chains] = lists

    def search(self, recent: np.ndarray, within: np.ndarray, ends: np.ndarray, depth: int) -> Found:
        """Of the places in `recent`, i32[n, MAX_OCCURRENCES], those before which most tokens agree with a text's last ones, two at
        least and `depth` at most. within: bool, alike: which may be looked at. ends: i64[n], behind each text's last token."""
        fits = (self._pairs[recent - 1] == self._pairs[ends - 2][:, None]) & within
        rows, columns = fits.nonzero()
        at = recent[rows, columns].astype(np.int64) + 1
        agree, live = np.full(len(at), 2), np.arange(len(at))
        for j in range(2, depth, _COMPARED):
            if not len(live):
                break
            back = 1 + j + np.arange(min(_COMPARED, depth - j))
            # At the array's beginning the last places are read; the 0 behind a text's beginning came before them.
            ours = self.tokens[ends[:, None] - back]
            differs = np.ones((len(live), len(back) + 1), bool)
            np.not_equal(self.tokens[at[live, None] - back], np.where(ours == 0, -1, ours)[rows[live]], out=differs[:, :-1])
            alike = differs.argmax(1)
            agree[live] += alike
            live = live[alike == len(back)]
        lengths = np.zeros(recent.shape, np.int64)
        lengths[rows, columns] = agree
        longest = lengths.max(1)
        places = np.zeros(recent.shape, np.int64)
        places[rows, columns] = np.where(agree == longest[rows], at, 0)
        return Found(places, longest)

    def go_on(self, places: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Matches at `places`, i64[n, P], of texts that have grown: those that go on with the same tokens, so much further; 0 for
        the others. begins: i64[n], where each text ended before; counts: i64[n], tokens since."""
        rows, columns = places.nonzero()
        at, ahead = places[rows, columns], np.arange(counts.max(initial=0))
        # Behind a text nothing stands: no match goes on past its end.
        came, follows = (self.tokens.take(x[:, None] + ahead, mode="clip") for x in (begins[rows], at))
        stands = ((follows == came) | (ahead >= counts[rows, None])).all(1)
        moved = np.zeros_like(places)
        moved[rows, columns] = np.where(stands, at + counts[rows], 0)
        return moved
