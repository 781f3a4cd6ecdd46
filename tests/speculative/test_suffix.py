"""Drafts by suffix decoding, against a search through everything that was said; what is kept, for whom and how long."""

import itertools
from collections import Counter

import numpy as np
import pytest

from jaxserve.request import Request, RequestStatus
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.schedule import Schedule
from jaxserve.scheduling.sequence_rows import SequenceRows
from jaxserve.speculative import suffix, text_index
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.proposer import NO_DRAFT
from jaxserve.speculative.suffix import Limits, SuffixDrafts
from jaxserve.speculative.text_index import MAX_OCCURRENCES, TextIndex
from kernels.cpu import library, suffix_search

SEQS, LENGTH = 4, 120


def use_numpy(monkeypatch) -> None:
    monkeypatch.setattr(suffix_search, "make", lambda texts: None)


@pytest.fixture(autouse=True, params=["C++", "numpy"])
def searched_by(request, monkeypatch) -> str:
    if request.param == "numpy":
        use_numpy(monkeypatch)
    elif library.find() is None:
        pytest.skip("needs the library of kernels for CPUs (a C++ compiler; kernels/cpu/build.py)")
    return request.param


class Host:
    """What drafts, and the rows of a scheduler in which requests stand."""

    def __init__(self, drafts: SuffixDrafts):
        self.drafts = drafts
        self.rows = SequenceRows(SEQS, 1000, 4)
        self.owners: dict[Request, tuple[int, int]] = {}  # the last row of each, and its generation there
        self.known: dict[Request, int] = {}

    def step(self, *entries: tuple[Request, int], told: bool = True) -> np.ndarray:
        """A step that sampled for these requests, each with the row that it has, or had. told: whether their tokens are those of
        the step; otherwise some were forced."""
        new: list[list[int]] = []
        for one, row in entries:
            if one.row == row and self.owners.get(one, (-1, 0))[0] != row:
                self.rows.generation[row] += 1
                self.owners[one] = row, int(self.rows.generation[row])
                self.known[one] = len(one.token_ids) - 1
            elif one.row != row and self.owners.get(one) == (row, self.rows.generation[row]):
                self.rows.generation[row] += 1  # it has left
            if one.row == row:
                self.rows.num_known[row], self.rows._requests[row] = len(one.token_ids), one
            new.append(one.token_ids[self.known.get(one, 0) :])
            self.known[one] = len(one.token_ids)
        n, none = len(entries), np.zeros((0, 3), np.int32)
        ones, zeros = np.ones(n, np.int32), np.zeros(n, np.int32)
        rows = np.array([row for _, row in entries], np.intp)
        generations = np.array([self.owners.get(one, (0, -9))[1] for one, _ in entries], np.int64)
        requests = [request for request, _ in entries]
        schedule = Schedule(0, requests, rows, ones, zeros, zeros, np.ones(n, bool), generations, none, n, n, 1)
        counts = np.array([len(ids) for ids in new], np.int32)
        sampled = np.full((n, max(counts, default=0) + 1), 7, np.int32)
        for i, ids in enumerate(new):
            sampled[i, : len(ids)] = ids
        proposed = np.full((SEQS, self.drafts.limits.most), 99, np.int32)
        if not told or (counts == 1).all():
            self.drafts.propose(schedule, self.rows, sampled[:, 0], None, proposed)
        else:
            self.drafts.propose(schedule, self.rows, sampled, counts, proposed)
        return proposed


def make(max_model_len: int = LENGTH, most: int = 4, **options) -> Host:
    return Host(SuffixDrafts(SpeculativeConfig(method="suffix", num_speculative_tokens=most, **options), SEQS, max_model_len))


def request(name: str, tokens: list[int], prompt: int, salt: str | None = None) -> Request:
    made = Request(name, tokens[:prompt], SamplingParams(), cache_salt=salt)
    made.token_ids = list(tokens)
    return made


def end(host: Host, one: Request) -> None:
    one.status, row, one.row = RequestStatus.FINISHED, max(one.row, 0), -1
    host.step((one, row))


def drafts_of(host: Host, one: Request) -> list[int]:
    one.row = 2
    proposed = host.step((one, 2))
    assert (np.delete(proposed, 2, 0) == 99).all()
    return [token for token in proposed[2].tolist() if token != NO_DRAFT]


def matches(text: list[int], tokens: list[int], own: bool, depth: int) -> list[tuple[int, int]]:
    """(tokens that agree before it, where it goes on) of each place, the last one first."""
    found = []
    for place in range(len(text) - own, 1, -1):
        if text[place - 2 : place] != tokens[-2:]:
            continue
        pairs = zip(text[:place][::-1], tokens[::-1], strict=False)
        length = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if length >= 2:
            found.append((min(length, depth), place))
    return found


