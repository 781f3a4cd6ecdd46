"""Devices that attend in groups answer as one device, whichever group a request is in; their programs hold what they should."""

import functools
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.buckets.plan import BucketPlan
from jaxserve.engine.engine import Engine
from jaxserve.engine.measure import StepMeasurer
from jaxserve.execution.compilation import compile_counts
from jaxserve.step_times.fitted import BucketTimes, StepTimeModel
from tests import alphabet_model
from tests.dummy import SETTINGS, Answer, Ask, dummy_model, stages
from tests.parallel.models import GREEDY, MODELS, PROMPTS, answers, assert_like_one_device, engine_of
from tests.selection import exhaustive_unless
from tests.serving.http_server import serving

ASKS = [Ask(prompt, GREEDY) for prompt in PROMPTS]
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "bucket_plan": BucketPlan(mixed=((32, 8),), head_rows=(8,))}
LAYOUTS = ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4))  # devices, groups
IN_CI = set(zip(MODELS, itertools.cycle(LAYOUTS), strict=False)) | {("experts", (8, 4))}
SAMPLED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=2, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, min_p=0.02, presence_penalty=0.5, repetition_penalty=1.2, seed=3, max_tokens=9, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=9, ignore_eos=True, logprobs=2),
]


@functools.cache
def usual(name: str, tp: int, groups: int) -> Engine:
    """An engine for whoever leaves it as new."""
    return grouped(name, tp, groups)


def grouped(name: str, tp: int, groups: int, **settings) -> Engine:
    return engine_of(dummy_model(config=MODELS[name]), tp, attention_groups=groups, **{**LIMITS, **settings})


@functools.cache
def of_one_device(name: str) -> dict:
    return answers(engine_of(dummy_model(config=MODELS[name]), 1), ASKS)


def assert_all_free(engine: Engine) -> None:
    engine.scheduler.check_invariants()
    assert all(pool.num_free_pages == pool.num_pages for pool in engine.pools)


@pytest.mark.slow
@pytest.mark.parametrize("case", exhaustive_unless(lambda x: x in IN_CI, itertools.product(MODELS, LAYOUTS)), ids=str)
def test_answers_are_those_of_one_device(case):
    """Log-probabilities of the prompt too, which are made of rows of the step."""
    name, (tp, groups) = case
    engine = usual(name, tp, groups)
    assert len(engine.pools) == groups and f"devices: {tp}; attention groups: {groups}; " in engine.describe()
    assert_like_one_device(answers(engine, ASKS), of_one_device(name))
    assert_all_free(engine)


