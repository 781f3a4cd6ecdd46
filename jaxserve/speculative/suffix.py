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
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.request import Request
from jaxserve.scheduling.schedule import Schedule
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.proposer import NO_DRAFT, Seen, WithoutWeights
from jaxserve.speculative.text_index import MAX_OCCURRENCES, TextIndex

OUTPUT_TOKENS = 1 << 23  # of earlier requests, that are kept at most: 200 MB
_ROW, _TOKENS = attrgetter("row"), attrgetter("token_ids")


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
    places: np.ndarray,  # i64[n, P]: where matches go on; 0: none
    lengths: np.ndarray,  # i64[n]: tokens that agree before them
    ends: np.ndarray,  # i64[n]: of a match in the text itself, where that ends: the match goes on in cycles; 0 for others
    limits: Limits,
) -> tuple[np.ndarray, np.ndarray]:  # i32[n, K], f64[n]
    """What follows matches, NO_DRAFT behind its end, and how many of these tokens stand by expectation: the sum of their
    probabilities. Of several places the most frequent token goes first, of equally many the most recent one's, and those that have
    it decide on the next. A text's own match goes on at its end with what it drafted, as LZ77's overlapping copies do."""
    n, most = len(places), limits.most
    drafts, scores = np.full((n, most), NO_DRAFT, np.int32), np.zeros(n)
    wanted, found = limits.num_drafts(lengths), (places > 0).sum(1)
    (alone,) = ((found == 1) & (wanted > 0)).nonzero()
    if len(alone):
        tokens = _ahead(index, places[alone].max(1), ends[alone], most)
        given = np.logical_and.accumulate((tokens > 0) & (np.arange(most) < wanted[alone, None]), axis=1)
        drafts[alone] = np.where(given, tokens, 0) - 1
        scores[alone] = given.sum(1)
    (rows,) = ((found > 1) & (wanted > 0)).nonzero()
    live, probs = places[rows] > 0, np.ones(len(rows))
    ahead = _ahead(index, places[rows], ends[rows, None], most)
    for j in range(most):
        if not len(rows):
            break
        tokens = np.where(live, ahead[:, :, j], 0)
        best, counts = _most_frequent(tokens)
        probs = probs * counts / live.sum(1)
        stays = (counts > 0) & (probs >= limits.min_prob)
        drafts[rows[stays], j], scores[rows[stays]] = best[stays] - 1, scores[rows[stays]] + probs[stays]
        stays &= wanted[rows] > j + 1
        live = (tokens == best[:, None]) & (tokens > 0)
        rows, live, probs, ahead = rows[stays], live[stays], probs[stays], ahead[stays]
    return drafts, scores


def _ahead(index: TextIndex, places: np.ndarray, ends: np.ndarray, most: int) -> np.ndarray:
    """The next `most` tokens from places on, along an axis more; as TextIndex.tokens."""
    steps = np.arange(most)
    return index.tokens[places[..., None] + np.where(ends[..., None] > 0, steps % np.maximum(ends - places, 1)[..., None], steps)]


