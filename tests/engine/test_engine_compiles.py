"""Nothing is compiled after warm-up, whatever a user sets and whatever happens to requests; and never more than the plan says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import BucketPlan, Engine, SamplingParams
from jaxserve.engine.pipeline import StepPipeline
from jaxserve.execution.compilation import compile_counts
from jaxserve.execution.runner import Runner
from tests.dummy import ONE_BUCKET, SEVERAL_BUCKETS, VOCAB, Ask, add, assert_empty, dummy_model, make_engine, serve, stages
from tests.workload import requests


def num_compiled() -> int:
    """Programs that this process has compiled, eager operations included."""
    return compile_counts().programs


def everything_a_user_can_set(rng: np.random.Generator) -> list[SamplingParams]:
    filters = [{"top_k": k, "top_p": p, "min_p": m} for k in (0, 1, 7, 500) for p, m in ((1, 0), (0.7, 0.1))]
    random = [dict(temperature=t, **f) for t in (0.3, 1, 9.0) for f in filters]
    others = [
        {"logprobs": 0},
        {"max_tokens": 1},
        {"max_tokens": None, "stop_token_ids": list(range(40))},
        {"min_tokens": 5, "max_tokens": 9, "stop_token_ids": [3, 4]},
        {"ignore_eos": True},
        {"n": 7, "seed": -3},
        {"temperature": 0, "n": 2},
        {"logprobs": 20, "temperature": 0},
        {"logprobs": 4, "temperature": 0.5, "top_k": 3, "seed": 2**64 - 1},
        {"logprob_token_ids": list(range(VOCAB))[:70], "n": 2, "presence_penalty": 0.1},
        {"logprob_token_ids": [5], "temperature": 0},
        {"prompt_logprobs": 0, "n": 2, "max_tokens": 3},
        {"prompt_logprobs": 5, "logprobs": 2, "frequency_penalty": 1.0},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
        {"logit_bias": {3: 4.0}, "temperature": 0, "logprobs": 2},
        {"allowed_token_ids": list(range(50)), "n": 3, "top_p": 0.5},
        {"bad_words_token_ids": [[1], [2, 3]], "repetition_penalty": 0.9, "min_tokens": 2, "max_tokens": 12},
    ]
    return [SamplingParams(**{"max_tokens": int(rng.integers(1, 12)), **params}) for params in (*others, *random)]


def use_everything(engine: Engine) -> None:
    """Prompts of many lengths, every parameter, all batch sizes, salts, priorities, preemption, hits, aborts, finishes, resets."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, n).tolist() for n in (1, 2, 3, 4, 5, 8, 9, 16, 23, 24, 25, 47, 60, 140)]
    everything = everything_a_user_can_set(rng)
    numbers = itertools.count()

    def add_next() -> str:
        i = next(numbers)
        name = f"everything {i}"
        params, prompt = everything[i % len(everything)], prompts[i % len(prompts)]
        add(engine, name, Ask(prompt, params, priority=i % 3 - 1, cache_salt=[None, "salt"][i % 5 == 4]))
        return name

    for num_requests in (1, 1, 2, 3, 4, 5, 6, 9, 14, 20):
        names = [add_next() for _ in range(num_requests)]
        for step in itertools.count():
            if step == 3 and num_requests % 2:
                engine.abort([names[0], names[-1], "nobody"])
            if step == 6 and engine.scheduler.running:
                engine.finish(engine.scheduler.running[-1], "stop", "a stop string")
            if step == 8:
                engine.drain()
            if not engine.has_unfinished_requests():
                break
            engine.step()
        assert_empty(engine)
        if num_requests == 5:
            assert engine.reset_prefix_cache()
        with pytest.raises(ValueError, match="empty prompt"):
            engine.add_request("bad", [])


@pytest.mark.slow
def test_first_use_compiles_what_is_needed_and_never_more_than_the_plan():
    plan = BucketPlan(decode=(6,), mixed=((24, 6),), head_rows=(6,))
    asks = requests(True)  # before the counting, since their stop ids come from another engine
    engine = make_engine(dummy_model(), compile_anew="all", bucket_plan=plan)
    programs = stages(engine)[0].programs
    before = num_compiled()
    assert programs.num_compiled == 0
    serve(engine, [Ask([1, 2, 3], SamplingParams(max_tokens=1))])
    assert set(programs._compiled) == {plan.buckets[1], (6, False)}
    serve(engine, [Ask([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))])
    assert set(programs._compiled) == {*plan.buckets, (6, False)}
    serve(engine, asks)
    assert set(programs._compiled) == set(programs.keys)
    assert programs.num_compiled == plan.num_programs == 6
    # One function updates the state of all engines, so that JAX itself may have it compiled already.
    assert num_compiled() - before in (5, 6)


def warmed_up_engine(**settings) -> Engine:
    """After it nothing is left in JAX's own caches of eager operations, which engines before it may have filled."""
    engine = make_engine(dummy_model(), pool_pages=48, **settings)
    jax.clear_caches()
    engine.runner.warm_up()
    return engine


def test_an_eager_operation_of_a_step_is_counted(monkeypatch):
    """Though an engine of the same shapes ran it before."""
    step = StepPipeline.step  # which warm-up does not run
    monkeypatch.setattr(StepPipeline, "step", lambda self, **kw: (self.runner.state.rows.page_table.sum(), step(self, **kw))[1])
    for _ in range(2):
        engine = warmed_up_engine(bucket_plan=ONE_BUCKET)
        add(engine, "one", Ask([1, 2, 3], SamplingParams()))
        before = num_compiled()
        engine.step()
        assert num_compiled() > before


@pytest.mark.parametrize("plan", [SEVERAL_BUCKETS, pytest.param(None, marks=pytest.mark.slow)], ids=["several", "default"])
def test_nothing_compiles_after_warm_up(plan):
    engine = warmed_up_engine(scheduling_policy="priority", bucket_plan=plan)
    heads, extra, edited, scored, dispatch = set(), [], [], [], engine.runner.dispatch_body

    def spy(inputs):
        heads.add((inputs.head_rows, inputs.with_logprobs))
        extra.append(inputs.extra_page_updates)
        edited.extend(inputs.edit_rows)
        scored.extend(inputs.score_spans)
        return dispatch(inputs)

    engine.runner.dispatch_body = spy
    before = num_compiled()
    use_everything(engine)
    assert num_compiled() == before

    plan, stats = engine.config.plan, engine.scheduler.stats()
    assert set(engine.stats.padding.steps) == set(plan.buckets), "a bucket was not used"
    assert heads - {(0, False)} == set(itertools.product(plan.head_rows, (False, True))), "a head was not used"
    assert any(map(len, extra)), "no step had more page-table updates than it could upload"
    assert edited and scored, "no request edited its logits, or none had its prompt scored"
    assert stats.num_preemptions and stats.num_hit_tokens and stats.num_discarded_rows and engine.stats.sorted_rows == 0
    jnp.arange(12_347).sum()  # the counter counts, eager operations too
    assert num_compiled() > before


@pytest.mark.parametrize("warm_up, num_calls", [("all", 1), ("first_use", 0)])
def test_warm_up_is_a_setting(warm_up, num_calls, monkeypatch):
    calls = []
    monkeypatch.setattr(Runner, "warm_up", lambda runner: calls.append(runner))
    engine = make_engine(dummy_model(), warm_up=warm_up, bucket_plan=ONE_BUCKET)
    assert calls == [engine.runner] * num_calls
