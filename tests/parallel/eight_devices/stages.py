"""Pipelines of 2 and 4 stages answer as one device, to the last bit, and schedule as the simulator says."""

import dataclasses
import functools
import math
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from checkpoints import orbax
from jaxserve import LLM, BucketPlan, EngineConfig, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.compilation import compile_counts
from jaxserve.execution.pipeline_runner import PipelineRunner
from jaxserve.models import named_leaves
from jaxserve.models.loading import load_version_cut
from jaxserve.models.shard_placement import shard_model
from jaxserve.models.shards import ModelShards
from jaxserve.parallel.mesh import stage_meshes
from jaxserve.scheduling.schedule import Schedule
from jaxserve.simulation.pipeline import PipelineReplica
from jaxserve.simulation.records import RequestRecords
from jaxserve.simulation.replay import serve as simulate
from jaxserve.step_times.fitted import BucketTimes, StepTimeModel
from jaxserve.workloads.workload import Workload, WorkloadRequest
from scripts.aot.compiled_report import CompiledReport, Instruction, Kernel, Thunk
from scripts.aot.compiler import Compiler
from scripts.aot.step import AbstractStep, check_step, read_config
from scripts.aot.verdicts import ATTENTION, ATTENTION_OP, FUSED_MATMUL, FUSED_OP, ROTARY_OP, ROTARY_WRITE, StageFit
from tests.dummy import (
    CONFIG,
    ONE_BUCKET,
    SETTINGS,
    SEVERAL_BUCKETS,
    TOKENS,
    VOCAB,
    Ask,
    assert_empty,
    differences,
    dummy_model,
    make_engine,
    serve,
)
from tests.goldens.golden import load_golden
from tests.parallel.models import GREEDY, MODELS, PROMPTS, answers, engine_of
from tests.selection import chosen, exhaustive_unless
from tests.workload import SMALL_POOL, requests

DEEP = dataclasses.replace(CONFIG, num_layers=5, sliding_windows=(None, 6, None, 6, None))
TIED = dataclasses.replace(DEEP, tie_word_embeddings=True)
EXPERTS = dataclasses.replace(MODELS["experts"], num_layers=5, sliding_windows=DEEP.sliding_windows, sparse_layers=(0, 1, 3))
SHAPES = {"two_layers": CONFIG, "deep": DEEP, "tied": TIED, "experts": EXPERTS}
SIZES = ((2, 1), (4, 1), (2, 2), (4, 2))
CASES = [("two_layers", 2, 1), *((name, *size) for name in ("deep", "tied", "experts") for size in SIZES)]
IN_CI = {("deep", 2, 2), ("tied", 4, 1), ("tied", 2, 1), ("experts", 4, 2)}
ASKS = [Ask(prompt, GREEDY) for prompt in PROMPTS]


def staged(pp: int, tp: int = 1, config=DEEP, **settings: Any) -> Engine:
    return engine_of(dummy_model(config=config), tp, pipeline_parallel_size=pp, **settings)


def runner_of(engine: Engine) -> PipelineRunner:
    assert isinstance(engine.runner, PipelineRunner)
    return engine.runner


@functools.cache
def of_one_stage(name: str, tp: int) -> dict:
    return answers(engine_of(dummy_model(config=SHAPES[name]), tp), ASKS)


# -- results


@pytest.mark.parametrize(
    ("name", "pp", "tp"), chosen(CASES, quick=lambda name, *_: name == "two_layers", in_ci=lambda *case: case in IN_CI)
)
def test_answers_are_those_of_one_stage_to_the_last_bit(name, pp, tp):
    assert differences(answers(staged(pp, tp, SHAPES[name]), ASKS), of_one_stage(name, tp)) == []


