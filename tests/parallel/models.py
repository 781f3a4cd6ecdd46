"""Small models of every kind that is cut in a way of its own, and runs of them on any number of devices."""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxserve import EngineConfig, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.models import Decoder
from tests.dummy import CONFIG, ONE_BUCKET, SETTINGS, VOCAB, Answer, Ask

MODELS = {
    "gqa": CONFIG,
    "odd_groups_tied": dataclasses.replace(CONFIG, num_heads=6, tie_word_embeddings=True),  # of three query heads
    "three_kv_heads": dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=3, qk_norm=False),
    "mqa_biases": dataclasses.replace(CONFIG, num_kv_heads=1, qkv_bias=True, o_bias=True, mlp_bias=True),
    "experts": dataclasses.replace(
        CONFIG, sparse_layers=(0, 1), num_experts=6, num_experts_per_token=2, moe_intermediate_size=20, norm_topk_prob=True
    ),
    "experts_and_dense": dataclasses.replace(
        CONFIG, sparse_layers=(1,), num_experts=5, num_experts_per_token=4, moe_intermediate_size=20, vocab_size=300
    ),
}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=2)
PROMPTS = [np.random.default_rng(3).integers(1, VOCAB, n).tolist() for n in (3, 17, 30, 8)]


def engine_of(model: Decoder, tp: int, mesh: Mesh | None = None, **settings: Any) -> Engine:
    settings = {**SETTINGS, "num_pages": 64, "bucket_plan": ONE_BUCKET, "tensor_parallel_size": tp, **settings}
    return Engine(model, EngineConfig(**settings), eos_token_ids=(), mesh=mesh)


def answers(engine: Engine, asks: list[Ask]) -> dict[str, Answer]:
    """What the engine says to all of them together."""
    found: dict[str, Answer] = {}
    for i, ask in enumerate(asks):
        first = ask.params.prompt_logprobs is not None and 1 or None
        added = engine.add_request(str(i), ask.prompt, ask.params, priority=ask.priority, score_from=first)
        found |= {r.request_id: Answer() for r in added}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request.request_id].take(output)
    return found


def assert_like_one_device(found: dict[str, Answer], expected: dict[str, Answer], tolerance: float = 2e-5) -> None:
    """Equal tokens, as far as the two likeliest were further apart than 1e-4; log-probabilities and ranks within the tolerance."""
    assert found.keys() == expected.keys()
    for name, answer in found.items():
        one = expected[name]
        entries = [*answer.logprobs, *(entry for entry in answer.prompt_logprobs or () if entry)]
        theirs = [*one.logprobs, *(entry for entry in one.prompt_logprobs or () if entry)]
        if answer.tokens != one.tokens:
            first = next(i for i, (a, b) in enumerate(zip(answer.tokens, one.tokens, strict=True)) if a != b)
            a, b = answer.tokens[first], one.tokens[first]
            assert abs(one.logprobs[first][a][0] - one.logprobs[first][b][0]) < 1e-4, f"request {name}: token {first}"
            continue
        assert len(entries) == len(theirs)
        for mine, other in zip(entries, theirs, strict=True):
            assert mine.keys() == other.keys()
            for token, (logprob, rank) in mine.items():
                assert abs(logprob - other[token][0]) <= tolerance and rank == other[token][1]
