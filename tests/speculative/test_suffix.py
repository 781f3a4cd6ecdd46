"""Drafts by suffix decoding, against a search through everything that was said; what is kept, for whom and how long."""

import itertools

import numpy as np
import pytest

from jaxserve.request import Request, RequestStatus
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.schedule import Schedule
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.proposer import NO_DRAFT
from jaxserve.speculative.suffix import MAX_OCCURRENCES, Draft, Limits, SuffixDrafts, SuffixIndex

LIMITS = Limits(most=5, depth=24, factor=1.0, min_prob=0.1)


def draft_of(index: SuffixIndex, tokens: list[int], limits: Limits = LIMITS) -> Draft:
    return index.longest(tokens, limits.depth).draft(limits)


def occurrences(texts: list[list[int]], tokens: list[int]) -> list[tuple[int, list[int]]]:
    """(tokens that agree before it, what follows) of each place in `texts` behind which something stands."""
    found = []
    for text in texts:
        for end in range(2, len(text) + 1):
            if text is tokens and end == len(tokens):
                continue
            length = next(
                (i for i, (a, b) in enumerate(zip(text[:end][::-1], tokens[::-1], strict=False)) if a != b), min(end, len(tokens))
            )
            if length >= 2:
                found.append((length, text[end:]))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_follows_the_longest_occurrences(seed):
    """Its first token is the most frequent one behind them, or one as frequent; the draft as a whole stands behind one of them."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 6, rng.integers(2, 40)).tolist() for _ in range(3)]
    index = SuffixIndex()
    for number, text in enumerate(texts):
        for end in range(1, len(text) + 1):  # as it grows
            index.extend(number, text[:end])
    tokens = rng.integers(0, 6, 30).tolist()
    draft = draft_of(index, tokens)
    found = [] if len(texts) > MAX_OCCURRENCES else occurrences(texts, tokens)
    if not found:
        assert not draft.tokens
        return
    longest = max(length for length, _ in found)
    follow = [rest for length, rest in found if length == longest]
    firsts = [rest[0] for rest in follow if rest]
    if not firsts:
        assert not draft.tokens
        return
    assert firsts.count(draft.tokens[0]) == max(map(firsts.count, firsts))
    assert len(draft.tokens) <= min(LIMITS.most, longest) and 0 < draft.score <= len(draft.tokens)
    assert any((rest + draft.tokens)[: len(draft.tokens)] == draft.tokens for rest in follow)
    assert draft.tokens[0] in [rest[0] for rest in follow if rest]


def test_what_repeats_goes_on_and_what_is_seldom_does_not():
    index, period = SuffixIndex(), [1, 2, 3] * 4
    index.extend(0, period)
    assert draft_of(index, period, LIMITS).tokens == [1, 2, 3, 1, 2], "a match that overlaps the end goes on in cycles"
    assert draft_of(index, period, LIMITS._replace(factor=0.25)).tokens == [1, 2], "nine tokens match"
    assert draft_of(index, period, LIMITS._replace(depth=3)).tokens == [1, 2], "a match of one token, and two drafts"
    forks = SuffixIndex()
    forks.extend(0, [7, 8, 1, 0, 7, 8, 1, 0, 7, 8, 2, 0, 7, 8, 3])
    assert draft_of(forks, [7, 8], LIMITS._replace(factor=9)) == ([1, 0, 7, 8, 2], pytest.approx(0.5 * 4 + 0.25), 0)
    assert draft_of(forks, [7, 8], LIMITS._replace(min_prob=0.6)).tokens == []
    assert draft_of(forks, [8], LIMITS).tokens == draft_of(forks, [0, 0], LIMITS).tokens == draft_of(forks, [], LIMITS).tokens == []


def make(**options) -> SuffixDrafts:
    return SuffixDrafts(SpeculativeConfig(method="suffix", num_speculative_tokens=4, **options), max_num_seqs=4)


def step(*entries: tuple[Request, int]) -> Schedule:
    n, none = len(entries), np.zeros((0, 3), np.int32)
    ones, zeros = np.ones(n, np.int32), np.zeros(n, np.int32)
    rows = np.array([row for _, row in entries], np.intp)
    requests = [request for request, _ in entries]
    return Schedule(0, requests, rows, ones, zeros, zeros, np.ones(n, bool), zeros.astype(np.int64), none, n, n, 1)


def request(name: str, tokens: list[int], prompt: int, salt: str | None = None) -> Request:
    made = Request(name, tokens[:prompt], SamplingParams(), cache_salt=salt)
    made.token_ids = list(tokens)
    return made


def end(drafts: SuffixDrafts, one: Request) -> None:
    one.status = RequestStatus.FINISHED
    drafts.propose(step((one, 0)), np.zeros((4, 4), np.int32))


def drafts_of(drafts: SuffixDrafts, one: Request) -> list[int]:
    proposed, one.row = np.full((4, 4), 99, np.int32), 2
    drafts.propose(step((one, 2)), proposed)
    assert (np.delete(proposed, 2, 0) == 99).all()
    return [token for token in proposed[2].tolist() if token != NO_DRAFT]


def test_outputs_of_earlier_requests_are_drafted_from_by_salt():
    drafts = make()
    end(drafts, request("a", [1, 2, 10, 11, 12, 13, 14], 2))
    end(drafts, request("b", [1, 2, 20, 21, 22, 23], 2, "secret"))
    assert drafts_of(drafts, request("c", [5, 10, 11], 1)) == [12, 13]
    assert drafts_of(drafts, request("d", [5, 10, 11], 1, "secret")) == [], "another salt's"
    assert drafts_of(drafts, request("e", [5, 20, 21], 1, "secret")) == [22, 23]
    assert drafts_of(drafts, request("f", [1, 2], 1)) == [], "a prompt"
    own = make(suffix_decoding_max_cached_requests=0)
    end(own, request("a", [1, 2, 10, 11, 12, 13, 14], 2))
    assert not own.cached and not own.of_salt and drafts_of(own, request("c", [5, 10, 11], 1)) == []
    assert drafts_of(own, request("g", [3, 4, 5, 6, 3, 4, 5], 2)) == [6, 3, 4], "its own tokens, prompt and output"


def test_the_least_recently_used_outputs_leave_and_nothing_of_them_stays():
    drafts = make(suffix_decoding_max_cached_requests=3)
    for i in range(3):
        end(drafts, request(str(i), [0, *range(10 * i + 10, 10 * i + 17)], 1, f"salt {i % 2}"))
    assert drafts_of(drafts, request("a", [10, 11], 1, "salt 0")) == [12, 13], "the oldest is used again"
    end(drafts, request("3", [0, *range(40, 47)], 1, "salt 1"))
    assert [drafts_of(drafts, request("b", [first, first + 1], 1, salt)) for first, salt in ((10, "salt 0"), (20, "salt 1"))] == [
        [12, 13],
        [],
    ]
    for i in range(4, 40):
        end(drafts, request(str(i), [0, *range(10 * i + 10, 10 * i + 17)], 1, "salt 9"))
    (index,) = drafts.of_salt.values()
    assert len(drafts.cached) == len(index.texts) == 3 and index.num_tokens == 21
    assert sum(map(len, index._places.values())) == 3 * 6, "an entry for each pair of tokens"


def test_a_row_with_a_new_owner_begins_anew():
    drafts = make()
    assert drafts_of(drafts, request("a", [3, 4, 5, 6, 3, 4, 5], 2)) == [6, 3, 4]
    assert drafts_of(drafts, request("b", [9, 3, 4, 5], 2)) == []
    grown = request("c", [3, 4, 5, 6], 2)
    assert drafts_of(drafts, grown) == []
    for token, expected in zip([3, 4, 5], [[], [5, 6], [6, 3, 4]], strict=True):
        grown.token_ids.append(token)
        assert drafts_of(drafts, grown) == expected


def test_occurrences_of_a_pair_are_bounded():
    index = SuffixIndex()
    index.extend(0, list(itertools.islice(itertools.cycle([1, 2]), 500)))
    assert max(map(len, index._places.values())) == MAX_OCCURRENCES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix_decoding_max_tree_depth": 1}, r"suffix_decoding_max_tree_depth=1 must be an integer in \[2, 256\]"),
        ({"suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests=-1 must be an integer"),
        ({"suffix_decoding_max_spec_factor": "2"}, "suffix_decoding_max_spec_factor='2' must be a number"),
        ({"suffix_decoding_min_token_prob": 1.5}, r"suffix_decoding_min_token_prob=1.5 must be a number in \[0, 1\]"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max is of method='ngram', and method is 'suffix'"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 9}, "suffix_decoding_max_tree_depth is of method='suffix'"),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.make({"method": "suffix", "num_speculative_tokens": 2, **fields})