def best_draft(texts: list[list[int]], tokens: list[int], own: bool, limits: Limits) -> tuple[list[int], float]:
    """The draft by these texts, the most recent first, and the sum of its tokens' probabilities: the rule, word by word."""
    found = [(length, text, place) for text in texts for length, place in matches(text, tokens, own, limits.depth)]
    assert len(found) <= MAX_OCCURRENCES, "the search would look at fewer"
    longest = max((length for length, _, _ in found), default=0)
    texts = [text[place:] * limits.most if own else text[place:] for length, text, place in found if length == longest]
    num, draft, score = len(texts), [], 0.0
    for j in range(min(limits.most, limits.depth - 1, int(limits.factor * longest))):
        counts = Counter(text[j] for text in texts if j < len(text))
        if not counts:
            break
        token, count = max(counts.items(), key=lambda item: item[1])  # of equal counts the first that was counted
        if count / num < limits.min_prob:
            break
        draft.append(token)
        score += count / num
        texts = [text for text in texts if j < len(text) and text[j] == token]
    return draft, score


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_those_of_the_rule(seed):
    """Rows that grow by none, one or several tokens, end and are taken over, and outputs of two salts, at every step."""
    rng = np.random.default_rng(seed)
    options = {"suffix_decoding_max_spec_factor": rng.choice([0.5, 1, 3]), "suffix_decoding_min_token_prob": rng.choice([0, 0.4])}
    drafts = make(most=5, suffix_decoding_max_tree_depth=100, **options)
    outputs: dict[str, list[list[int]]] = {"a": [], "b": []}
    running: list[Request] = []
    num_drafts: Counter[str] = Counter()
    phrases = [rng.integers(0, 200, rng.integers(4, 9)).tolist() for _ in range(40)]
    texts: dict[Request, list[int]] = {}
    for number in range(60):
        for row in sorted({*range(SEQS)} - {one.row for one in running}):
            some = [phrases[i] for i in rng.choice(len(phrases), 4)]
            text = [token for _ in range(20) for token in some[rng.integers(4)][: rng.integers(3, 9)]][:36]
            running.append(request(str(number), text[: rng.integers(1, 15)], 1, "ab"[rng.integers(2)]))
            running[-1].row, texts[running[-1]] = row, text
        ended = []
        for one in running:
            n = len(one.token_ids)
            one.token_ids += texts[one][n : n + rng.choice([0, 1, 1, 1, 2, 5])]
            if len(one.token_ids) == 36:
                ended.append((one, one.row))
                one.status, one.row = RequestStatus.FINISHED, -1
        running = [one for one in running if one.row >= 0]
        entries = [*ended, *((one, one.row) for one in running)]
        entries = [entries[i] for i in rng.permutation(len(entries))]
        proposed = drafts.step(*entries, told=rng.random() < 0.8)
        for one, _ in entries:
            if one.finished:
                outputs[str(one.cache_salt)].insert(0, one.output_token_ids)
        for one in running:
            own = best_draft([one.token_ids], one.token_ids, True, drafts.drafts.limits)
            other = best_draft(outputs[str(one.cache_salt)], one.token_ids, False, drafts.drafts.limits)
            expected = other if other[1] > own[1] + 1e-9 else own
            found = [token for token in proposed[one.row].tolist() if token != NO_DRAFT]
            assert found == expected[0], (number, one.row)
            num_drafts.update(["own" if expected is own else "other"] if found else [])
    assert num_drafts["own"] > 30 and num_drafts["other"] > 1


def test_what_repeats_goes_on_and_what_is_seldom_does_not():
    period = [1, 2, 3] * 4
    assert drafts_of(make(most=5), request("a", period, 2)) == [1, 2, 3, 1, 2], "a match that overlaps the end goes on in cycles"
    assert drafts_of(make(suffix_decoding_max_spec_factor=0.25), request("a", period, 2)) == [1, 2], "nine tokens match"
    assert drafts_of(make(suffix_decoding_max_tree_depth=3), request("a", period, 2)) == [1, 2], "a match of one token, two drafts"
    deep = [1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 8, 2, 3, 4, 6, 1, 2, 3, 4]
    assert drafts_of(make(suffix_decoding_max_tree_depth=3), request("a", deep, 2)) == [6, 1], "no match is longer than the depth"
    assert drafts_of(make(suffix_decoding_max_tree_depth=4), request("a", deep, 2)) == [5, 9, 2], "the longest alone"
    forks = [7, 8, 1, 0, 7, 8, 1, 0, 7, 8, 2, 0, 7, 8, 3, 5, 7, 8]
    options = {"most": 5, "suffix_decoding_max_spec_factor": 9}
    assert drafts_of(make(**options), request("a", forks, 2)) == [1, 0, 7, 8, 2]
    assert drafts_of(make(**options, suffix_decoding_min_token_prob=0.6), request("a", forks, 2)) == []
    for tokens in ([8], [0, 0], [7, 8]):
        assert drafts_of(make(), request("a", tokens, 1)) == []


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
    assert not own.drafts.outputs.kept and drafts_of(own, request("c", [5, 10, 11], 1)) == []
    assert drafts_of(own, request("g", [3, 4, 5, 6, 3, 4, 5], 2)) == [6, 3, 4], "its own tokens, prompt and output"


