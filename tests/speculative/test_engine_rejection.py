"""Rejection sampling in the engine: what it writes has the model's own distribution, whatever is drafted."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jaxserve import BucketPlan, SamplingParams
from jaxserve.speculative import rejection
from tests import dummy
from tests.test_sampling import chi_square_p

VOCAB, LENGTH = 32, 3
CONFIG = replace(dummy.CONFIG, vocab_size=VOCAB)
PLAN = BucketPlan(mixed=((dummy.TOKENS, dummy.SEQS),), head_rows=(dummy.TOKENS,))
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False, "acceptance": "rejection"}
FEW = [5, 9, 17, 30]  # the only tokens that outputs have
PROMPT = [5, 9, 17, 5, 9, 30, 17, 9, 5, 9]
PARAMS = {"temperature": 1.3, "allowed_token_ids": FEW, "frequency_penalty": 0.4, "max_tokens": LENGTH + 1, "ignore_eos": True}
REQUESTS, SAMPLES = 25, 60


def counts(engine) -> np.ndarray:
    """How often each sequence of LENGTH tokens of FEW began an output."""
    outputs: dict[str, list[int]] = {}
    for i in range(REQUESTS):
        for request in engine.add_request(str(i), PROMPT, SamplingParams(seed=i, n=SAMPLES, **PARAMS)):
            outputs[request.request_id] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request.request_id] += output.new_token_ids
    place = {token: i for i, token in enumerate(FEW)}
    found = np.zeros((len(FEW),) * LENGTH)
    for tokens in outputs.values():
        found[tuple(place[token] for token in tokens[:LENGTH])] += 1
    return found.reshape(-1)


def distribution() -> np.ndarray:
    """Of those sequences, by the module's own forward in one piece."""
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, p in probs.items():
            x = dummy.plain_logprobs(PROMPT + list(prefix), config=CONFIG)[-1, FEW]
            x = x - PARAMS["frequency_penalty"] * np.array([prefix.count(token) for token in FEW])
            q = np.exp((x - x.max()) / PARAMS["temperature"])
            longer |= {(*prefix, token): p * share for token, share in zip(FEW, q / q.sum(), strict=True)}
        probs = longer
    return np.array([probs[sequence] for sequence in itertools.product(FEW, repeat=LENGTH)])


@pytest.mark.parametrize("rule", ["right", "rejected: from the target", "every draft stands"])
def test_outputs_are_distributed_as_the_models_own(rule, monkeypatch):
    if rule == "rejected: from the target":
        monkeypatch.setattr(rejection, "_residual", lambda weights, proposed: weights)
    elif rule == "every draft stands":
        monkeypatch.setattr(rejection, "_stands", lambda weight, proposed, at: weight > 0)
    engine = dummy.make_engine(dummy.dummy_model(config=CONFIG), compile_anew="heads", bucket_plan=PLAN, speculative_config=NGRAM)
    p = chi_square_p(counts(engine), distribution() * REQUESTS * SAMPLES)
    assert (p > 1e-3) if rule == "right" else (p < 1e-6)
    assert 0 < engine.stats.num_accepted_tokens <= engine.stats.num_draft_tokens
    assert rule != "right" or engine.stats.num_accepted_tokens < 0.9 * engine.stats.num_draft_tokens