@pytest.mark.slow
@pytest.mark.parametrize("pp", exhaustive_unless(lambda pp: pp == 4, [2, 4]))
def test_every_parameter_preemptions_and_hits(pp):
    """The workload of the exactness suite: all sampling parameters, scores of prompts, n > 1, chunks, hits, in a small pool."""
    settings = {"bucket_plan": ONE_BUCKET, "pipeline_parallel_size": pp}
    engine = make_engine(dummy_model(config=DEEP), pool_pages=SMALL_POOL[True], **settings)
    run = serve(engine, requests(True))
    expected = serve(make_engine(dummy_model(config=DEEP), bucket_plan=ONE_BUCKET), requests(True))
    assert differences(run.answers, expected.answers) == []
    assert run.stats.num_preemptions and run.stats.num_hit_tokens and run.num_chunks and run.num_mixed_steps


# -- schedules


def groups(schedules: list[Schedule]) -> list[tuple]:
    """What is compared of each: who computes how many tokens from where."""
    found = []
    for s in schedules:
        order = sorted(range(s.num_seqs), key=lambda i: s.requests[i].order)
        found.append([(s.requests[i].order, int(s.starts[i]), int(s.q_lens[i])) for i in order])
    return found


def spied(scheduler: Any) -> list[Schedule]:
    seen, schedule = [], scheduler.schedule
    scheduler.schedule = lambda: [seen.append(made) for made in [schedule()] if made is not None] and seen[-1] or None
    return seen


def engine_to_compare(pp: int, seqs: int, pool_pages: int) -> tuple[Engine, list[tuple[int, int]]]:
    """An engine that has requests to serve, and (prompt, output) lengths of them."""
    rng = np.random.default_rng(3)
    work = [(int(rng.integers(1, 40)), int(rng.integers(1, 30))) for _ in range(24)]
    plan = BucketPlan(mixed=((TOKENS, seqs),), head_rows=(seqs,))
    settings = {"bucket_plan": plan, "max_num_seqs": seqs, "num_pages": 400, "enable_prefix_caching": False}
    model = dummy_model(config=CONFIG if pp == 2 else DEEP)
    engine = make_engine(model, pool_pages=pool_pages, pipeline_parallel_size=pp, **settings)
    for i, (length, outputs) in enumerate(work):
        prompt = rng.integers(1, VOCAB, length).tolist()
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True))
    return engine, work


def simulated(engine: Engine, work: list[tuple[int, int]], stages: list[BucketTimes], send: Any) -> tuple[PipelineReplica, list]:
    """A replica with the engine's limits that has served the same, and its schedules."""
    config, heads = engine.config, engine.config.plan.head_rows
    times = [StepTimeModel((one,), ((heads[0], 0.0),), heads, config.cache.page_size) for one in stages]
    records = RequestRecords(Workload("given", tuple(WorkloadRequest(*lengths) for lengths in work)))
    replica = PipelineReplica(records, config.plan, times, send, config.scheduler, engine.pool.num_pages, prefix_caching=False)
    replica._run_of_decodes = lambda until: False  # which are not scheduled one by one
    seen = spied(replica.scheduler)
    simulate(records, replica, None, None)
    return replica, seen


def stage_times(engine: Engine, base: float, per_kv_token: float, per_pair: float) -> BucketTimes:
    (bucket,) = engine.config.plan.buckets
    return BucketTimes(bucket.tokens, bucket.seqs, bucket.max_q_len, base, per_kv_token, per_pair)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "seqs"), [(2, 6), (4, 24)])
