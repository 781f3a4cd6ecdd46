"""Drafts by suffix decoding: what most often followed the longest earlier occurrences of a sequence's last tokens.

Owns the texts that are searched, on the host: the tokens of each running request, and the outputs of requests that ended, those of
one cache salt together. SuffixDecoding (Oliaro et al., 2411.04975), with vLLM's options. Where the paper walks a suffix tree, this
looks at the most recent occurrences of the last two tokens and compares them backwards, as LZ77 compressors find their matches:
a token costs one entry of a dictionary instead of one node a suffix, and what leaves needs no tree to be pruned.
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
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.proposer import NO_DRAFT, Seen, WithoutWeights

MAX_OCCURRENCES = 8  # of a pair of tokens, that are kept: the most recent
_TEXT_BITS = 40  # an occurrence is one integer: number of the text << _TEXT_BITS | where it goes on


@dataclass(frozen=True)
class HostDrafts(WithoutWeights):
    """The device's part of a method whose drafts the host sends with the step: it proposes none."""

    num_drafts: int
    draws = False

    def init_state(self) -> tuple[()]:
        return ()

    def propose(self, weights: tuple[()], state: tuple[()], seen: Seen) -> tuple[tuple[()], jax.Array, None]:
        return state, jnp.full((len(seen.seq_rows), self.num_drafts), NO_DRAFT, jnp.int32), None


class Draft(NamedTuple):
    """Tokens that may follow, and how many of them stand by expectation: the sum of their probabilities."""

    tokens: list[int]
    score: float
    text: int  # the number of a text that holds them; -1: there is none


NO_TOKENS = Draft([], 0.0, -1)


class SuffixIndex:
    """Where pairs of tokens occurred in some texts, which may grow and may be removed."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.num_tokens: int = 0  # of all texts, as far as they are indexed
        self._indexed: dict[int, int] = {}  # tokens of each that are
        self._places: dict[tuple[int, int], list[int]] = {}

    def extend(self, number: int, text: list[int]) -> None:
        """Adds what `text` has beyond the tokens that are indexed under `number`. It is not copied."""
        self.texts[number] = text
        begin, end, base = self._indexed.get(number, 0), len(text), number << _TEXT_BITS
        places = self._places
        for i in range(max(begin, 1), end):
            pair = text[i - 1], text[i]
            found = places.get(pair)
            if found is None:
                places[pair] = [base + i + 1]
            else:
                found.append(base + i + 1)
                if len(found) > MAX_OCCURRENCES:
                    del found[0]
        self._indexed[number] = end
        self.num_tokens += end - begin

    def remove(self, number: int) -> None:
        """Forgets a text."""
        text = self.texts.pop(number)
        self.num_tokens -= self._indexed.pop(number)
        for pair in set(zip(text, text[1:], strict=False)):
            kept = [place for place in self._places.get(pair, ()) if place >> _TEXT_BITS != number]
            if kept:
                self._places[pair] = kept
            else:
                self._places.pop(pair, None)

    def longest(self, tokens: Sequence[int], depth: int) -> Match:
        """Where the longest suffix of `tokens` occurs, of two tokens at least and of `depth` at most."""
        n = len(tokens)
        places = self._places.get((tokens[-2], tokens[-1])) if n > 1 else None
        if places is None:
            return Match(n, 0, [])
        longest, best, tail, first = 2, [], list(tokens[-2:]), tokens[-2]
        for place in reversed(places):
            number, end = place >> _TEXT_BITS, place & ((1 << _TEXT_BITS) - 1)
            text = self.texts[number]
            if end < longest or text[end - longest] != first or text[end - longest : end] != tail:
                continue  # a shorter match than others
            if end == n and text is tokens:
                continue  # the suffix itself
            length, most = longest, min(depth, end, n)
            while length < most and text[end - 1 - length] == tokens[n - 1 - length]:
                length += 1
            if length > longest:
                longest, best, tail, first = length, [], list(tokens[n - length :]), tokens[n - length]
            best.append((text, end, number))
        return Match(n, longest, best)


class Match(NamedTuple):
    """Where the last tokens of a sequence occur. places: (text, where it goes on, its number), the most recent first."""

    num_tokens: int  # of the sequence
    length: int  # of the tokens that agree
    places: list[tuple[list[int], int, int]]

    def grown(self, tokens: Sequence[int], depth: int) -> Match | None:
        """The match when the sequence has grown to `tokens`; None if none of the places goes on like that. Those that do are still
        the longest."""
        if not self.places:
            return None
        length, places = self.length, self.places
        for token in tokens[self.num_tokens :]:
            places = [(text, end + 1, number) for text, end, number in places if end < len(text) and text[end] == token]
            if not places:
                return None
            length = min(length + 1, depth)
        return Match(len(tokens), length, places)

    def draft(self, limits: Limits) -> Draft:
        """What follows. Of several places the most frequent token goes first, and those that have it decide on the next."""
        return _most_frequent(self.places, limits.num_drafts(self.length), limits.min_prob) if self.places else NO_TOKENS


class Limits(NamedTuple):
    """What bounds a draft: see SpeculativeConfig."""

    most: int
    depth: int
    factor: float
    min_prob: float

    def num_drafts(self, length: int) -> int:
        """Most drafts behind a match of so many tokens. One that is too long with its drafts for the depth counts as shorter."""
        return min(self.most, int(self.factor * length), self.depth - 1)


def _most_frequent(places: list[tuple[list[int], int, int]], most: int, min_prob: float) -> Draft:
    """A draft of at most so many tokens. places: as a Match's. A text that ends goes on with the draft, as LZ77's overlapping
    copies do."""
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    while len(tokens) < most:
        j = len(tokens)
        if len(places) == 1:
            text, end, number = places[0]
            found = text[end + j : end + most]
            if not found:
                beyond = end + j - len(text)
                found = tokens[beyond : beyond + most - j]
            if not found:
                break
            tokens += found
            score += prob * len(found)
            continue
        found = [_token(text, end + j, tokens) for text, end, _ in places]
        token = found[0]
        count = found.count(token)
        if token is None or count < len(found):
            counts = Counter(token for token in found if token is not None)
            if not counts:
                break
            token, count = max(counts.items(), key=lambda item: item[1])  # of equally many the most recent
            prob *= count / len(found)
            if prob < min_prob:
                break
            places = [place for place, other in zip(places, found, strict=True) if other == token]
        tokens.append(token)
        score += prob
    return Draft(tokens, score, places[0][2])


def _token(text: list[int], place: int, drafts: list[int]) -> int | None:
    """The token at this place, in the draft behind the text's end; None behind both."""
    if place < len(text):
        return text[place]
    beyond = place - len(text)
    return drafts[beyond] if beyond < len(drafts) else None


