"""A request gets the same answer whoever shares its steps, whatever the policy, chunking, preemption or prefix hits.

The same requests are served together, under every policy, and each alone. Where every step has the same shape, tokens and
log-probabilities are equal to the last bit. Where shapes differ, so do roundings: log-probabilities agree within TOLERANCE,
and a greedy token differs only where the two best were closer than that. What is right at all is said by two references that
know no engine: the module's plain causal forward, and transformers (tests/goldens).

Each run asserts that what it claims to cover did happen. Nobody's KV is NaN (tests/dummy.py).
"""

import itertools

import numpy as np
import pytest

from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.models.loading import load_model
from jaxserve.sampling.edit_rows import kinds_of
from tests.dummy import (
    ONE_BUCKET,
    SEQS,
    TOKENS,
    VOCAB,
    Answer,
    Ask,
    Run,
    differences,
    dummy_model,
    make_engine,
    plain_logprobs,
    poison,
    serve,
    serve_alone,
)
from tests.goldens.golden import HERE, load_golden
from tests.selection import chosen, slow_unless
from tests.workload import SMALL_POOL, alone, requests

OPTIMISED = True

# By how much a log-probability may depend on the shapes of the steps: logits of this model go up to 10; measured 5e-6 and 0.09.
TOLERANCE = {"float32": 5e-5, "bfloat16": 0.25}

GOLDENS = ("qwen3_tied", "qwen2", "llama", "mistral", "qwen3_moe", "qwen3_moe_tied")
POLICIES = {
    "sarathi": {},
    "sarathi_threshold": {"long_prefill_token_threshold": 7},
    "sarathi_priority": {"scheduling_policy": "priority"},
    "sarathi_whole_prompts": {"enable_chunked_prefill": False},
    "sarathi_separate_steps": {"enable_mixed_steps": False},
    "orca": {"batching_policy": "orca"},
    "orca_chunked": {"batching_policy": "orca", "enable_chunked_prefill": True},
    "prefill_first": {"batching_policy": "prefill_first"},
    "prefill_first_chunked": {"batching_policy": "prefill_first", "enable_chunked_prefill": True},
    "request_level": {"batching_policy": "request_level"},
    "request_level_chunked": {"batching_policy": "request_level", "enable_chunked_prefill": True},
}


def assert_covers(run: Run, engine: Engine, small_pool: bool) -> None:
    """The run did what its settings make possible, and nothing else."""
    policy, stats = engine.scheduler.policy, run.stats
    if not (
        engine.scheduler.hides_in_flight and small_pool and policy.reserve_full
    ):  # few fit then, and one group waits for the other
        assert (run.num_mixed_steps > 0) == policy.mixed
    assert run.num_chunks > 0 or not policy.chunked
    if not policy.chunked:  # only a preempted request may have outgrown the budget
        assert all(r.num_preemptions for s in run.schedules for r, ends in zip(s.requests, s.samples, strict=True) if not ends)
    if len(engine.pools) == 1:  # several hold more
        assert (stats.num_preemptions > 0) == (small_pool and not policy.reserve_full)
    assert stats.num_hit_tokens > 0
    runs_ahead = engine.config.engine.async_scheduling and not engine.scheduler.hides_in_flight
    assert (stats.num_discarded_rows > 0) == runs_ahead
    groups = small_pool or engine.scheduler.hides_in_flight  # no step has all requests then
    assert groups or any(s.num_seqs == SEQS for s in run.schedules)
    reasons = [answer.finish_reason for answer in run.answers.values()]
    stops = [answer.stop_reason for answer in run.answers.values() if answer.finish_reason == "stop"]
    assert "length" in reasons and None in stops and any(stops), "no request ended by length, eos or stop id"


CROSSED = list(itertools.product(POLICIES, ("async", "sync"), ("large_pool", "small_pool")))


@pytest.mark.parametrize(
    ("policy", "steps", "pool"),
    chosen(
        CROSSED,
        quick=lambda policy, *rest: rest == ("async", "small_pool"),
        in_ci=lambda policy, *rest: rest == ("sync", "large_pool") or policy == "sarathi",
    ),
)
def test_together_as_alone_to_the_last_bit(policy, steps, pool):
    settings = dict(POLICIES[policy], async_scheduling=steps == "async", bucket_plan=ONE_BUCKET)
    check_together_as_alone("float32", settings, small_pool=pool == "small_pool")


