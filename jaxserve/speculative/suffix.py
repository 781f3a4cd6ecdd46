"""Drafts by suffix decoding: what most often followed the longest earlier occurrences of a sequence's last tokens.

Owns the texts that are searched, on the host: the tokens of each running request, and the outputs of requests that ended, those of
one cache salt together. SuffixDecoding (Oliaro et al., 2411.04975), with vLLM's options. Where the paper walks a suffix tree, this
looks at the most recent occurrences of the last two tokens and compares them backwards, as LZ77 compressors find their matches: a
token costs a few bytes instead of one node a suffix, and what leaves needs no tree to be pruned. A match is kept from step to step
as long as it goes on, so that only sequences that left theirs are searched.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.request import Request
from jaxserve.scheduling.schedule import Schedule
from jaxserve.scheduling.sequence_rows import SequenceRows
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.proposer import NO_DRAFT, Seen, WithoutWeights
from jaxserve.speculative.text_index import MAX_OCCURRENCES, SHIFT, TextIndex
from kernels.cpu import suffix_search

OUTPUT_TOKENS = 1 << 23  # of earlier requests, that are kept at most: 200 MB


@dataclass(frozen=True)
class HostDrafts(WithoutWeights):
    """The device's part of a method whose drafts the host sends with the step: it proposes none."""

    num_drafts: int
    draws = False

    def init_state(self) -> tuple[()]:
        return ()

    def propose(self, weights: tuple[()], state: tuple[()], seen: Seen) -> tuple[tuple[()], jax.Array, None]:
        return state, jnp.full((len(seen.seq_rows), self.num_drafts), NO_DRAFT, jnp.int32), None


class Limits(NamedTuple):
    """What bounds a draft: see SpeculativeConfig."""

    most: int
    depth: int
    factor: float
    min_prob: float

    def num_drafts(self, lengths: np.ndarray) -> np.ndarray:
        """Most drafts behind matches of so many tokens. One that is too long with its drafts for the depth counts as shorter."""
        return np.minimum(min(self.most, self.depth - 1), (self.factor * lengths).astype(np.int64))


def follow(
    index: TextIndex,
    places: np.ndarray,  # i64[n, MAX_OCCURRENCES]: where matches go on, one at least of each row; 0: none
    lengths: np.ndarray,  # i64[n]: tokens that agree before them
    ends: np.ndarray,  # i64[n]: of a match in the text itself, where that ends: the match goes on in cycles; 0 for others
    limits: Limits,
) -> tuple[np.ndarray, np.ndarray]:  # i32[n, K], f64[n]
    """What follows matches, NO_DRAFT behind its end, and how many of these tokens stand by expectation: the sum of their
    probabilities. Of several places the most frequent token goes first, of equally many the most recent one's, and those that have
    it decide on the next. A text's own match goes on at its end with what it drafted, as LZ77's overlapping copies do."""
    steps, starts = np.arange(limits.most)[:, None], places.T[:, None]
    at = starts + steps  # [MAX_OCCURRENCES, K, n]
    beyond = (at >= ends) & (ends > 0)
    if beyond.any():
        at = np.where(beyond, starts + steps % np.maximum(ends - starts, 1), at)
    tokens = index.tokens.take(at)
    tokens *= starts > 0
    best, counts = _most_frequent(tokens)
    probs = counts / (places > 0).sum(1)
    given = (counts > 0) & (probs >= limits.min_prob) & (steps < limits.num_drafts(lengths))
    return np.where(given, best - 1, NO_DRAFT).T, (probs * given).sum(0)


def _most_frequent(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [P, K, n] -> [K, n], [K, n]
    """Of n rows the most frequent first token of P texts of K, of equally many that of the first text; then the most frequent one
    behind that, and so on; and how many texts agree so far. Texts end at a 0: where all have ended none agree.

    Each text has a mask of those that agree with it so far, itself included, of P bits, the first text's the highest: texts that
    agree have equal masks, and of masks with equally many bits the largest has the first text. So the best text is that whose
    (number of bits, mask) of all K tokens is the largest, compared from the first token on."""
    P, K, n = tokens.shape
    flat, bits = tokens.reshape(P, K * n), (1 << np.arange(P - 1, -1, -1)).astype(np.uint8)[:, None, None]
    masks = ((flat[:, None] == flat).view(np.uint8) * bits).sum(0, dtype=np.uint8).reshape(P, K, n) * (tokens > 0)
    masks = np.bitwise_and.accumulate(masks, 1)
    counts = np.bitwise_count(masks)
    keys, rank = counts.astype(np.int64) << 8 | masks, np.zeros((P, n), np.int64)  # of 12 bits: five fit a rank
    for j in range(0, K, 5):
        shifts = 12 * np.arange(min(5, K - j))[::-1, None]
        rank = (keys[:, j : j + 5] << shifts).sum(1) + ((rank == rank.max(0)).astype(np.int64) << 60)
    best, rows = rank.argmax(0), np.arange(n)
    return tokens[best, :, rows].T, counts[best, :, rows].T


def _first(places: np.ndarray) -> np.ndarray:  # [n, P] -> bool[n, P]
    """Whether a place is the first of its row that is the same. One that was used anew may be there twice."""
    ordered = np.sort(places, 1)
    if not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > 0)).any():
        return np.ones(places.shape, bool)
    return ~((places[:, :, None] == places[:, None]) & np.tri(places.shape[1], k=-1, dtype=bool)).any(2)


