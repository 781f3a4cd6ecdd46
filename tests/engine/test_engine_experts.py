"""A mixture of experts in the engine: a request's answer does not depend on who shares its steps, nor on their padding.

Tokens of a batch meet in the experts' tiles, and which tiles there are depends on all of them; each token's bits must not.
"""

import dataclasses

import pytest

from jaxserve.execution.compilation import compile_counts
from tests.dummy import CONFIG, ONE_BUCKET, differences, dummy_model, make_engine, serve, serve_alone
from tests.workload import requests

OPTIMISED = True
SPARSE = dataclasses.replace(
    CONFIG,
    architecture="Qwen3MoeForCausalLM",
    num_layers=3,
    sliding_windows=(None, 6, None),
    sparse_layers=(0, 2),
    num_experts=12,
    num_experts_per_token=3,
    moe_intermediate_size=24,
    norm_topk_prob=True,
)


@pytest.mark.slow  # of experts make test serves a golden of transformers, together and from few pages
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_together_as_alone_to_the_last_bit(dtype):
    """Mixed steps, chunks, preemption and prefix hits in one bucket; nothing compiles once its programs are."""
    model, asks = dummy_model(dtype, SPARSE), requests(True)[:9]
    expected = serve_alone(model, asks, bucket_plan=ONE_BUCKET)
    engine = make_engine(model, bucket_plan=ONE_BUCKET, pool_pages=20)
    engine.runner.warm_up()
    before = compile_counts().programs
    run = serve(engine, asks)
    assert differences(run.answers, expected) == []
    assert run.num_mixed_steps and run.num_chunks and run.stats.num_preemptions and run.stats.num_hit_tokens
    assert len({tuple(answer.tokens) for answer in expected.values()}) > len(asks) / 2, "answers that say nothing"
    assert compile_counts().programs - before <= 1  # the tests' own, which spoils unowned pages