@pytest.mark.parametrize("policy, transposed", [("sarathi", True), ("prefill_first", False)])
@pytest.mark.slow
def test_together_as_alone_to_the_last_bit_in_bfloat16(policy, transposed):
    settings = dict(POLICIES[policy], bucket_plan=ONE_BUCKET)
    check_together_as_alone("bfloat16", settings, small_pool=True, transposed=transposed)


@pytest.mark.parametrize("budget, transposed", [(6, False), pytest.param(7, True, marks=pytest.mark.slow), (13, False)])
def test_chunks_of_any_size(budget, transposed):
    """Budgets below the bucket's tokens cut the same prompts elsewhere."""
    settings = {"max_num_batched_tokens": budget, "bucket_plan": ONE_BUCKET}
    check_together_as_alone("float32", settings, small_pool=True, transposed=transposed)


def check_together_as_alone(dtype: str, settings: dict, small_pool: bool, transposed: bool = False) -> None:
    model = dummy_model(dtype, transposed=transposed)
    engine = make_engine(model, **settings)
    chunked = engine.scheduler.policy.chunked
    if small_pool:
        engine = make_engine(model, pool_pages=SMALL_POOL[chunked], **settings)
    run = serve(engine, requests(chunked))
    assert differences(run.answers, alone(dtype, chunked, transposed=transposed)) == []
    assert_covers(run, engine, small_pool)


def test_twice_in_one_engine():
    """The second time, prompts are prefixes that the first left behind, and rows and pages have had other owners."""
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET)
    for _ in range(2):
        hits = engine.scheduler.stats().num_hit_tokens
        assert differences(serve(engine, requests(True)).answers, alone("float32", True)) == []
    assert engine.scheduler.stats().num_hit_tokens - hits > 2 * hits


