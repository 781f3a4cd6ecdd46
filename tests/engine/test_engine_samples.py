"""n > 1: the samples of one prompt share its pages, with and without a prefix cache, and get what each gets alone."""

import numpy as np
import pytest

from jaxserve import Engine, SamplingParams
from jaxserve.request import RequestStatus
from tests.dummy import ONE_BUCKET, VOCAB, Ask, add, assert_empty, differences, dummy_model, make_engine, poison, serve, serve_alone
from tests.scheduler_state import ref_count

N = 4


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, n).tolist()


def params(**more) -> SamplingParams:
    return SamplingParams(**{"n": N, "temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True, **more})


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no_cache"])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 22, 60])
def test_samples_share_their_prompts_full_pages(num_prompt, caching):
    """All but the last token's page are held once, by everyone; only what is left of the prompt is computed again."""
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, enable_prefix_caching=caching)
    samples = add(engine, "x", Ask(prompt(num_prompt), params()))
    most_shared = 0
    while engine.has_unfinished_requests():
        engine.step()
        engine.scheduler.check_invariants()
        poison(engine)
        if all(s.row >= 0 for s in samples):
            pages = [s.pages for s in samples]
            shared = {page for page in pages[0] if all(page in other for other in pages)}
            assert all(ref_count(engine.pool, page) == N for page in shared)
            most_shared = max(most_shared, len(shared))
    num_full = (num_prompt - 1) // 4
    assert most_shared == num_full
    assert engine.stats.prefill_tokens == num_prompt + (N - 1) * (num_prompt - 4 * num_full)
    assert_empty(engine)


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no_cache"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"long_prefill_token_threshold": 7}, {"batching_policy": "prefill_first", "enable_chunked_prefill": True}],
    ids=str,
)
def test_samples_get_what_each_gets_alone(settings, caching):
    """In a pool that makes them give up pages which others still hold, beside other requests."""
    asks = [
        Ask(prompt(45), params(prompt_logprobs=1, logprobs=1)),
        Ask(prompt(9, 1), params(n=1, repetition_penalty=1.3), at=1),
        Ask(prompt(20, 2), params(n=3, max_tokens=20, frequency_penalty=0.5), at=2),
        Ask(prompt(45)[:30] + prompt(5, 3), params(n=2), at=4),
    ]
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, enable_prefix_caching=caching, pool_pages=26, **settings)
    run = serve(engine, asks)
    assert run.stats.num_preemptions
    assert differences(run.answers, serve_alone(dummy_model(), asks, bucket_plan=ONE_BUCKET)) == []


def step_until(engine: Engine, done) -> None:
    for _ in range(50):
        if done():
            return
        engine.step()
    raise AssertionError("it did not come to that")


def test_others_pass_samples_that_wait_for_their_prompt():
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, long_prefill_token_threshold=6, enable_prefix_caching=False)
    samples = add(engine, "x", Ask(prompt(60), params()))
    (other,) = add(engine, "y", Ask(prompt(5), params(n=1)))
    assert [s.status for s in samples[1:]] == [RequestStatus.WAITING_FOR_PROMPT] * (N - 1)
    engine.step()
    assert other.status is RequestStatus.RUNNING and engine.scheduler.num_waiting == N - 1
    step_until(engine, lambda: all(s.status is RequestStatus.RUNNING for s in samples))
    engine.abort(["x", "y"])
    engine.drain()
    engine.step()
    assert_empty(engine)


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["waiting", "in_its_prompt", "later_in_it"])
def test_the_next_sample_computes_the_prompt_if_the_first_ends_before(steps):
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, enable_prefix_caching=False)
    ask = Ask(prompt(60), params(logprobs=0))
    samples = add(engine, "x", ask)
    for _ in range(steps):
        engine.step()
    engine.finish(samples[0], "abort")
    assert [s.status is RequestStatus.WAITING_FOR_PROMPT for s in samples[1:]] == [False, True, True]
    engine.finish(samples[3], "abort")  # one that waits for another
    tokens = {s.request_id: [] for s in samples}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request.request_id] += output.new_token_ids
    alone = serve_alone(dummy_model(), [ask], bucket_plan=ONE_BUCKET)
    assert [tokens[f"x/{i}"] for i in (0, 1, 2, 3)] == [[], alone["0/1"].tokens, alone["0/2"].tokens, []]
    assert_empty(engine)