class _Output(NamedTuple):
    """An output of an earlier request: where it stands, and its group."""

    begin: int
    end: int
    group: int


class Outputs:
    """Outputs of earlier requests, of `max_num` requests and as many tokens as there is room for. The least recently drafted from
    leaves first; where their tokens are too many, those that have been there for longest.

    Owns a part of the index, which is written from begin to end, again and again, and the group of each salt.
    """

    def __init__(self, index: TextIndex, begin: int, end: int, max_num: int):
        self.index: TextIndex = index
        self.begin: int = begin
        self.end: int = end
        self.max_num: int = max_num
        self.kept: OrderedDict[int, _Output] = OrderedDict()  # by number; the least recently used first
        self._numbers = np.zeros(end - begin, np.int64)  # of the output at each place
        self.group_at: np.ndarray = np.zeros(end - begin, np.int32)  # the group of the output at each
        self._groups: dict[str | None, int] = {}
        self._users: Counter[str | None] = Counter()  # outputs and running requests of each salt
        self._salts: dict[int, str | None] = {}
        self._next_place, self._num_outputs, self._num_groups = begin, 0, 0

    def hold(self, salt: str | None) -> int:
        """The group of a salt's outputs; kept until it is dropped as often."""
        if salt not in self._groups:
            self._num_groups += 1
            self._groups[salt] = self._num_groups
            self._salts[self._num_groups] = salt
        self._users[salt] += 1
        return self._groups[salt]

    def drop(self, group: int) -> None:
        """Nobody's group ends: a later one of the salt has another number, so that nothing of it is found."""
        salt = self._salts[group]
        self._users[salt] -= 1
        if not self._users[salt]:
            del self._users[salt], self._groups[salt], self._salts[group]

    def add(self, ids: Sequence[int], salt: str | None) -> int:
        """Keeps an output, its end if it is longer than all that may be kept. Its group; 0 if it is not kept."""
        if not self.max_num or len(ids) < 2:
            return 0
        ids = ids[max(0, len(ids) - (self.end - self.begin - 1)) :]
        if self._next_place + len(ids) >= self.end:
            self._next_place = self.begin
        begin, end = self._next_place, self._next_place + len(ids) + 1  # nothing stands behind it
        for number in np.unique(self._numbers[begin - self.begin : end - self.begin]).tolist():
            if number in self.kept:
                self._remove(number)
        self._num_outputs += 1
        group = self.hold(salt)
        self.kept[self._num_outputs] = _Output(begin, end, group)
        self._numbers[begin - self.begin : end - self.begin] = self._num_outputs
        self.group_at[begin - self.begin : end - self.begin] = group
        self.index.tokens[end - 1] = 0
        self.index.write(begin, ids, group)
        self._next_place = end
        if len(self.kept) > self.max_num:
            self._remove(next(iter(self.kept)))
        return group

    def of_group(self, places: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Whether outputs of a group stand at places. What has been forgotten has its group there still, but no tokens."""
        at = places - self.begin
        return (self.group_at.take(at, mode="clip") == groups) & (at >= 0)

    def use(self, places: np.ndarray) -> None:
        """Those at these places were drafted from."""
        for number in self._numbers[places - self.begin].tolist():
            if number in self.kept:
                self.kept.move_to_end(number)

    def _remove(self, number: int) -> None:
        output = self.kept.pop(number)
        self.index.erase(output.begin, output.end)
        self.drop(output.group)


class SuffixDrafts:
    """What the host drafts for each row, and what it keeps for that.

    Memory: 4 bytes for each token of a running request, 16 for one of an output that is kept, and 128 MiB of places.

    The search is that of the library for CPUs where there is one, otherwise numpy's, which finds the same.
    """

    def __init__(self, config: SpeculativeConfig, max_num_seqs: int, max_model_len: int):
        assert config.suffix_decoding_max_tree_depth is not None and config.suffix_decoding_max_cached_requests is not None
        assert config.suffix_decoding_max_spec_factor is not None and config.suffix_decoding_min_token_prob is not None
        self.limits: Limits = Limits(
            config.num_speculative_tokens,
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
        stride, max_cached = max_model_len + 2, config.suffix_decoding_max_cached_requests
        own = 1 + max_num_seqs * stride
        room = max(stride, min(max_cached * stride, OUTPUT_TOKENS)) if max_cached else 0
        self.index: TextIndex = TextIndex(own + room + config.num_speculative_tokens)  # drafts may look beyond the last text
        self.outputs: Outputs = Outputs(self.index, own, own + room, max_cached)
        self._begins = 1 + stride * np.arange(max_num_seqs)
        self._lens = np.zeros(max_num_seqs, np.int64)  # tokens of each row's owner that are indexed
        self._owners = np.full(max_num_seqs, -1, np.int64)  # of each row: which one it is, by SequenceRows.generation; -1: none
        self._num_owners = 0
        # Of each row its match in its own text; behind these, of each row its match in outputs.
        self._groups = np.zeros(2 * max_num_seqs, np.int64)
        self._places = np.zeros((2 * max_num_seqs, MAX_OCCURRENCES), np.int64)
        self._lengths = np.zeros(2 * max_num_seqs, np.int64)  # 0: there is none
        self._search = suffix_search.make(self._texts())

    def _texts(self) -> suffix_search.Texts:
        index, outputs = self.index, self.outputs
        arrays = self._begins, self._lens, self._groups, self._places, self._lengths, outputs.group_at
        numbers = outputs.begin, outputs.end - outputs.begin, len(self._lens), int(SHIFT)
        return suffix_search.Texts(index.tokens, index.places, *arrays, *numbers, *self.limits)

    def propose(
        self,
        schedule: Schedule,
        state: SequenceRows,
        sampled: np.ndarray,  # as Scheduler.update's
        counts: np.ndarray | None,
        proposed: np.ndarray,  # i32[max_num_seqs, K]
    ) -> None:
        """Writes the drafts of the rows that a step sampled for into `proposed`, and keeps the outputs of requests that have
        finished. To be called when the step's tokens are the requests'."""
        rows, owners = schedule.rows, schedule.generations
        here = schedule.samples & (state.generation[rows] == owners)
        (entries,) = here.nonzero()
        if len(entries) < len(rows):
            for i in (schedule.samples & ~here).nonzero()[0].tolist():
                self._end(schedule.requests[i], int(rows[i]), int(owners[i]))
            rows, owners = rows[entries], owners[entries]
        if not len(rows):
            return
        for i in (self._owners[rows] != owners).nonzero()[0].tolist():
            self._meet(schedule.requests[entries[i]], int(rows[i]), int(owners[i]))
        new = state.num_known[rows] - self._lens[rows]
        if (new != (1 if counts is None else counts[entries])).any():  # tokens that were forced are among them
            entries, sampled = np.arange(len(rows)), self._known_tokens(rows, state, new)
        sampled = sampled.reshape(len(sampled), -1)
        if self._search is not None:
            used = self._search(rows, entries, sampled, new, bool(self.outputs.kept), proposed)
            if len(used):
                self.outputs.use(used)
        else:
            proposed[rows] = self._drafts(rows, *self._extend(rows, sampled[entries], new))

    def _known_tokens(self, rows: np.ndarray, state: SequenceRows, new: np.ndarray) -> np.ndarray:  # i32[n, max(new)]
        """The last `new` tokens of each row's owner."""
        ids = np.zeros((len(rows), new.max(initial=0)), np.int32)
        for of_row, row, n in zip(ids, rows.tolist(), new.tolist(), strict=True):
            of_row[:n] = state.request_at(row).token_ids[-n:] if n else []
        return ids

    def _end(self, request: Request, row: int, owner: int) -> None:
        """A request that finished, or lost its row."""
        if self._owners[row] == owner:
            self._forget(row)
        if request.finished and (group := self.outputs.add(request.output_token_ids, request.cache_salt)):
            self._lengths[self._groups == group] = 0  # it may be as long a match: others of the salt are searched for anew

    def _forget(self, row: int) -> None:
        begin = int(self._begins[row])
        self.index.erase(begin, begin + int(self._lens[row]))
        self._lens[row], self._owners[row] = 0, -1
        self._lengths[[row, row + len(self._lens)]] = 0
        self.outputs.drop(int(self._groups[row + len(self._lens)]))

    def _meet(self, request: Request, row: int, owner: int) -> None:
        """A row's new owner, whose tokens are indexed but for the last, which is its first that came."""
        if self._owners[row] >= 0:
            self._forget(row)
        self._num_owners += 1  # whose groups are below 0, and each another: nothing of a row's owners before is found
        self._owners[row], self._groups[row] = owner, -self._num_owners
        self._groups[row + len(self._lens)] = self.outputs.hold(request.cache_salt)
        self._lens[row] = len(request.token_ids) - 1
        self.index.write(int(self._begins[row]), request.token_ids[:-1], -self._num_owners)

    def _extend(
        self,
        rows: np.ndarray,
        ids: np.ndarray,  # i32[n, w]
        new: np.ndarray,  # how many of them are the row's
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Indexes the tokens that came. (i64[n]: where each text ended before, i64[n]: tokens that came,
        i32[n, MAX_OCCURRENCES]: where its last pair occurred before, as TextIndex.recent; anything where none came)"""
        new = new.astype(np.int64)
        old, groups, ids = self._lens[rows], self._groups[rows], ids[np.arange(ids.shape[1]) < new[:, None]]
        begins = self._begins[rows] + old
        self._lens[rows] = old + new
        ends = np.cumsum(new)
        places = np.arange(len(ids)) + np.repeat(begins - ends + new, new)
        recent = self.index.append(places, ids, np.repeat(groups, new))
        return begins, new, recent[ends - 1] if len(ids) else np.zeros((len(rows), MAX_OCCURRENCES), np.int32)

    def _drafts(self, rows: np.ndarray, begins: np.ndarray, counts: np.ndarray, recent: np.ndarray) -> np.ndarray:  # i32[n, K]
        """Of each row by its own text and by outputs of its salt; whichever promises more. Where outputs are kept, the matches in
        them stand behind those in the rows' own texts: m = 2 n, otherwise m = n."""
        n, index = len(rows), self.index
        if self.outputs.kept:
            matches, begins, counts = np.concatenate([rows, rows + len(self._lens)]), np.tile(begins, 2), np.tile(counts, 2)
        else:
            matches = rows
        ends, lengths = begins + counts, self._lengths[matches]  # i64[m]
        (live,) = lengths.nonzero()
        moved = index.go_on(self._places.take(matches[live], axis=0), begins[live], counts[live])
        if self.outputs.kept:
            moved[~self.outputs.of_group(moved - 1, self._groups[matches[live], None]) & (live >= n)[:, None]] = 0
        self._places[matches[live]] = moved
        lengths[live] = np.where(moved.any(1), np.minimum(lengths[live] + counts[live], self.limits.depth), 0)
        (lost,) = (lengths == 0).nonzero()
        lost, candidates, within = self._candidates(lost, matches, ends, counts, recent)
        self._places[matches[lost]], lengths[lost] = index.search(candidates, within, ends[lost], self.limits.depth)
        self._lengths[matches] = lengths
        (found,) = lengths.nonzero()
        places, drafts = self._places.take(matches[found], axis=0), np.full((len(matches), self.limits.most), NO_DRAFT, np.int32)
        if len(found):
            drafts[found], scores = follow(index, places, lengths[found], np.where(found < n, ends[found], 0), self.limits)
        if not self.outputs.kept or not len(found):
            return drafts[:n]
        promised = np.zeros(len(matches))
        promised[found] = scores
        better = promised[n:] > promised[:n]
        if better.any():
            self.outputs.use(self._places[matches[n:][better]].max(1))
        return np.where(better[:, None], drafts[n:], drafts[:n])

    def _candidates(
        self, lost: np.ndarray, matches: np.ndarray, ends: np.ndarray, counts: np.ndarray, recent: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of those without a match (which of them may have one, i32[k, MAX_OCCURRENCES]: where their last pairs occurred, whether
        a place is one in which they may be found)."""
        n = len(recent)
        ours, theirs = lost[lost < n], lost[lost >= n]
        ours = ours[(counts[ours] > 0) & (recent[ours, 0] > 0)]
        places = recent[ours]
        within = (places > self._begins[matches[ours], None]) & (places < ends[ours, None] - 1)
        if not len(theirs):
            return ours, places, within
        groups = self._groups[matches[theirs]]
        others = self.outputs.index.recent(ends[theirs] - 1, groups)
        fits = self.outputs.of_group(others, groups[:, None]) & _first(others)
        return np.concatenate([ours, theirs]), np.concatenate([places, others]), np.concatenate([within, fits])