def test_the_engine_schedules_as_the_simulator(pp, seqs):
    """Step by step. Of two stages in whatever time steps take, with preemptions. Of four where steps are alike and as many
    micro-batches as stages can be had: else the simulator waits with the next until the first stage is free, when another may be
    back to be joined with it, and the engine does not wait."""
    unlike = small_pool = pp == 2
    engine, work = engine_to_compare(pp, seqs, 40 if small_pool else 400)
    seen = spied(engine.scheduler)
    most_in_flight = 0
    while engine.has_unfinished_requests():
        engine.step()
        most_in_flight = max(most_in_flight, engine.scheduler.num_steps_in_flight)
    assert most_in_flight == pp - 1, "and one more while a step waits for the oldest"
    stages = [stage_times(engine, 0.5 + k, 1e-3, 1e-3) if unlike else stage_times(engine, 1.0, 0.0, 0.0) for k in range(pp)]
    send = (lambda tokens, _: 1e-3 * tokens) if unlike else (lambda *_: 0.0)
    replica, expected = simulated(engine, work, stages, send)
    assert engine.scheduler.stats().num_preemptions == replica.stats.num_preemptions
    assert small_pool == bool(replica.stats.num_preemptions)
    assert groups(seen) == groups(expected)


def test_the_engine_counts_bubbles_as_the_simulator():
    """Of two stages whose steps take the simulator's times, in virtual time: a stage of the engine's ends a micro-batch so long
    after it could begin it, and nothing is sent, since the engine counts a send with the stage that receives."""
    engine, work = engine_to_compare(2, 6, 40)
    clock, in_flight = engine._clock, engine.pipeline.in_flight
    assert clock is not None
    stages = [stage_times(engine, 0.5, 1e-2, 2e-3), stage_times(engine, 0.7, 2e-3, 1e-3)]
    replica, _ = simulated(engine, work, stages, lambda *_: 0.0)
    _, seconds, _ = replica.stage_times

    def watch(results: Any, dispatched_at: float, has_prompts: bool) -> None:
        i, ends = len(clock._prefills), clock._ends
        returned = i - len(in_flight)  # so many are back, and the next is dispatched as soon as they are
        arrives = ends[-1][returned - 1] if returned else 0.0
        clock._dispatched.append(arrives)
        clock._prefills.append(has_prompts)
        for stage, mine in enumerate(ends):
            arrives = max(arrives, mine[-1] if mine else 0.0) + seconds[i, stage]
            mine.append(arrives)

    clock.watch = watch
    while engine.has_unfinished_requests():
        engine.step()
    assert len(clock._prefills) == len(seconds) > 50
    assert dataclasses.astuple(clock.bubbles) == pytest.approx(dataclasses.astuple(replica.bubbles), abs=1e-9)
    assert engine.bubbles == clock.bubbles
    lost = replica.bubbles
    assert min(lost.pb1, lost.pb2, lost.pb3) > 0.1, "some of every kind"


@pytest.mark.slow
def test_at_most_one_micro_batch_a_request():
    """Random requests come, are preempted and go away; all pages and rows are back in the end."""
    rng = np.random.default_rng(8)
    engine = make_engine(dummy_model(config=DEEP), pool_pages=30, bucket_plan=ONE_BUCKET, pipeline_parallel_size=4)
    names, flying = [], set()
    for step in range(400):
        if step < 250 and rng.random() < 0.3:
            names.append(str(step))
            params = SamplingParams(temperature=float(rng.random() < 0.5), seed=step, max_tokens=int(rng.integers(1, 20)))
            engine.add_request(names[-1], rng.integers(1, VOCAB, int(rng.integers(1, 50))).tolist(), params)
        if names and rng.random() < 0.05:
            engine.abort(str(rng.choice(names)))
        engine.step()
        engine.scheduler.check_invariants()
        held = [r.request_id for s in engine.pipeline.in_flight for r in s.schedule.requests if not r.finished]
        assert len(held) == len(set(held)), "a request is in two micro-batches"
        flying.add(len(engine.pipeline.in_flight))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.scheduler.stats().num_preemptions and flying == {0, 1, 2, 3}
    assert_empty(engine)


# -- what lies where


