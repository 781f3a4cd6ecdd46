"""New weights between steps: what is answered before, across and after the change; what is compiled, copied and cached."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, Engine
from jaxserve.execution.compilation import compile_counts
from jaxserve.models import Decoder, named_leaves, with_leaves
from jaxserve.outputs import RequestOutput, WeightVersionSpan
from jaxserve.scheduling.page_pool import root_hash
from tests.dummy import (
    CONFIG,
    ONE_BUCKET,
    SETTINGS,
    Ask,
    add,
    assert_empty,
    differences,
    dummy_model,
    make_engine,
    serve,
    serve_alone,
)
from tests.engine.other_weights import GREEDY, OTHER, PROMPT, greedy_alone, leaves_of, run_out
from tests.scheduler_state import hash_of
from tests.workload import alone, requests


@pytest.fixture
def engine() -> Engine:
    return make_engine(dummy_model(), bucket_plan=ONE_BUCKET)


# -- what is answered


def test_answers_are_those_of_an_engine_made_with_the_new_weights(engine):
    """All requests at once, under caching, after the same prompts under the old weights; and back again."""
    assert differences(serve(engine, requests(True)).answers, alone("float32", True)) == []
    engine.update_params(OTHER)
    expected = serve_alone(OTHER, requests(True), bucket_plan=ONE_BUCKET)
    assert differences(serve(engine, requests(True)).answers, expected) == []
    engine.update_params(dummy_model())
    assert differences(serve(engine, requests(True)).answers, alone("float32", True)) == []


def test_no_prefix_of_the_old_weights_is_hit(engine):
    ask = Ask(PROMPT, GREEDY)
    serve(engine, [ask])
    hits = serve(engine, [ask]).stats.num_hit_tokens
    assert hits == 20, "the prefix cache works"
    engine.update_params(OTHER)
    assert not any(hash_of(engine.pool, page) for page in range(engine.pool.num_pages))
    assert serve(engine, [ask]).stats.num_hit_tokens == hits
    assert serve(engine, [ask]).stats.num_hit_tokens == 2 * hits


def test_requests_in_flight_are_refused_and_nothing_changes(engine):
    engine.add_request("x", PROMPT, GREEDY)
    for _ in range(4):
        engine.step()
    with pytest.raises(RuntimeError, match="1 requests are in flight: finish or abort them first, or .*'recompute' or 'keep'"):
        engine.update_params(OTHER)
    with pytest.raises(ValueError, match="in_flight='later' must be one of refuse, recompute, keep"):
        engine.update_params(OTHER, in_flight="later")
    assert engine.runner.num_weight_updates == 0
    run_out(engine)
    engine.update_params(OTHER)


def test_a_request_that_only_waits_runs_with_the_new_weights(engine):
    serve(engine, [Ask(PROMPT, GREEDY)])  # whose pages it would have hit
    (request,) = engine.add_request("x", PROMPT, GREEDY)
    engine.update_params(OTHER)
    assert request.num_weight_updates == engine.runner.num_weight_updates == 1
    assert request.hash_chain == [root_hash(1, None)]
    assert run_out(engine)["x"].tokens == greedy_alone(OTHER, PROMPT, 12)
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == greedy_alone(OTHER, PROMPT, 12)


@pytest.mark.parametrize("prompt, num_steps", [(PROMPT, 5), (PROMPT * 3, 2)], ids=["decoding", "in its prompt"])
def test_recompute(engine, prompt, num_steps):
    """What was sampled stands; the rest is what the new weights say after it."""
    (request,) = engine.add_request("x", prompt, GREEDY)
    beside = add(engine, "y", Ask(prompt[:9], GREEDY.with_(n=2, temperature=0.7, seed=3)))
    before = [output for _ in range(num_steps) for output in engine.step()]
    engine.update_params(OTHER, in_flight="recompute")
    engine.scheduler.check_invariants()
    assert request.num_preemptions == 1 and not engine.scheduler.num_running
    so_far = list(request.output_token_ids)
    assert bool(so_far) == (len(prompt) == len(PROMPT))
    run_out(engine)
    assert request.output_token_ids[: len(so_far)] == so_far and len(before) >= len(so_far) - 1
    assert request.output_token_ids[len(so_far) :] == greedy_alone(OTHER, prompt + so_far, 12 - len(so_far))
    assert all(r.finished and r.finish_reason == "length" for r in beside)
    assert_empty(engine)
    # What it wrote since may be shared.
    run = serve(engine, [Ask(prompt, GREEDY)])
    assert run.stats.num_hit_tokens and run.answers["0"].tokens == greedy_alone(OTHER, prompt, 12)


def start_keeping(engine: Engine, params: Decoder, prompt: list[int]) -> list[int]:
    """A request runs for some steps and goes on over new weights. Returns its tokens so far."""
    (request,) = engine.add_request("kept", prompt, GREEDY)
    for _ in range(5 if len(prompt) < 24 else 2):
        engine.step()
    engine.update_params(params, in_flight="keep")
    engine.scheduler.check_invariants()
    return list(request.output_token_ids)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 3], ids=["decoding", "in its prompt"])
def test_keep_goes_on_where_it_was(engine, prompt):
    """Equal weights in new arrays: the tokens are those of a run that was never disturbed, and nothing is computed twice."""
    copies = {path: jnp.array(x) for path, x in leaves_of().items()}
    start_keeping(engine, with_leaves(dummy_model(), copies), prompt)
    (request,) = engine.scheduler.running
    run_out(engine)
    assert request.output_token_ids == greedy_alone(dummy_model(), prompt, 12)
    assert engine.stats.prefill_tokens == len(prompt)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 3], ids=["decoding", "in its prompt"])
def test_what_was_kept_is_shared_with_nobody(engine, prompt):
    """Not its old KV, nor what it wrote over it with the new weights; while it runs, and after it."""
    so_far = start_keeping(engine, OTHER, prompt)
    (kept,) = engine.scheduler.running
    for name in ("beside", "after"):
        (request,) = engine.add_request(name, prompt + so_far, GREEDY)
        while not request.finished:
            engine.step()
        assert request.num_cached_tokens == (0 if name == "beside" else (len(prompt + so_far) - 1) // 4 * 4)
        assert request.output_token_ids == greedy_alone(OTHER, prompt + so_far, 12)
    run_out(engine)
    assert kept.num_preemptions == 0
    hits = engine.pool.num_hit_tokens
    (request,) = engine.add_request("its output", prompt + kept.output_token_ids, GREEDY)
    run_out(engine)
    others = so_far + greedy_alone(OTHER, prompt + so_far, 12)
    common = np.cumprod([a == b for a, b in zip(kept.output_token_ids, others, strict=False)])
    shared = len(prompt) + int(common.sum())  # with what the requests under the new weights alone left in the cache
    assert engine.pool.num_hit_tokens - hits <= shared
    assert request.output_token_ids == greedy_alone(OTHER, prompt + kept.output_token_ids, 12)


@pytest.mark.slow
def test_a_sample_that_waited_takes_nothing_of_what_was_kept():
    """n = 3 with room for two: the third begins under the new weights, and what it leaves in the cache is theirs alone."""
    engine = make_engine(dummy_model(), max_num_seqs=2, bucket_plan=None, max_num_batched_tokens=24)
    first, *_ = engine.add_request("n", PROMPT, GREEDY.with_(n=3))
    for _ in range(4):
        engine.step()
    engine.drain()
    engine.update_params(OTHER, in_flight="keep")
    engine.finish(first, "stop")  # beside the second, which runs on, there is room for the third
    answers = run_out(engine)
    assert answers["n/2"].tokens == greedy_alone(OTHER, PROMPT, 12)
    engine.add_request("later", PROMPT + answers["n/2"].tokens, GREEDY)
    assert run_out(engine)["later"].tokens == greedy_alone(OTHER, PROMPT + answers["n/2"].tokens, 12)
    assert engine.scheduler.stats().num_hit_tokens


def test_what_was_kept_and_then_preempted_is_computed_with_the_new_weights(engine):
    so_far = start_keeping(engine, OTHER, PROMPT)
    (request,) = engine.scheduler.running
    engine.drain()
    so_far = list(request.output_token_ids)
    engine.scheduler.requests.preempt(request)
    run_out(engine)
    assert request.output_token_ids == so_far + greedy_alone(OTHER, PROMPT + so_far, 12 - len(so_far))
    assert serve(engine, [Ask(PROMPT, GREEDY)]).stats.num_hit_tokens >= 20, "its pages may be shared from then on"


# -- what it costs


def test_nothing_is_compiled_and_nothing_copied(engine):
    jax.clear_caches()  # of eager operations, which an engine before this one may have filled
    serve(engine, requests(True))
    given = {}  # before the count: making an array can compile something
    for in_flight in ("refuse", "recompute", "keep"):
        given[in_flight] = {path: jnp.asarray(np.array(x) * 0.9) for path, x in leaves_of().items()}
    before = compile_counts().programs
    with jax.log_compiles():  # in the report, should it fail
        for in_flight, leaves in given.items():
            if in_flight != "refuse":
                add(engine, in_flight, Ask(PROMPT, GREEDY))
                engine.step()
            engine.update_params(leaves, in_flight)
            runner = engine.runner
            assert {id(x) for x in (*runner.body_weights, *runner.head_weights)} == {id(x) for x in leaves.values()}
            run_out(engine)
            serve(engine, requests(True))
    assert compile_counts().programs == before


def test_old_weights_are_let_go():
    def made(factor: float) -> dict[str, jax.Array]:
        return {path: jnp.asarray(np.array(x) * factor) for path, x in leaves_of().items()}

    leaves = made(0.9)
    llm = LLM.from_params(leaves, CONFIG, **SETTINGS, bucket_plan=ONE_BUCKET)
    for factor in (0.8, 0.7):
        held = [weakref.ref(x) for x in leaves.values()]
        leaves = made(factor)
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        llm.update_params(leaves)
        gc.collect()
        assert not any(x() is not None for x in held)


def test_other_dtypes_are_cast_to_the_engines(engine):
    half = {path: x.astype(jnp.bfloat16) for path, x in named_leaves(OTHER).items()}
    engine.update_params(half)
    rounded = with_leaves(dummy_model(), {path: x.astype(jnp.float32) for path, x in half.items()})
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == greedy_alone(rounded, PROMPT, 12)


# -- which weights an output names


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_each_token_is_marked_with_the_weights_that_sampled_it(in_flight):
    """The spans end where the tokens stop being those of the first weights."""
    llm = LLM.from_params(dummy_model(), **SETTINGS, bucket_plan=ONE_BUCKET)
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:9]}]
    first = greedy_alone(dummy_model(), PROMPT, 12)
    stream = llm.stream(prompts, [GREEDY, GREEDY.with_(max_tokens=3)])
    outputs: dict[int, RequestOutput] = {}
    for index, output in stream:
        outputs[index] = output
        if index == 0 and len(output.outputs[0].token_ids) == 5:
            assert output.outputs[0].weight_versions is None, "it has not ended"
            llm.update_params(OTHER, in_flight, "step-1")
    long, short = (outputs[i].outputs[0] for i in range(2))
    assert short.weight_versions == [WeightVersionSpan("0", 0, 3)]
    assert long.weight_versions is not None
    (before, after) = long.weight_versions
    assert (before.version, before.start, after.version, after.end) == ("0", 0, "step-1", 12) and before.end == after.start
    assert long.token_ids[: before.end] == first[: before.end] and 5 <= before.end < 12
    if in_flight == "recompute":
        continued = PROMPT + long.token_ids[: before.end]
        assert long.token_ids[before.end :] == greedy_alone(OTHER, continued, 12 - before.end) != first[before.end :]
    assert llm.get_weight_version() == "step-1" and llm.engine.stats.num_weight_updates == 1
    (then,) = llm.generate(prompts[:1], GREEDY)
    assert then.outputs[0].weight_versions == [WeightVersionSpan("step-1", 0, 12)]


def test_names_of_weights(engine):
    assert engine.weight_version == "0"
    (request,) = engine.add_request("x", PROMPT, GREEDY)
    engine.update_weight_version("base")  # before it has a token
    for _ in range(4):
        engine.step()
    num_tokens = request.num_output_tokens
    assert num_tokens
    wrong: list[Any] = ["", "x" * 129, None]
    for bad in wrong:
        with pytest.raises(ValueError, match="must be a text of 1 to 128 characters"):
            engine.update_weight_version(bad)
    with pytest.raises(ValueError, match="must be a text of 1 to 128 characters"):
        engine.update_params(OTHER, "keep", "")
    assert engine.weight_version == "base" and engine.runner.num_weight_updates == 0
    for version in ("skipped", "base", "skipped"):  # between which nothing is sampled
        engine.drain()
        engine.update_weight_version(version)
    engine.update_weight_version("base")
    engine.step()
    engine.update_params(OTHER, in_flight="keep")
    drained = request.num_output_tokens
    assert engine.weight_version == "1"
    assert request.weight_starts == [("base", 0), ("1", drained)]


def test_a_failed_update_names_no_weights(engine, monkeypatch):
    def lost(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.runner, "set_weights", lost)
    with pytest.raises(MemoryError):
        engine.update_params(OTHER, weight_version="lost")
    assert engine.weight_version == "0"


@pytest.mark.parametrize(
    "starts, num_tokens, spans",
    [
        ([("a", 0)], 3, [("a", 0, 3)]),
        ([("a", 0)], 0, [("a", 0, 0)]),
        ([("a", 0), ("b", 2)], 5, [("a", 0, 2), ("b", 2, 5)]),
        ([("a", 0), ("b", 2), ("c", 4)], 3, [("a", 0, 2), ("b", 2, 3)]),  # a stop string cut the rest
        ([("a", 0), ("b", 2)], 2, [("a", 0, 2)]),
    ],
)
def test_spans(starts, num_tokens, spans):
    assert WeightVersionSpan.of(starts, num_tokens) == [WeightVersionSpan(*span) for span in spans]


# -- what is refused


def test_misfits_are_listed_and_nothing_changes(engine):
    wrong = dict(leaves_of()) | {"surplus": jnp.zeros(1)}
    del wrong["final_norm/scale"]
    with pytest.raises(ValueError, match="(?s)2 problems.*missing: final_norm/scale.*unknown: surplus"):
        engine.update_params(wrong)
    assert engine.runner.num_weight_updates == 0
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == greedy_alone(dummy_model(), PROMPT, 12)


def test_a_trainer_that_donates_is_told_so_and_may_go_on(engine):
    first = {path: jnp.array(x) for path, x in leaves_of().items()}
    engine.update_params(first)
    second = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0.9, tree), donate_argnums=0)(first)
    with pytest.raises(ValueError, match="deleted: embed_tokens/embedding was donated to a computation"):
        engine.update_params(first)
    engine.add_request("x", PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match=f"{len(first)} of the weights were deleted .* call update_params with the current ones"):
        run_out(engine)
    assert_empty(engine)
    engine.update_params(second)
    expected = greedy_alone(with_leaves(dummy_model(), second), PROMPT, 12)
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == expected


# -- pause and sleep


def test_pause_starts_nothing_and_loses_nothing(engine):
    expected = greedy_alone(dummy_model(), PROMPT, 12)
    (request,) = engine.add_request("x", PROMPT, GREEDY)
    for _ in range(4):
        engine.step()
    engine.pause()
    engine.step()
    num_steps, num_tokens = engine.stats.num_steps, request.num_output_tokens
    (late,) = engine.add_request("late", PROMPT, GREEDY)
    assert engine.step() == [] and engine.stats.num_steps == num_steps and request.num_output_tokens == num_tokens
    assert engine.has_unfinished_requests() and not engine.pipeline.in_flight
    engine.update_params(dummy_model(), in_flight="keep")
    engine.resume()
    run_out(engine)
    assert request.output_token_ids == late.output_token_ids == expected


@pytest.mark.slow
def test_kernels_of_a_trainer_fill_an_engine_that_holds_them_transposed():
    """As an LLM that read its model from files holds them on a CPU; the second update compiles nothing."""
    engine = make_engine(dummy_model(transposed=True), bucket_plan=ONE_BUCKET)
    expected = greedy_alone(OTHER, PROMPT, 12), greedy_alone(dummy_model(), PROMPT, 12)
    engine.update_params(OTHER)
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == expected[0]
    before = compile_counts().programs
    engine.update_params(dummy_model())
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == expected[1]
    assert compile_counts().programs == before
    held = dict(zip(engine.runner.programs.functions.paths, engine.runner.programs.functions.weights, strict=True))
    engine.update_params(held)
    assert all(x is y for x, y in zip(held.values(), engine.runner.programs.functions.weights, strict=True))


def test_llm_on_params():
    llm = LLM.from_params(dummy_model(), **SETTINGS, bucket_plan=ONE_BUCKET)
    assert {id(x) for x in llm.engine.runner.programs.functions.weights} <= {id(x) for x in leaves_of().values()}

    def tokens() -> list[int]:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    assert tokens() == greedy_alone(dummy_model(), PROMPT, 12)
    llm.update_params(OTHER)
    assert tokens() == greedy_alone(OTHER, PROMPT, 12)
    llm.pause()
    with pytest.raises(RuntimeError, match=r"paused: call resume\(\)"):
        tokens()
    llm.resume()
    llm.sleep()
    with pytest.raises(RuntimeError, match=r"asleep: call wake_up\(\)"):
        tokens()
    llm.wake_up()
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="1 requests are in flight"):
        llm.update_params(OTHER)
    llm.update_params(dummy_model(), in_flight="recompute")
    *_, (_, output) = stream
    assert output.finished and len(output.outputs[0].token_ids) == 12
    with pytest.raises(ValueError, match="no tokenizer was loaded"):
        llm.generate("text", GREEDY)
    with pytest.raises(TypeError, match="unknown option page_sice"):
        LLM.from_params(dummy_model(), page_sice=4)


@pytest.mark.slow
def test_llm_on_params_with_a_config():
    leaves = dict(leaves_of())
    llm = LLM.from_params(leaves, CONFIG, dtype="bfloat16", **SETTINGS, bucket_plan=ONE_BUCKET)
    assert llm.engine.runner.programs.functions.dtype == jnp.bfloat16
    expected = serve_alone(dummy_model("bfloat16"), [Ask(PROMPT, GREEDY)], bucket_plan=ONE_BUCKET)["0"].tokens
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
