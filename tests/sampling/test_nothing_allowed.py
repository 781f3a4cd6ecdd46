"""What the host says that a request's parameters leave, against what the device's masks leave of equal logits."""

import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.request import Request
from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling import sampler
from jaxserve.sampling.nothing_allowed import NothingAllowedError, check_something, why_nothing
from jaxserve.sampling_params import SamplingParams
from tests.sampling.test_logit_edits import run

V = 24


def request_of(prompt, output, stop_ids, eos=(), **params) -> Request:
    given = {"stop_token_ids": stop_ids, "max_tokens": 20} | params
    request = Request("r", prompt, SamplingParams(**given), frozenset(eos))
    request.token_ids += output
    return request


def left_by_device(requests: list[Request]) -> np.ndarray:
    """bool[R, V]: tokens whose logit is finite behind min_tokens, allowed ids and bad words."""
    asks = [(r.params, r.prompt_token_ids, r.output_token_ids, 0) for r in requests]
    edited = run(np.zeros((len(requests), V), np.float32), asks, np.arange(len(requests)), history_len=32)[1]
    packed = np.zeros((len(requests), sampling_rows.NUM_COLUMNS), np.int32)
    for i, r in enumerate(requests):
        held = {"suppress_ids": r.stop_ids, "num_prompt_tokens": r.num_prompt_tokens}
        sampling_rows.write_row(packed, i, r.params, seed=0, sample_index=0, **held)
        packed[i, sampling_rows.POSITION] += r.num_output_tokens
    processed = sampler.process_logits(jnp.asarray(edited), sampler.unpack_rows(jnp.asarray(packed)))
    return np.isfinite(np.asarray(processed))


def left_of_many(requests: list[Request]) -> np.ndarray:
    """The same in batches of one shape."""
    padded = requests + requests[:1] * (-len(requests) % 20)
    return np.concatenate([left_by_device(padded[i : i + 20]) for i in range(0, len(padded), 20)])[: len(requests)]


def random_request(rng: np.random.Generator) -> Request:
    def few(most: int) -> list[int]:
        return rng.integers(0, 5, rng.integers(1, most + 1)).tolist()

    params = {}
    if rng.random() < 0.8:
        params["allowed_token_ids"] = few(3)
    if rng.random() < 0.8:
        params["bad_words_token_ids"] = [few(3) for _ in range(4)]
    if rng.random() < 0.5:
        params["min_tokens"] = int(rng.integers(1, 4))
    return request_of(few(3), few(4)[: rng.integers(0, 5)], few(3), **params)


def without(request: Request, name: str) -> Request:
    changed = {"bad_words": {"bad_words_token_ids": None}, "min_tokens": {"min_tokens": 0}}.get(name, {name: None})
    params = request.params.with_(**changed)
    other = Request("r", request.prompt_token_ids, params, frozenset())
    other.token_ids += request.output_token_ids
    return other


def test_it_says_what_the_device_does():
    rng = np.random.default_rng(0)
    requests = [random_request(rng) for _ in range(320)]
    changed, expected = [], []  # requests without a parameter that is named, and the ids that may then follow at least
    for request, left in zip(requests, left_of_many(requests), strict=True):
        error = why_nothing(request, V)
        assert (error is not None) == (not left.any()), request
        if error is None:
            check_something(request, V)
            continue
        with pytest.raises(NothingAllowedError, match="every token"):
            check_something(request, V)
        names, num_output, first, ids = error.args
        assert num_output == request.num_output_tokens
        changed += [without(request, name) for name in names if first in names]
        expected += [ids if name == first else [] for name in names if first in names]
    assert 40 < len(changed) < 400
    for left, ids in zip(left_of_many(changed), expected, strict=True):
        assert left.any() and np.flatnonzero(left)[: len(ids)].tolist() == ids


def test_an_eos_that_the_vocabulary_has_not_forbids_nothing():
    """As a generation_config.json can name them: the device drops them."""
    requests = [request_of([1], [], [], {3, V, 999, -1}, min_tokens=2, allowed_token_ids=only) for only in ([3], [3, V - 1])]
    left = left_of_many(requests)
    assert [np.flatnonzero(row).tolist() for row in left] == [[], [V - 1]]
    errors = [why_nothing(request, V) for request in requests]
    assert errors[0] is not None and errors[0].names == ("allowed_token_ids", "min_tokens") and errors[1] is None
    assert why_nothing(request_of([1], [], [], {V}, min_tokens=2), V) is None


def test_a_mask_counts_as_the_form():
    mask = np.zeros(1, np.int32)
    mask[0] = 1 << 7 | 1 << 9
    error = why_nothing(request_of([1], [], [], allowed_token_ids=[3, 4]), V, mask)
    assert error is not None and error.names == ("allowed_token_ids", "structured_outputs")
    assert str(error).endswith("Without allowed_token_ids token ids 7, 9 could follow: leave it out, or change it")
    assert why_nothing(request_of([1], [], [], allowed_token_ids=[3, 9]), V, mask) is None
    assert why_nothing(request_of([1], [], []), V, mask) is None


def test_three_of_which_no_two_agree():
    request = request_of([1], [2], [3], allowed_token_ids=[3, 5], bad_words_token_ids=[[5], [2, 3]], min_tokens=4)
    error = why_nothing(request, V)
    assert error is not None and error.names == ("allowed_token_ids", "bad_words")
    mask = np.full(1, 1 << 5, np.int32)
    error = why_nothing(request_of([1], [], [], allowed_token_ids=[3], bad_words_token_ids=[[5], [3]]), V, mask)
    assert error is not None and error.names == ("allowed_token_ids", "bad_words", "structured_outputs")


def test_it_can_be_sent_to_another_process():
    error = why_nothing(request_of([1], [2, 2], [], allowed_token_ids=[3], bad_words_token_ids=[[3]]), V)
    assert error is not None
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is NothingAllowedError and str(other) == str(error) and other.names == error.names
    assert "after 2 tokens of the output" in str(error)