@pytest.mark.parametrize("search", ["numpy", "C++"])
def test_pairs_whose_hashes_are_alike_are_told_apart(search, monkeypatch):
    """All of them in one chain: other pairs, another salt's outputs and another request's tokens."""
    if search == "numpy":
        use_numpy(monkeypatch)
        monkeypatch.setattr(TextIndex, "chains", lambda self, places, groups: np.zeros(len(places), np.intp))
    elif library.find() is None:
        pytest.skip("needs the library of kernels for CPUs")
    else:
        for module in (suffix, text_index):
            monkeypatch.setattr(module, "SHIFT", np.uint64(63))  # two chains
    drafts = make()
    end(drafts, request("a", [1, 10, 11, 12, 13, 14], 1))
    assert drafts_of(drafts, request("b", [5, 10, 11], 1)) == [12, 13]
    assert drafts_of(drafts, request("c", [5, 10, 11], 1, "secret")) == []
    running, other = request("d", [20, 21, 22, 23], 1), request("e", [20, 21], 1)
    running.row, other.row = 0, 1
    assert (drafts.step((running, 0), (other, 1))[:2] == NO_DRAFT).all()


def test_a_match_in_an_output_that_was_replaced_is_not_followed():
    """Another salt's output takes the place of one that a running request follows."""
    drafts = make(max_model_len=12, suffix_decoding_max_cached_requests=1)
    end(drafts, request("a", [0, 10, 11, 12, 13, 14, 15], 1))
    follower = request("b", [5, 10, 11], 1)
    assert drafts_of(drafts, follower) == [12, 13]
    for name in "cd":  # the first has the rest of the room
        end(drafts, request(name, [0, 90, 91, 12, 80, 81, 82], 1, "secret"))
    follower.token_ids.append(12)
    assert drafts_of(drafts, follower) == []


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
    outputs = drafts.drafts.outputs
    assert len(outputs.kept) == 3 and np.count_nonzero(drafts.drafts.index.tokens[outputs.begin :]) == 21
    assert set(outputs._groups) == set(outputs._salts.values()) == {"salt 9", "salt 1"}, "of outputs, and of the request in a row"


def test_outputs_that_are_too_many_tokens_leave_in_turn(monkeypatch):
    monkeypatch.setattr(suffix, "OUTPUT_TOKENS", 50)
    drafts = make(max_model_len=40)
    texts = [list(range(100 * i, 100 * i + 15)) for i in range(1, 12)]
    for i, text in enumerate(texts):
        end(drafts, request(str(i), [0, *text], 1))
        known = [drafts_of(drafts, request("a", text[:2], 1)) == text[2:4] for text in texts[: i + 1]]
        assert known == [False] * (i + 1 - min(i + 1, 3)) + [True] * min(i + 1, 3)
    end(drafts, request("long", [0, *range(9000, 9070)], 1))
    assert drafts_of(drafts, request("a", [9000, 9001], 1)) == [] and len(drafts.drafts.outputs.kept) == 1
    assert drafts_of(drafts, request("a", [9066, 9067], 1)) == [9068, 9069], "its end"


def test_a_row_with_a_new_owner_begins_anew():
    drafts = make()
    assert drafts_of(drafts, request("a", [3, 4, 5, 6, 3, 4, 5], 2)) == [6, 3, 4]
    assert drafts_of(drafts, request("b", [9, 3, 4, 5], 2)) == []
    grown = request("c", [3, 4, 5, 6], 2)
    assert drafts_of(drafts, grown) == []
    for token, expected in zip([3, 4, 5], [[], [5, 6], [6, 3, 4]], strict=True):
        grown.token_ids.append(token)
        assert drafts_of(drafts, grown) == expected
    grown.row = -1
    drafts.step((grown, 2))
    assert not drafts.drafts.index.tokens.any(), "it was preempted"


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