@dataclass(slots=True)
class _Row:
    """What is kept of a running request."""

    request: Request
    index: SuffixIndex  # of its own tokens
    own: Match | None = None
    others: Match | None = None  # among outputs of earlier requests


class SuffixDrafts:
    """What the host drafts for each row, and what it keeps for that.

    Memory: of each running request one occurrence a token, and of the outputs of `suffix_decoding_max_cached_requests` requests
    the same; the least recently drafted from leaves first.
    """

    def __init__(self, config: SpeculativeConfig, max_num_seqs: int):
        assert config.suffix_decoding_max_tree_depth is not None and config.suffix_decoding_max_cached_requests is not None
        assert config.suffix_decoding_max_spec_factor is not None and config.suffix_decoding_min_token_prob is not None
        self.limits: Limits = Limits(
            config.num_speculative_tokens,
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
        self.max_cached: int = config.suffix_decoding_max_cached_requests
        self.cached: OrderedDict[int, str | None] = OrderedDict()  # number of an output -> its salt; the least recently used first
        self.of_salt: dict[str | None, SuffixIndex] = {}
        self._rows: list[_Row | None] = [None] * max_num_seqs
        self._num_outputs = 0

    def propose(self, schedule: Schedule, proposed: np.ndarray) -> None:
        """Writes the drafts of the rows that a step sampled for into `proposed`, i32[max_num_seqs, K], and keeps the outputs of
        requests that have finished. To be called when the step's tokens are the requests'."""
        rows, written, drafts, most = schedule.rows.tolist(), [], [], self.limits.most
        for i in schedule.samples.nonzero()[0].tolist():
            request, row = schedule.requests[i], rows[i]
            if request.finished:
                self._rows[row] = None
                self._keep(request)
                continue
            if request.row != row:
                continue
            tokens = self.draft(request, row)
            written.append(row)
            drafts.append(tokens + [NO_DRAFT] * (most - len(tokens)))
        if written:
            proposed[written] = drafts

    def draft(self, request: Request, row: int) -> list[int]:
        """What may follow the request's tokens, by its own and by earlier outputs of its salt; whichever promises more."""
        kept, tokens, depth = self._rows[row], request.token_ids, self.limits.depth
        if kept is None or kept.request is not request:
            kept = self._rows[row] = _Row(request, SuffixIndex())
        kept.index.extend(0, tokens)
        kept.own = (kept.own and kept.own.grown(tokens, depth)) or kept.index.longest(tokens, depth)
        best, others = kept.own.draft(self.limits), self.of_salt.get(request.cache_salt)
        if others is not None:  # an output that ended meanwhile is looked at when no place goes on any more
            kept.others = (kept.others and kept.others.grown(tokens, depth)) or others.longest(tokens, depth)
            other = kept.others.draft(self.limits)
            if other.score > best.score:
                if other.text in self.cached:
                    self.cached.move_to_end(other.text)
                best = other
        return best.tokens

    def _keep(self, request: Request) -> None:
        output = request.output_token_ids
        if not self.max_cached or len(output) < 2:
            return
        number, salt = self._num_outputs, request.cache_salt
        self._num_outputs += 1
        self.of_salt.setdefault(salt, SuffixIndex()).extend(number, output)
        self.cached[number] = salt
        if len(self.cached) > self.max_cached:
            oldest, salt = self.cached.popitem(last=False)
            index = self.of_salt[salt]
            index.remove(oldest)
            if not index.texts:
                del self.of_salt[salt]