def test_prompts_of_whole_pages_and_hits_of_every_length():
    """One prompt of five pages, and its beginnings and continuations around each page's end."""
    rng = np.random.default_rng(5)
    long = rng.integers(1, VOCAB, 22).tolist()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    asks = [Ask(long, params)] + [Ask(long[:n], params, at=n) for n in range(1, 22)]
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET)
    run = serve(engine, asks)
    assert differences(run.answers, serve_alone(dummy_model(), asks, bucket_plan=ONE_BUCKET)) == []
    assert run.stats.num_hit_tokens == sum((n - 1) // 4 * 4 for n in range(1, 22))  # all full pages but the last token's


def test_hits_pages_of_generated_tokens():
    """A conversation's next turn finds the pages of the answer."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=15, ignore_eos=True, logprobs=2)
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET)
    first = serve(engine, [Ask([7, 8, 9], params)]).answers["0"]
    turn = Ask([7, 8, 9, *first.tokens, 10, 11], params)
    run = serve(engine, [turn])
    assert run.stats.num_hit_tokens == 16  # of 18 tokens, the last of which has no KV: four pages
    assert differences(run.answers, serve_alone(dummy_model(), [turn], bucket_plan=ONE_BUCKET)) == []


def test_salts_do_not_share_and_do_not_change_the_answer():
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
    prompt = list(range(1, 14))
    asks = [Ask(prompt, params, at=i, cache_salt=salt) for i, salt in enumerate((None, "a", "b", "a"))]
    run = serve(make_engine(dummy_model(), bucket_plan=ONE_BUCKET), asks)
    assert run.stats.num_hit_tokens == 12  # the second "a" alone
    assert differences(run.answers, serve_alone(dummy_model(), asks, bucket_plan=ONE_BUCKET)) == []


# -- where shapes differ


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.slow
def test_default_plan_agrees_within_tolerance(dtype, record_property):
    """Buckets of several shapes against one. Greedy requests part only at a near tie; random ones may part where a draw falls
    between two tokens' shares, which float32 all but excludes."""
    asks = requests(True, logprobs=True)
    engine = make_engine(dummy_model(dtype), pool_pages=SMALL_POOL[True])
    run = serve(engine, asks)
    assert_covers(run, engine, small_pool=True)
    assert len(engine.stats.padding.steps) >= 4, "the run stayed in a few buckets"
    num_greedy, num_random, largest = compare(run.answers, alone(dtype, True, logprobs=True), asks, TOLERANCE[dtype])
    parted = f"of {len(asks)} requests {num_greedy} greedy and {num_random} random ones part"
    record_property("counted", f"buckets, {dtype}: {parted}; log-probabilities differ by at most {largest:.1e}")
    assert num_greedy <= (0 if dtype == "float32" else 2) and num_random <= (1 if dtype == "float32" else 3)


def compare(answers: dict[str, Answer], expected: dict[str, Answer], asks: list[Ask], tolerance: float) -> tuple[int, int, float]:
    """(greedy requests that part, random ones, largest difference of a log-probability up to there); asserts the tolerance."""
    parted, largest = {True: 0, False: 0}, 0.0
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        alone, greedy = expected[name], asks[int(name.split("/")[0])].params.greedy
        for token, reference, have, want in zip(answer.tokens, alone.tokens, answer.logprobs, alone.logprobs, strict=False):
            common = have.keys() & want.keys()
            largest = max([largest, *(abs(have[t][0] - want[t][0]) for t in common)])
            assert largest <= tolerance, f"request {name}"
            if token != reference:
                parted[greedy] += 1
                best, second = sorted((x for x, _ in want.values()), reverse=True)[:2]
                assert not greedy or best - second <= tolerance, f"request {name} parts where the best is {best - second} ahead"
                break
        else:
            assert (answer.finish_reason, len(answer.tokens)) == (alone.finish_reason, len(alone.tokens))
    return parted[True], parted[False], largest


@pytest.mark.parametrize("dtype", slow_unless(lambda dtype: dtype == "float32", TOLERANCE))
def test_alone_agrees_with_the_plain_forward(dtype, record_property):
    """The reference of the tests above against a forward that knows no pages: every log-probability that was returned, and
    greedy tokens the best."""
    tolerance, num_checked, largest = TOLERANCE[dtype], 0, 0.0
    asks = requests(True, logprobs=True)
    for name, answer in alone(dtype, True, logprobs=True).items():
        ask = asks[int(name.split("/")[0])]
        logprobs = plain_logprobs([*ask.prompt, *answer.tokens], dtype)[len(ask.prompt) - 1 : -1]
        assert len(logprobs) == len(answer.tokens) == len(answer.logprobs) > 0
        for token, expected, given in zip(answer.tokens, logprobs, answer.logprobs, strict=True):
            ids = list(given)
            assert ids[0] == token and len(ids) in (5, 6)
            largest = max(largest, np.abs([given[t][0] for t in ids] - expected[ids]).max())
            assert largest <= tolerance, f"request {name}"
            if ask.params.greedy and not kinds_of(ask.params):
                assert expected[token] >= expected.max() - 2 * tolerance
            num_checked += 1
    counted = f"log-probabilities of {num_checked} tokens differ by at most {largest:.1e}"
    record_property("counted", f"engine and plain forward, {dtype}: {counted}")
    assert num_checked > 100


def test_the_dummy_model_sees_its_context():
    """What the tests above stand on: a token far back changes what follows by more than any tolerance."""
    tokens = np.random.default_rng(1).integers(1, VOCAB, 60).tolist()
    other = [(tokens[0] + 1) % VOCAB, *tokens[1:]]
    difference = np.abs(plain_logprobs(tokens)[-1] - plain_logprobs(other)[-1]).max()
    assert difference > 10 * TOLERANCE["float32"], difference


# -- goldens


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "qwen3_moe", GOLDENS))
def test_serves_the_greedy_tokens_of_transformers(name):
    """Prompts together, in chunks, from pages of 4 tokens, too few of them for all."""
    golden = load_golden(name)
    model = load_model(HERE / name, skip_tokenizer_init=True, dtype="float32", transposed=None).module
    num_new = golden.greedy.shape[1]
    longest = max(map(len, golden.prompts)) + num_new
    config = EngineConfig(
        page_size=4,
        max_model_len=longest,
        max_num_seqs=SEQS,
        max_num_batched_tokens=TOKENS,
        num_pages=-(-longest // 4) + 2,
        bucket_plan=ONE_BUCKET,
        compilation_cache_dir="",
    )
    engine = Engine(model, config)
    poison(engine)
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    run = serve(engine, [Ask(prompt.tolist(), params) for prompt in golden.prompts])
    for i, greedy in enumerate(golden.greedy.tolist()):
        assert run.answers[str(i)].tokens == greedy
    assert run.num_mixed_steps and run.stats.num_preemptions