def test_a_stage_holds_its_layers_alone():
    engine = staged(4, config=TIED)
    runner, devices = runner_of(engine), jax.devices()
    assert [len(stage.state.kv_pages) for stage in runner.stages] == [2, 1, 1, 1]
    for i, stage in enumerate(runner.stages):
        arrays = [*stage.body_weights, *stage.head_weights, *jax.tree.leaves(stage.state)]
        assert {d for x in arrays for d in x.sharding.device_set} == {devices[i]}
    held = dict(zip(runner.programs.functions.paths, runner.programs.functions.weights, strict=True))
    assert held["layers/1/mlp/down_proj/kernel"].devices() == {devices[0]}
    assert held["layers/2/mlp/down_proj/kernel"].devices() == {devices[1]} and held["final_norm/scale"].devices() == {devices[3]}
    first, last = runner.stages[0].state.rows, runner.stages[-1].state.rows
    assert first.history is None and first.last_tokens is None and None not in (last.history, last.last_tokens)
    assert engine.config.pages.num_layers == 2 and engine.description.pipeline_parallel_size == 4
    assert engine.describe().startswith("stages: 4; ")


@pytest.mark.slow
def test_what_the_first_steps_do_not_need_is_compiled_behind_them():
    engine = staged(2, warm_up="background", bucket_plan=SEVERAL_BUCKETS)
    assert engine._warm_up is not None and engine.runner.programs.num_compiled < len(engine.runner.programs.keys)
    assert answers(engine, ASKS) == of_one_stage("deep", 1)
    assert engine._warm_up.wait(180) and engine.runner.programs.num_compiled == len(engine.runner.programs.keys)


@pytest.mark.slow
@pytest.mark.parametrize("size", exhaustive_unless(lambda size: size == (4, 2), [(2, 2), (4, 1), (4, 2)]), ids=str)
def test_nothing_compiles_after_warm_up(size):
    engine = staged(*size, warm_up="all")
    before = compile_counts().programs
    answers(engine, ASKS)
    assert compile_counts().programs == before


@pytest.mark.slow
def test_new_weights_and_sleep():
    engine, other = staged(2, config=TIED), jax.tree.map(lambda x: x * 1.25, named_leaves(dummy_model(config=TIED)))
    of_one = engine_of(dummy_model(config=TIED), 1)
    of_one.update_params(other)
    expected, before_update = answers(of_one, ASKS), of_one_stage("tied", 1)
    engine.update_params(other)
    assert answers(engine, ASKS) == expected
    before = compile_counts().programs
    engine.sleep()
    assert all(isinstance(x, np.ndarray) for x in runner_of(engine).programs.functions.weights)
    engine.wake_up(["weights"])
    engine.wake_up(["kv_cache"])
    assert answers(engine, ASKS) == expected
    engine.sleep(level=2)
    engine.wake_up()
    engine.update_params(named_leaves(dummy_model(config=TIED)))
    assert answers(engine, ASKS) == before_update
    assert compile_counts().programs == before


@pytest.mark.slow
@pytest.mark.parametrize("size", exhaustive_unless(lambda size: size == (2, 2), [(2, 1), (2, 2)]), ids=str)
def test_an_llm_reads_files_stage_by_stage(size, tmp_path):
    golden = load_golden("qwen3_moe").weights
    options: dict[str, Any] = {**SETTINGS, "num_pages": 64, "max_model_len": 48, "dtype": "float32"}
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": [3]}]

    def tokens(folder, **sizes) -> list[list[int]]:
        llm = LLM(folder, skip_tokenizer_init=True, **sizes, **options)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]

    sizes = dict(zip(("pipeline_parallel_size", "tensor_parallel_size"), size, strict=True))
    assert tokens(golden, **sizes) == tokens(golden)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 2)])