@pytest.mark.parametrize("layout", [(4, 2), pytest.param((8, 2), marks=(pytest.mark.slow, pytest.mark.exhaustive))], ids=str)
def test_an_answer_does_not_depend_on_its_group_nor_on_who_else_is_there(layout):
    """To the last bit, within one bucket."""
    engine = usual("experts", *layout)
    ask = Ask(PROMPTS[2], SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=3))
    alone, found, homes = answers(engine, [ask])["0"], [], []
    for others in range(1, 4):
        for i in range(others):
            engine.add_request(f"other{i}", PROMPTS[i], SamplingParams(max_tokens=30, ignore_eos=True))
        engine.step()
        engine.add_request("mine", ask.prompt, ask.params)
        mine = Answer()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request.request_id == "mine":
                    homes.append(output.request.row // engine.scheduler.rows.rows_per_group)
                    mine.take(output)
        found.append(mine)
    assert {home for home in homes if home >= 0} == {0, 1}
    assert len(alone.tokens) == 12 and all(each == alone for each in found)


@pytest.mark.slow
def test_samples_of_every_kind_are_those_of_one_group():
    """Equal logits of 2 devices a KV head each, in one group or in two: only the sums' order may differ, and tokens do not."""
    asks = [Ask(prompt, params) for prompt, params in zip(PROMPTS, SAMPLED, strict=True)]
    engine = grouped("experts", 4, 2)
    found, expected = answers(engine, asks), answers(engine_of(dummy_model(config=MODELS["experts"]), 2, **LIMITS), asks)
    assert {name: a.tokens for name, a in found.items()} == {name: a.tokens for name, a in expected.items()}
    assert_all_free(engine)


SHARED = [
    Ask([*PROMPTS[2][:12], *prompt[:5]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for prompt in PROMPTS * 2
]
POLICIES: dict[str, dict] = {
    "sarathi": {},
    "sarathi_priority": {"scheduling_policy": "priority"},
    "sarathi_separate_steps": {"enable_mixed_steps": False},
    "orca_chunked": {"batching_policy": "orca", "enable_chunked_prefill": True},
    "prefill_first_chunked": {"batching_policy": "prefill_first", "enable_chunked_prefill": True},
    "request_level_chunked": {"batching_policy": "request_level", "enable_chunked_prefill": True},
}


@functools.cache
def shared_on_one_device() -> dict[str, list[int]]:
    found = answers(engine_of(dummy_model(config=MODELS["experts"]), 1), SHARED)
    return {name: answer.tokens for name, answer in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_and_cached_requests_are_answered_as_alone(policy):
    """Pages for a request and a half a group; prompts that share their beginning; every policy that cuts prompts."""
    engine = grouped("experts", 4, 2, num_pages=13, max_model_len=48, **POLICIES[policy])
    asks = [replace(ask, priority=i % 3) for i, ask in enumerate(SHARED)] if policy == "sarathi_priority" else SHARED
    found = answers(engine, asks)
    stats, rules = engine.scheduler.stats(), engine.scheduler.policy
    assert bool(stats.num_preemptions) != rules.reserve_full and stats.num_hit_tokens
    assert {name: a.tokens for name, a in found.items()} == shared_on_one_device()
    assert_all_free(engine)


@pytest.mark.slow
@pytest.mark.parametrize("layout", exhaustive_unless(lambda layout: layout == (8, 4), [(4, 2), (8, 4)]), ids=str)
def test_nothing_compiles_after_warm_up_and_sleep_and_new_weights_change_no_answer(layout):
    engine = grouped("experts", *layout, warm_up="all", bucket_plan=None)
    before = compile_counts().programs
    first = answers(engine, ASKS)
    assert compile_counts().programs == before
    engine.sleep()
    engine.wake_up()
    engine.update_params(dummy_model(config=MODELS["experts"]))
    before = compile_counts().programs
    assert answers(engine, ASKS) == first
    assert compile_counts().programs == before and engine.reset_prefix_cache()


@pytest.mark.slow
def test_a_server_answers_requests_of_both_groups(tmp_path):
    """Of a model that goes on with the alphabet: three samples each, of which a group has rows for two. Its metrics count the pages
    of both groups."""
    plan = BucketPlan(mixed=((32, 4),), head_rows=(4,))
    settings = {"bucket_plan": plan, "num_pages": 24, "page_size": 4, "max_model_len": 64, "compilation_cache_dir": ""}
    llm = LLM(alphabet_model.save(tmp_path), tensor_parallel_size=2, attention_groups=2, **settings)
    assert "devices: 2; attention groups: 2; " in llm.engine.describe()
    groups, update = set(), llm.engine.scheduler.update

    def watched(schedule, *args, **kwargs):
        groups.update((schedule.rows // 2).tolist())
        return update(schedule, *args, **kwargs)

    llm.engine.scheduler.update = watched
    with serving(llm) as server:

        def answers_of(letter: str) -> list[str]:
            body = {"model": "alphabet", "prompt": letter, "max_tokens": 8, "temperature": 0, "n": 3}
            choices = server.client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            return [choice["text"] for choice in choices]

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(answers_of, "abcd"))
        assert found == [[text] * 3 for text in ("bcdefghi", "cdefghij", "defghijk", "efghijkl")]
        server.wait_idle()
        assert groups == {0, 1} and server.engine.stats.num_free_pages == 48
        assert 'num_gpu_blocks="48"' in server.client.get("/metrics").text
    assert_all_free(llm.engine)


def test_a_body_has_two_reductions_a_layer_and_copies_no_page():
    engine = usual("experts", 4, 2)
    programs, state = stages(engine)[0].programs, stages(engine)[0].state
    text = programs.get(engine.config.plan.buckets[-1]).as_text()
    layers = engine.config.model.num_layers
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 2 * layers + 1, "two a layer, and that of the embedding"
    assert not re.search(r" (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    shape = ",".join(map(str, state.kv_pages[0].sharding.shard_shape(state.kv_pages[0].shape)))
    assert shape in text and not re.search(rf"\[{shape}\]\S* copy\(", text)
    projections = [line.split(" dot(")[0].split()[-1] for line in text.splitlines() if " dot(" in line and "attention/" in line]
    assert projections == ["f32[16,32]{1,0}"] * 2 * layers, "of 32 rows a group has 16"


def test_a_device_holds_its_groups_heads_and_its_part_of_the_rest():
    """8 devices in 4 groups: two KV heads, one on each device of a group, and no page twice."""
    engine = grouped("experts_and_dense", 8, 4)
    functions = engine.runner.programs.functions
    held = dict(zip(functions.paths, functions.weights, strict=True))
    parts = [np.asarray(s.data) for s in held["layers/0/attention/o_proj/kernel"].addressable_shards]
    assert parts[0].shape == (16, 32) and all((parts[i] == parts[i % 2]).all() for i in range(8))
    assert (np.concatenate(parts[:2]) == o_proj_of(dummy_model(config=MODELS["experts_and_dense"]))).all()
    assert held["layers/0/mlp/gate_up_proj/kernel"].addressable_shards[0].data.shape == (32, 2 * 48 // 8)
    assert stages(engine)[0].state.kv_pages[0].addressable_shards[0].data.shape == (64, 2, 1, 4, 8)
    assert engine.description.kv_tokens == 4 * 64 * 4 and engine.description.attention_groups == 4


def o_proj_of(model) -> np.ndarray:
    return np.asarray(model.layers[0].attention.o_proj.kernel[...])


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"tensor_parallel_size": 1}, ValueError, "attention_groups=2 must divide tensor_parallel_size=1"),
        ({"tensor_parallel_size": 4, "attention_groups": 3}, ValueError, "attention_groups=3 must divide tensor_parallel_size=4"),
        ({"max_num_seqs": 5}, ValueError, "max_num_seqs=5 must be a multiple of attention_groups=2"),
        ({"max_num_batched_tokens": 21}, ValueError, "max_num_batched_tokens=21 must be a multiple of attention_groups=2"),
        (
            {"bucket_plan": BucketPlan(decode=(3,), mixed=((24, 6),), head_rows=(6,))},
            ValueError,
            r"attention_groups=2 must divide the tokens and sequences of every bucket, and the plan has decode\(3,3\)",
        ),
        ({"pipeline_parallel_size": 2}, NotImplementedError, "pipeline_parallel_size=2 can't be had with attention_groups=2"),
        ({"deterministic": "always"}, NotImplementedError, "deterministic='always' can't be had with attention_groups=2"),
        ({"demand_log": "log.jsonl"}, NotImplementedError, "demand_log='log.jsonl' can't be had with attention_groups=2"),
        ({"enable_chunked_prefill": False}, NotImplementedError, "prompts that are not chunked can't be had with attention_gr"),
        ({"batching_policy": "orca"}, NotImplementedError, "prompts that are not chunked can't be had with attention_groups=2"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            NotImplementedError,
            "speculative_config can't be had with attention_groups=2",
        ),
    ],
)
def test_options_that_can_not_be_had(settings, kind, message):
    with pytest.raises(kind, match=message):
        Engine(dummy_model(), EngineConfig(**{**SETTINGS, "tensor_parallel_size": 2, "attention_groups": 2, **settings}))


def test_no_profile_is_made_of_groups_nor_used(tmp_path):
    path = str(tmp_path / "steps.json")
    StepTimeModel((BucketTimes(8, 8, 1, 1.0, 0.0, 0.0),), ((8, 0.0),), (8,), 4).save(path)
    with pytest.raises(NotImplementedError, match="tbt_slo_ms=50 can't be had with attention_groups=2"):
        grouped("gqa", 4, 2, tbt_slo_ms=50, step_times=path)
    with pytest.raises(NotImplementedError, match="attention_groups=2: profiles are of one group"):
        StepMeasurer(dummy_model(), EngineConfig(**SETTINGS, tensor_parallel_size=2, attention_groups=2), multiple=4)


def test_a_meshs_devices_are_grouped_in_its_order():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[3::-1]), ("tp",))
    engine = engine_of(dummy_model(), 1, mesh, attention_groups=2, **LIMITS)
    shards = stages(engine)[0].state.kv_pages[0].addressable_shards
    assert engine.config.engine.tensor_parallel_size == 4 and len(shards) == 4
    assert engine.config.local.num_kv_heads == 1 and engine.config.scheduler.num_groups == 2
