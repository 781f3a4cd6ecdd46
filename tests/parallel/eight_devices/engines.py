"""Engines on 2, 4 and 8 devices answer as on one, compile nothing after warm-up, and their programs hold what they should."""

import functools
import itertools
import math
import re
from dataclasses import replace

import jax
import pytest

from jaxserve import EngineConfig
from jaxserve.buckets.plan import Bucket
from jaxserve.engine.measure import StepMeasurer
from jaxserve.execution.compilation import compile_counts
from jaxserve.sampling.sampler import NUM_CANDIDATES
from kernels.cpu import library
from tests.dummy import SEQS, SETTINGS, TOKENS, Ask, dummy_model, stages
from tests.parallel.models import GREEDY, MODELS, PROMPTS, answers, assert_like_one_device, engine_of
from tests.selection import chosen, exhaustive_unless

FAST = {("odd_groups_tied", 4)}
IN_CI = set(zip(MODELS, itertools.cycle((2, 4, 8)), strict=False))
IN_CI_TRANSPOSED = {("gqa", 2), ("mqa_biases", 4), ("experts", 8)}
ASKS = [Ask(prompt, GREEDY) for prompt in PROMPTS]


@functools.cache
def of_one_device(name: str, transposed: bool) -> dict:
    return answers(engine_of(dummy_model(config=MODELS[name], transposed=transposed), 1), ASKS)


@pytest.mark.parametrize(
    ("name", "tp"), chosen(itertools.product(MODELS, (2, 4, 8)), quick=lambda *x: x in FAST, in_ci=lambda *x: x in IN_CI)
)
def test_answers_are_those_of_one_device(name, tp):
    assert_answers_of_one_device(name, tp, transposed=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", exhaustive_unless(lambda x: x in IN_CI_TRANSPOSED, itertools.product(MODELS, (2, 4, 8))), ids=str)
def test_answers_with_weights_as_a_cpu_reads_them(case):
    assert_answers_of_one_device(*case, transposed=True)


def assert_answers_of_one_device(name: str, tp: int, *, transposed: bool) -> None:
    engine = engine_of(dummy_model(config=MODELS[name], transposed=transposed), tp)
    assert_like_one_device(answers(engine, ASKS), of_one_device(name, transposed))


@pytest.mark.parametrize(
    ("name", "tp"),
    chosen(
        itertools.product(("gqa", "experts"), (2, 4, 8)),
        quick=lambda *_: False,
        in_ci=lambda *x: x in {("gqa", 2), ("experts", 4), ("gqa", 8)},
    ),
)
def test_nothing_compiles_after_warm_up(name, tp):
    engine = engine_of(dummy_model(config=MODELS[name]), tp, warm_up="all")
    before = compile_counts().programs
    answers(engine, ASKS)
    assert compile_counts().programs == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "gqa"])
def test_a_body_has_two_reductions_a_layer_and_copies_no_page(name):
    engine = engine_of(dummy_model(config=MODELS[name]), 4)
    programs = stages(engine)[0].programs
    text = programs.get(engine.config.plan.buckets[-1]).as_text()
    layers = engine.config.model.num_layers
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 2 * layers + 1, "two a layer, and that of the embedding"
    assert not re.search(r" (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    pages = stages(engine)[0].state.kv_pages[0]
    shape = ",".join(map(str, pages.sharding.shard_shape(pages.shape)))
    assert shape in text and not re.search(rf"\[{shape}\]\S* copy\(", text)
    before = [x.unsafe_buffer_pointer() for page in stages(engine)[0].state.kv_pages for x in shards_of(page)]
    answers(engine, ASKS[:1])
    assert [x.unsafe_buffer_pointer() for page in stages(engine)[0].state.kv_pages for x in shards_of(page)] == before


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 8])
def test_heads_and_scores_gather_no_logits(tp):
    """What passes between devices is of the likeliest entries of each, never of the vocabulary; and how often is bounded."""
    vocabulary = 20_000
    engine = engine_of(dummy_model(config=replace(MODELS["gqa"], vocab_size=vocabulary)), tp)
    programs = stages(engine)[0].programs
    heads = {key: key[0] for key in programs.keys if isinstance(key, tuple) and not isinstance(key, Bucket)}
    assert set(heads) == {(SEQS, False), (SEQS, True)}
    for key, (num_rows, most) in {**{key: (rows, 24) for key, rows in heads.items()}, "score": (TOKENS, 6)}.items():
        sizes = collectives(programs.get(key).as_text())
        assert 0 < len(sizes) <= most, f"{key}: {sizes}"
        assert max(sizes) <= num_rows * NUM_CANDIDATES * tp < num_rows * vocabulary // 2, f"{key}: {sizes}"


def collectives(text: str) -> list[int]:
    """How many elements the largest result of each collective of a program has."""
    found = re.findall(r" = (\S.*?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    return [max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", shape)) for shape in found]


def shards_of(x: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in x.addressable_shards]


def test_a_device_holds_its_part_of_weights_and_pages():
    engine = engine_of(dummy_model(), 4)
    held = dict(zip(engine.runner.programs.functions.paths, engine.runner.programs.functions.weights, strict=True))
    assert {len(x.sharding.device_set) for x in held.values()} == {4}
    assert held["layers/0/mlp/gate_up_proj/kernel"].addressable_shards[0].data.shape == (32, 2 * 48 // 4)
    assert held["lm_head/kernel"].addressable_shards[0].data.shape == (32, 128)
    assert stages(engine)[0].state.kv_pages[0].addressable_shards[0].data.shape == (64, 2, 1, 4, 8)  # each KV head twice
    assert engine.config.pages.page_bytes == 2 * 2 * 4 * 8 * 4
    assert engine.description.tensor_parallel_size == 4 and engine.describe().startswith("devices: 4; ")


@pytest.mark.slow
def test_a_profile_of_several_devices_is_measured_and_budgets_their_steps(tmp_path):
    """Steps run on two devices; the profile is of two, and an engine on one refuses it."""
    config = EngineConfig(**{**SETTINGS, "num_pages": 64, "max_model_len": 64, "tensor_parallel_size": 2})
    measurer = StepMeasurer(dummy_model(), config, multiple=4, min_seconds=0.001)
    fitted, points = measurer.run(rounds=1, max_buckets=16)
    pages = measurer.runner.state.kv_pages[0]
    assert len(pages.sharding.device_set) == 2 and fitted.error(points)["num_points"] == len(points) > 8
    path = tmp_path / "steps.json"
    replace(fitted, about={"tensor_parallel_size": measurer.config.engine.tensor_parallel_size}).save(path)
    options = {"tbt_slo_ms": 60_000, "step_times": str(path), "page_size": SETTINGS["page_size"]}
    found = answers(engine_of(dummy_model(), 2, **options), ASKS)
    assert_like_one_device(found, of_one_device("gqa", False))
    with pytest.raises(ValueError, match="measured with tensor_parallel_size=2, not 1: give tensor_parallel_size=2"):
        engine_of(dummy_model(), 1, **options)


@pytest.mark.slow
@pytest.mark.skipif(library.load() is None, reason="needs the library that kernels/cpu/build.py makes")
def test_kernels_for_cpus_by_name_answer_as_on_one_device():
    """With "bucket" "auto" leaves them out on several devices; by name they compute, and what is cut is summed."""
    name = "mqa_biases"
    engine = engine_of(dummy_model(config=MODELS[name], transposed=True), 2, attention_backend="cpu", matmul_backend="cpu")
    assert_like_one_device(answers(engine, ASKS), of_one_device(name, True))
