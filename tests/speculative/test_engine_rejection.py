"""Rejection sampling in the engine: what it writes has the model's own distribution, whatever is drafted, and as many drafts stand
as can."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxserve import BucketPlan, SamplingParams
from jaxserve.execution import programs
from jaxserve.speculative import rejection, verify
from tests import dummy
from tests.sampling.test_sampling import chi_square_p
from tests.speculative.proposers import Markov

VOCAB, LENGTH = 32, 3
CONFIG = replace(dummy.CONFIG, vocab_size=VOCAB)
SAMPLES = 24  # of a request: they run together, and nobody else
TOKENS = 4 * SAMPLES  # of a step: three drafts of each
PLAN = BucketPlan(mixed=((TOKENS, SAMPLES),), head_rows=(TOKENS,))
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False, "acceptance": "rejection"}
SUFFIX = {
    "method": "suffix",
    "num_speculative_tokens": 3,
    "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.0,
}
SUFFIX |= {"adaptive": False, "acceptance": "rejection"}
FEW = [5, 9, 17, 30]  # the only tokens that outputs have
PROMPT = [5, 9, 17, 5, 9, 30, 17, 9, 5, 9]
PARAMS = {"temperature": 1.3, "allowed_token_ids": FEW, "frequency_penalty": 0.4, "max_tokens": LENGTH + 1, "ignore_eos": True}
REQUESTS, FEWER = 63, 25  # the fewer where outputs are off by far

FORBIDDEN = 3
MATRIX = np.zeros((VOCAB, VOCAB))  # what Markov draws with: half of it the model's sort of tokens, some that are forbidden
MATRIX[:, FEW] = 0.85 * np.random.default_rng(5).dirichlet([1.5] * len(FEW), VOCAB)
MATRIX[:, FORBIDDEN] = 0.15


def counts(engine, num_requests: int = REQUESTS) -> np.ndarray:
    """How often each sequence of LENGTH tokens of FEW began an output."""
    place = {token: i for i, token in enumerate(FEW)}
    found = np.zeros((len(FEW),) * LENGTH)
    for i in range(num_requests):
        requests = engine.add_request(str(i), PROMPT, SamplingParams(seed=i, n=SAMPLES, **PARAMS))
        while engine.has_unfinished_requests():
            engine.step()
        for request in requests:
            found[tuple(place[token] for token in request.token_ids[len(PROMPT) :][:LENGTH])] += 1
    return found.reshape(-1)


@functools.cache
def next_probs(prefix: tuple[int, ...]) -> np.ndarray:
    """f64[VOCAB]: of the token behind `prefix`, by the module's own forward in one piece."""
    x = dummy.plain_logprobs(PROMPT + list(prefix), config=CONFIG)[-1, FEW]
    x = x - PARAMS["frequency_penalty"] * np.array([prefix.count(token) for token in FEW])
    q, probs = np.exp((x - x.max()) / PARAMS["temperature"]), np.zeros(VOCAB)
    probs[FEW] = q / q.sum()
    return probs


def distribution() -> np.ndarray:
    """Of those sequences."""

    def prob(sequence: tuple[int, ...]) -> float:
        return float(np.prod([next_probs(sequence[:i])[token] for i, token in enumerate(sequence)]))

    return np.array([prob(sequence) for sequence in itertools.product(FEW, repeat=LENGTH)])


def acceptances() -> tuple[float, float]:
    """The probabilities that of one output's drafts one stands at the first place, and one at the second, where each is accepted as
    often as any rule can. Three tokens follow the first: two drafts for them, and if the first is refused one draft more."""
    first = second = 0.0
    for one in FEW:
        p, q = next_probs((one,)), MATRIX[one]
        again = sum(max(p[two] - q[two], 0) * np.minimum(next_probs((one, two)), MATRIX[two]).sum() for two in FEW)
        both = sum(min(p[two], q[two]) * np.minimum(next_probs((one, two)), MATRIX[two]).sum() for two in FEW)
        first += next_probs(())[one] * (np.minimum(p, q).sum() + again)
        second += next_probs(())[one] * both
    return first, second


def of_first_drafts(is_draft, seq_rows, probs, right=verify.probs_after):
    return right(is_draft, seq_rows, jnp.broadcast_to(probs[:, :1], probs.shape))


def as_point_masses(*args, proposal, right=rejection.draw_token, **options):
    return right(*args, proposal=None, **options)


WRONG: dict[str, tuple[Any, str, Callable]] = {
    "every draft stands": (rejection, "_stands", lambda weight, proposed, at: weight > 0),
    "rejected: from the target": (rejection, "_residual", lambda weights, proposed, shard: weights),
    "another draft's proposal": (verify, "probs_after", of_first_drafts),
    "the proposal is not looked at": (rejection, "draw_token", as_point_masses),  # distributed alike, but fewer stand
}


def make_engine(rule: str, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    if rule in WRONG:
        monkeypatch.setattr(*WRONG[rule])
    model = dummy.dummy_model(config=CONFIG)
    settings = {"max_num_seqs": SAMPLES, "max_num_batched_tokens": TOKENS, "bucket_plan": PLAN}
    return dummy.make_engine(model, compile_anew="heads", speculative_config=speculative, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "method"), [("right", "ngram"), ("right", "suffix"), *((rule, "ngram") for rule in list(WRONG)[:2])]
)
def test_outputs_are_distributed_as_the_models_own(rule, method, monkeypatch):
    engine = make_engine(rule, {"ngram": NGRAM, "suffix": SUFFIX}[method], monkeypatch)
    p = chi_square_p(counts(engine), distribution() * REQUESTS * SAMPLES)
    assert (p > 1e-3) if rule == "right" else (p < 1e-6)
    assert 0 < engine.stats.num_accepted_tokens <= engine.stats.num_draft_tokens
    assert rule != "right" or engine.stats.num_accepted_tokens < 0.9 * engine.stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["right", *list(WRONG)[1:]])
def test_drafts_that_are_drawn(rule, monkeypatch, record_property):
    """The same of a proposer that draws: what it drew with travels with its drafts, or outputs or rates are others."""
    monkeypatch.setattr(programs, "make_proposer", lambda *_: Markov(2, MATRIX))
    engine = make_engine(rule, NGRAM | {"num_speculative_tokens": 2}, monkeypatch)
    num_requests = REQUESTS if rule in ("right", "another draft's proposal") else FEWER
    num_outputs = num_requests * SAMPLES
    p = chi_square_p(counts(engine, num_requests), distribution() * num_outputs)
    accepted = engine.stats.num_accepted_tokens_per_pos
    rates = [stats.binomtest(n, num_outputs, share).pvalue for n, share in zip(accepted, acceptances(), strict=True)]
    found = f"outputs p {p:.1e}; accepted {np.divide(accepted, num_outputs)} of {np.array(acceptances())}, p {np.array(rates)}"
    record_property("counted", f"drawn drafts, {rule}: {found}")
    if rule == "right":
        assert p > 1e-3 and min(rates) > 1e-3
    elif rule == "the proposal is not looked at":
        assert p > 1e-3 and max(rates) < 1e-6
    else:
        assert p < 1e-6