def test_a_saved_version_is_read_stage_by_stage(pp, tp, tmp_path):
    saved = orbax.save(tmp_path / "checkpoint", named_leaves(dummy_model(config=TIED)))
    meshes = stage_meshes(pp, tp)
    shards = ModelShards(TIED, meshes[0], later=meshes[1:])
    for transposed in (False, True):
        found = load_version_cut(saved, shards, dtype="float32", transposed=transposed)
        engine = Engine(found, EngineConfig(**SETTINGS, pipeline_parallel_size=pp, tensor_parallel_size=tp))
        assert {id(x) for x in engine.runner.programs.functions.weights} == {id(x) for x in found.weights.values()}
        expected = shard_model(dummy_model(config=TIED, transposed=transposed), shards)
        for path, weight in expected.weights.items():
            other = found.weights[path]
            assert weight.sharding.is_equivalent_to(other.sharding, weight.ndim) and (np.asarray(weight) == np.asarray(other)).all()
        engine.update_params(expected)  # as it is, whoever placed it


@pytest.mark.slow
def test_bits_do_not_follow_the_bucket_over_stages():
    settings = {"deterministic": "always", "bucket_plan": SEVERAL_BUCKETS}
    of_one = answers(engine_of(dummy_model(), 1, **settings), ASKS)
    assert differences(answers(staged(2, config=CONFIG, **settings), ASKS), of_one) == []


# -- meshes, and what is refused


def test_stages_are_entries_of_a_meshs_axis():
    devices = np.array(jax.devices()[::-1][:4]).reshape(2, 2)
    engine = engine_of(dummy_model(config=DEEP), 1, mesh=Mesh(devices.T, ("tp", "pp")))
    held = [stage.state.kv_pages[0].sharding.device_set for stage in runner_of(engine).stages]
    assert held == [set(stage) for stage in devices]
    assert engine.config.engine.pipeline_parallel_size == engine.config.engine.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("settings", "axes", "kind", "message"),
    [
        (
            {"pipeline_parallel_size": 3},
            None,
            ValueError,
            "pipeline_parallel_size=3 needs a layer for each stage, and the model has 2",
        ),
        ({"pipeline_parallel_size": 9}, None, ValueError, "pipeline_parallel_size=9 with tensor_parallel_size=1 needs 9 devices"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 8}, None, ValueError, "needs 16 devices, and this process has 8"),
        ({"pipeline_parallel_size": 2}, ("pp", "tp", 4, 2), ValueError, "contradicts the mesh, whose axis 'pp' has 4"),
        ({"pipeline_parallel_size": 2}, ("x", "tp", 1, 8), ValueError, "contradicts the mesh, whose axis 'pp' has 1"),
        ({}, ("pp", "x", 2, 4), ValueError, "mesh has the axes x=4; it needs one named 'tp'"),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            None,
            NotImplementedError,
            "speculative_config: drafts are not verified over stages, and pipeline_parallel_size=2",
        ),
    ],
)
def test_what_can_not_be_is_refused(settings, axes, kind, message):
    mesh = None if axes is None else Mesh(np.array(jax.devices()).reshape(axes[2:]), axes[:2])
    with pytest.raises(kind, match=message):
        Engine(dummy_model(), EngineConfig(**SETTINGS, **settings), mesh=mesh)


class CompilerOf:
    """Stands in for aot_check's compiler: a body calls its kernels once for each array of pages that it is given, sums twice for
    each, and once more where nothing comes from a stage before."""

    mosaic_kernels = (
        Kernel(ATTENTION, "mosaic", "sm_90a", 200, 0, 0, 0, 1000, uses=("TMA", "wgmma from registers")),
        Kernel(FUSED_MATMUL, "mosaic", "sm_90a", 200, 0, 0, 0, 1000, uses=("TMA", "wgmma from registers")),
        Kernel(ROTARY_WRITE, "mosaic", "sm_90a", 200, 0, 0, 0, 1000),
    )

    def __init__(self, missing: str = ""):
        self.missing = missing  # the program that lacks one sum
        self.meshes: dict[str, Any] = {}  # of each program

    def compile(self, name: str, function: Any, args: Any, *, donate: Any = (), options: Any) -> CompiledReport:
        (mesh,) = {x.sharding.mesh for x in jax.tree.leaves(args)}
        self.meshes[name] = mesh
        kinds = {"state": [], "rows ": ["CollectivePermute"]}.get(name[:5], ["CommandBuffer"])
        report = CompiledReport(name, thunks=[Thunk(kind, "", False) for kind in kinds])
        if not name.startswith("body"):
            return report
        pages = args[1].kv_pages
        calls = [ATTENTION_OP, ROTARY_OP, *[FUSED_OP] * 2] * len(pages)
        sums = 2 * len(pages) + (len(args) == 3) - (name == self.missing)
        instructions = [Instruction(f"{i}", "custom-call", (), (), op, "mosaic_gpu_v2") for i, op in enumerate(calls)]
        instructions += [Instruction(f"{i}", "all-reduce", (), (), "", "") for i in range(sums)]
        held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in pages)
        return dataclasses.replace(report, instructions=instructions, alias_bytes=held)