def _most_frequent(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [n, P] -> [n], [n]
    """The most frequent of each row's tokens that are not 0, of equally many the first; and how often it stands there."""
    first = tokens[np.arange(len(tokens)), (tokens > 0).argmax(1)]
    counts = (tokens > 0).sum(1)
    (mixed,) = ((tokens != first[:, None]) & (tokens > 0)).any(1).nonzero()
    if len(mixed):
        each = tokens[mixed]
        alike = ((each[:, :, None] == each[:, None]) & (each > 0)[:, None]).sum(2) * (each > 0)
        places = alike.argmax(1)
        first[mixed], counts[mixed] = each[np.arange(len(each)), places], alike.max(1)
    return first, counts


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

    def add(self, ids: Sequence[int], salt: str | None) -> None:
        """Keeps an output, its end if it is longer than all that may be kept."""
        if not self.max_num or len(ids) < 2:
            return
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
        self.index.tokens[end - 1] = 0
        self.index.write(begin, ids, group)
        self._next_place = end
        if len(self.kept) > self.max_num:
            self._remove(next(iter(self.kept)))

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

    Memory: of each token of a running request, and of an output that is kept, 16 to 24 bytes.
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
        self._owners: list[Request | None] = [None] * max_num_seqs
        # A match in its own text and one in outputs, of each row: [2, max_num_seqs, ...].
        self._groups = np.stack([-1 - np.arange(max_num_seqs), np.zeros(max_num_seqs, np.int64)])
        self._places = np.zeros((2, max_num_seqs, MAX_OCCURRENCES), np.int64)
        self._lengths = np.zeros((2, max_num_seqs), np.int64)

    def propose(self, schedule: Schedule, proposed: np.ndarray) -> None:
        """Writes the drafts of the rows that a step sampled for into `proposed`, i32[max_num_seqs, K], and keeps the outputs of
        requests that have finished. To be called when the step's tokens are the requests'."""
        requests, rows = schedule.requests, schedule.rows
        if not schedule.samples.all():
            entries = schedule.samples.nonzero()[0]
            requests, rows = [requests[i] for i in entries.tolist()], rows[entries]
        there = np.fromiter(map(_ROW, requests), np.int64, len(requests)) == rows
        if not there.all():
            for i in (~there).nonzero()[0].tolist():
                self._end(requests[i], int(rows[i]))
            requests = [requests[i] for i in there.nonzero()[0].tolist()]
            rows = rows[there]
        if requests:
            proposed[rows] = self._drafts(rows, *self._extend(requests, rows))

    def _end(self, request: Request, row: int) -> None:
        """A request that finished, or lost its row."""
        if self._owners[row] is request:
            self._forget(row)
        if request.finished:
            self.outputs.add(request.output_token_ids, request.cache_salt)

    def _forget(self, row: int) -> None:
        begin, group = int(self._begins[row]), int(self._groups[1, row])
        self.index.erase(begin, begin + int(self._lens[row]))
        self._lens[row], self._owners[row] = 0, None
        self._places[:, row] = 0
        self.outputs.drop(group)

    def _meet(self, request: Request, row: int) -> None:
        """A row's new owner, whose tokens are indexed."""
        if self._owners[row] is not None:
            self._forget(row)
        self.index.write(int(self._begins[row]), request.token_ids, int(self._groups[0, row]))
        self._owners[row], self._groups[1, row] = request, self.outputs.hold(request.cache_salt)
        self._lens[row] = len(request.token_ids)

    def _extend(self, requests: list[Request], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indexes what the rows' owners have beyond what is. (i64[n]: tokens of each before, i64[n]: tokens that came)"""
        owners = self._owners
        for request, row in zip(requests, rows.tolist(), strict=True):
            if owners[row] is not request:
                self._meet(request, row)
        texts, old = list(map(_TOKENS, requests)), self._lens[rows]
        counts = np.fromiter(map(len, texts), np.int64, len(texts)) - old
        if (counts == 1).all():
            ids, places, groups = np.array([text[-1] for text in texts], np.int32), self._begins[rows] + old, self._groups[0, rows]
        else:
            new = [text[begin:] for text, begin in zip(texts, old.tolist(), strict=True)]
            ids = np.fromiter(chain.from_iterable(new), np.int32, int(counts.sum()))
            ahead = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
            places = np.repeat(self._begins[rows] + old, counts) + ahead
            groups = np.repeat(self._groups[0, rows], counts)
        self.index.append(places, ids, groups)
        self._lens[rows] = old + counts
        return old, counts

    def _drafts(self, rows: np.ndarray, old: np.ndarray, counts: np.ndarray) -> np.ndarray:  # i32[n, K]
        """Of each row by its own text and by outputs of its salt; whichever promises more."""
        n, sources = len(rows), 2 if self.outputs.kept else 1
        groups = self._groups[:sources, rows].reshape(-1)
        begins, old, counts = (np.tile(x, sources) for x in (self._begins[rows], old, counts))
        lens, own = old + counts, np.arange(sources * n) < n
        places = self._places[:sources, rows].reshape(sources * n, -1)
        places = self.index.go_on(places, begins + old, counts, groups)
        lengths = np.minimum(self._lengths[:sources, rows].reshape(-1) + counts, self.limits.depth)
        (lost,) = (~places.any(1) & (lens > 1)).nonzero()
        if len(lost):
            found = self.index.search((begins + lens)[lost], groups[lost], own[lost], self.limits.depth)
            places[lost], lengths[lost] = found
        self._places[:sources, rows] = places.reshape(sources, n, -1)
        self._lengths[:sources, rows] = lengths.reshape(sources, n)
        drafts, scores = follow(self.index, places, lengths, np.where(own, begins + lens, 0), self.limits)
        if sources == 1:
            return drafts
        better = scores[n:] > scores[:n]
        if better.any():
            self.outputs.use(places[n:][better].max(1))
        return np.where(better[:, None], drafts[n:], drafts[:n])
