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

MAX_OCCURRENCES = 16  # of a pair of tokens, that are kept: the most recent
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
        self.texts: dict[int, Sequence[int]] = {}
        self.num_tokens: int = 0  # of all texts, as far as they are indexed
        self._indexed: dict[int, int] = {}  # tokens of each that are
        self._places: dict[tuple[int, int], list[int]] = {}

    def extend(self, number: int, text: Sequence[int]) -> None:
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

    def draft(self, tokens: Sequence[int], limits: Limits) -> Draft:
        """What follows the longest suffix of `tokens` that occurs, at least two tokens long. Of several occurrences of that length
        the most frequent token goes first, and those that have it decide on the next."""
        n = len(tokens)
        places = self._places.get((tokens[-2], tokens[-1])) if n > 1 else None
        if places is None:
            return NO_TOKENS
        longest, best = 0, []
        for place in places:
            number, end = place >> _TEXT_BITS, place & ((1 << _TEXT_BITS) - 1)
            text = self.texts[number]
            if text is tokens and end == n:
                continue  # the suffix itself
            length, most = 2, min(limits.depth, end, n)
            while length < most and text[end - 1 - length] == tokens[n - 1 - length]:
                length += 1
            if length > longest:
                longest, best = length, [(text, end, number)]
            elif length == longest:
                best.append((text, end, number))
        return _most_frequent(best, limits.num_drafts(longest), limits.min_prob) if best else NO_TOKENS


class Limits(NamedTuple):
    """What bounds a draft: see SpeculativeConfig."""

    most: int
    depth: int
    factor: float
    min_prob: float

    def num_drafts(self, length: int) -> int:
        """Most drafts behind a match of so many tokens. One that is too long with its drafts for the depth counts as shorter."""
        return min(self.most, int(self.factor * length), self.depth - 1)


def _most_frequent(places: list[tuple[Sequence[int], int, int]], most: int, min_prob: float) -> Draft:
    """A draft of at most so many tokens. places: (text, where it goes on, its number). A text that ends goes on with the draft."""
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    for j in range(most):
        found = [_token(text, end + j, tokens) for text, end, _ in places]
        counts = Counter(token for token in found if token is not None)
        if not counts:
            break
        token, count = max(reversed(counts.items()), key=lambda item: item[1])  # of equally many the most recent
        prob *= count / len(found)
        if prob < min_prob:
            break
        if count < len(found):
            places = [place for place, other in zip(places, found, strict=True) if other == token]
        tokens.append(token)
        score += prob
    return Draft(tokens, score, places[-1][2])


def _token(text: Sequence[int], place: int, drafts: list[int]) -> int | None:
    """The token at this place: a text that ends goes on with what was drafted, as LZ77's overlapping copies do."""
    if place < len(text):
        return text[place]
    beyond = place - len(text)
    return drafts[beyond] if beyond < len(drafts) else None


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
        self._own: list[tuple[Request, SuffixIndex] | None] = [None] * max_num_seqs  # by row
        self._num_outputs = 0

    def propose(self, schedule: Schedule, proposed: np.ndarray) -> None:
        """Writes the drafts of the rows that a step sampled for into `proposed`, i32[max_num_seqs, K], and keeps the outputs of
        requests that have finished. To be called when the step's tokens are the requests'."""
        for i in schedule.samples.nonzero()[0].tolist():
            request, row = schedule.requests[i], int(schedule.rows[i])
            if request.finished:
                self._own[row] = None
                self._keep(request)
                continue
            if request.row != row:
                continue
            tokens = self.draft(request, row)
            proposed[row, : len(tokens)] = tokens
            proposed[row, len(tokens) :] = NO_DRAFT

    def draft(self, request: Request, row: int) -> list[int]:
        """What may follow the request's tokens, by its own and by earlier outputs of its salt; whichever promises more."""
        own = self._own[row]
        if own is None or own[0] is not request:
            own = self._own[row] = request, SuffixIndex()
        own[1].extend(0, request.token_ids)
        best, others = own[1].draft(request.token_ids, self.limits), self.of_salt.get(request.cache_salt)
        if others is not None:
            other = others.draft(request.token_ids, self.limits)
            if other.score > best.score:
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