def aot_step(num_stages: int, **options: Any) -> AbstractStep:
    """Qwen3-0.6B on stages of two H100s, as aot_check has it."""
    mesh = Mesh(np.array(jax.devices()[: 2 * num_stages]).reshape(num_stages, 2), ("pp", "tp"))
    given = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": 2, "graph_collectives": True}
    given |= {"dtype": "bfloat16", "attention_backend": "mosaic_sm90", "max_model_len": 2048, **options}
    return AbstractStep.make(read_config("qwen3-0.6b"), given, "h100", 0.75, mesh)


def test_aot_check_compiles_the_stages_whose_programs_differ():
    step, compiler = aot_step(4), CompilerOf()
    result = check_step(step, cast(Compiler, compiler), step.default_buckets()[:1])
    assert result.faults == []
    devices = jax.devices()
    where = {name: list(mesh.devices.flat) for name, mesh in compiler.meshes.items()}
    assert where["body decode(8,8) of stage 0"] == devices[:2] and where["body decode(8,8) of stage 1"] == devices[2:4]
    assert where["head(8) of stage 3"] == where["score of stage 3"] == devices[6:]
    assert where["rows of body decode(8,8) to stage 1"] == devices[:4]
    assert len(where) == 3 * 3 + 3 + 2 and not any("head" in name or "stage 2" in name for name in where if "stage 3" not in name)
    [fault] = check_step(step, cast(Compiler, CompilerOf("body decode(8,8) of stage 1")), step.default_buckets()[:1]).faults
    assert fault == "body decode(8,8) of stage 1: 13 sums over devices; must be 14, those of the layers and that of the embedding"


def test_the_stage_with_the_least_room_bounds_the_pool_that_aot_check_reports():
    reserve, limit = 123 << 20, int(0.75 * 84_942_979_072)
    fit = aot_step(3, gpu_memory_utilization=0.05).fit(reserve)
    layer = 2 * (1024 * 4096 // 2 + 2048 * 1024 // 2 + 3 * 1024 * 3072 // 2 + 2 * 1024 + 2 * 128)  # bytes, of one of two devices
    embedding, norm = 2 * 76_032 * 1024, 2 * 1024  # of 151,936 words, 152,064 with those of zeros
    weights = [embedding + 10 * layer, 9 * layer, 9 * layer + norm + embedding]  # tied: the last stage has a copy
    pages = [layers * 2 * 4 * 64 * 128 * 2 for layers in (10, 9, 9)]
    room = [(int(0.05 * limit) - w - reserve - fit.edits) // page for w, page in zip(weights, pages, strict=True)]
    assert list(fit.stages) == [StageFit(*one) for one in zip((10, 9, 9), weights, pages, room, strict=True)]
    assert fit.num_pages == room[0] < min(room[1:]) and fit.weights == weights[0]
    _, *lines = str(fit).splitlines()
    assert lines[0].startswith("    stage 0: 10 layers") and ["bounds the pool" in line for line in lines] == [True, False, False]
