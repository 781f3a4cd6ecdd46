"""`deterministic="always"` on several devices: tokens and log-probabilities are those of one device to the last bit, and each part
that makes them so is found out where it is broken. And the order of sums over the CPU devices of one process."""

import functools
import gc
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxserve.engine.resolution
import jaxserve.engine.sharding
from jaxserve import SamplingParams
from jaxserve.execution.mesh_programs import run_on_mesh
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.models.layers import Attention, causal_attention
from jaxserve.models.row_tiles import RowTiles
from jaxserve.models.shard_placement import shard_model
from jaxserve.models.shards import ModelShards
from jaxserve.parallel.mesh import AXIS, make_mesh
from jaxserve.parallel.shard import Shard
from jaxserve.sampling import sampler, scoring
from kernels.all_reduce import all_reduce, reference
from kernels.all_reduce.cases import CASES as SUMS
from kernels.all_reduce.cases import build
from kernels.cpu import library
from tests import dummy
from tests.dummy import CONFIG, ONE_BUCKET, Answer, Ask, differences, dummy_model, make_engine, serve, serve_alone
from tests.parallel.models import GREEDY, MODELS, PROMPTS, answers, engine_of
from tests.selection import exhaustive_unless
from tests.workload import requests

OPTIMISED = True
ALWAYS: dict[str, Any] = {"deterministic": "always", "attention_backend": "xla", "matmul_backend": "xla", "moe_backend": "xla"}
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=10, ignore_eos=True, logprobs=3, repetition_penalty=1.2)
ASKS = [*(Ask(prompt, GREEDY) for prompt in PROMPTS[:3]), Ask(PROMPTS[1], DRAWN)]
CASES = [
    *(("float32", name, tp) for name in MODELS for tp in (2, 4, 8)),
    *(("bfloat16", name, 8) for name in MODELS),
    ("bfloat16", "gqa", 2),
    ("bfloat16", "mqa_biases", 4),
]
IN_CI = {  # each model, number of devices and dtype
    *(("float32", name, 8) for name in ("odd_groups_tied", "three_kv_heads", "experts_and_dense")),
    *(("float32", "gqa", 2), ("float32", "experts", 4), ("bfloat16", "mqa_biases", 4)),
}
BY_DEFAULT = [(*kind, tp) for kind in (*(("float32", name) for name in MODELS), ("bfloat16", "gqa")) for tp in (2, 4, 8)]
IN_CI_BY_DEFAULT = {("float32", "experts", 2), ("bfloat16", "gqa", 4), ("float32", "experts", 8)}


def served(tp: int, asks: list[Ask], config=CONFIG, dtype: str = "float32", transposed: bool = False) -> dict[str, Answer]:
    return answers(engine_of(dummy_model(dtype, config, transposed=transposed), tp, **ALWAYS), asks)


@functools.cache
def of_one_device(dtype: str, name: str) -> dict[str, Answer]:
    return served(1, ASKS, MODELS[name], dtype, transposed=True)


@functools.cache
def served_by_default(dtype: str, name: str, tp: int) -> dict[str, Answer]:
    engine = engine_of(dummy_model(dtype, MODELS[name]), tp, deterministic="always")
    assert "attention: cpu; rotary write: cpu; matmuls: cpu" in engine.describe()
    return answers(engine, ASKS)


@pytest.mark.slow
@pytest.mark.parametrize("case", exhaustive_unless(lambda x: x in IN_CI, CASES), ids=str)
def test_bits_are_those_of_one_device(case):
    """The weights of one device lie as a CPU reads them fastest, the others as a trainer has them."""
    dtype, name, tp = case
    assert differences(served(tp, ASKS, MODELS[name], dtype), of_one_device(dtype, name)) == []


@pytest.mark.slow
@pytest.mark.skipif(library.load() is None, reason="needs the library that kernels/cpu/build.py makes")
@pytest.mark.parametrize("case", exhaustive_unless(lambda x: x in IN_CI_BY_DEFAULT, BY_DEFAULT), ids=str)
def test_bits_are_those_of_one_device_by_default(case):
    """With the kernels for CPUs, which an engine takes by itself."""
    dtype, name, tp = case
    assert differences(served_by_default(dtype, name, tp), served_by_default(dtype, name, 1)) == []


def test_a_layer_of_two_and_four_devices_gives_equal_bits_and_sums_nothing_over_them():
    """The quick relative of the others. Four devices have each KV head twice."""
    x = np.random.default_rng(0).standard_normal((20, CONFIG.hidden_size)).astype(np.float32)
    found = []
    for tp in (2, 4):
        mesh = make_mesh(tp)
        assert mesh is not None
        model = shard_model(dummy_model(transposed=True), ModelShards(CONFIG, mesh, whole_sums=True))
        functions = ModelFunctions(model, map_rows=RowTiles(16))
        args = functions.abstract, jax.ShapeDtypeStruct(x.shape, x.dtype)
        run = jax.jit(run_on_mesh(functools.partial(first_layer, functions), mesh, args, P()))
        compiled = run.lower(functions.weights, x).compile()
        found.append(np.asarray(compiled(functions.weights, x)))
        assert collectives(compiled.as_text() or "") == {"all-gather": 4}
    np.testing.assert_array_equal(*found)
    assert len(np.unique(found[0])) > 600


def first_layer(functions: ModelFunctions, weights: list[jax.Array], x: jax.Array) -> jax.Array:
    model = functions.module(range(len(weights)), weights)

    def attend(q, k, v):
        return causal_attention(q[None], k[None], v[None])[0], None

    rope = model.rope(jnp.arange(len(x)))
    return model.layers[0](x, rope, attend, map_rows=functions.map_rows, shard=functions.shard)[0]


def collectives(hlo: str) -> dict[str, int]:
    return Counter(re.findall(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", hlo))


@pytest.mark.parametrize("backend", ["xla", "in_order"])
@pytest.mark.parametrize("case", [case for case in SUMS if case.num_devices in (4, 8)], ids=lambda case: case.name)
def test_a_sum_over_cpu_devices_of_one_process_is_the_specifications(case, backend):
    """XLA's own has the order of "in_order": what is gathered and added over several processes has the bits of one."""
    mesh, parts = Mesh(np.array(jax.devices()[: case.num_devices]), ("tp",)), build(case)

    def sum_of(part: jax.Array) -> jax.Array:  # [1, ...] of each device
        return all_reduce(part[0], axis="tp", num_devices=case.num_devices, backend=backend)

    on_mesh = jax.shard_map(sum_of, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False)
    found = np.asarray(jax.jit(on_mesh)(parts))
    expected = reference.all_reduce(parts) if case.dtype != "int32" else parts.sum(0)
    assert found.dtype == parts.dtype and (found == expected).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "experts"])
def test_a_body_sums_no_float_over_devices(name):
    engine = engine_of(dummy_model(config=MODELS[name]), 4, **ALWAYS)
    program: Any = engine.runner.programs.get(engine.config.plan.buckets[-1])
    text = program.as_text()
    kinds = re.findall(r" = \(?(\w+)\[\S* (?:\S+ )*all-reduce(?:-start)?\(", text)
    assert kinds and set(kinds) <= {"s32"}, "bits of the embedding, and of experts' rows"
    assert collectives(text)["all-gather"] == {"gqa": 4, "experts": 2}[name] * engine.config.model.num_layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "tp, speculative",
    [
        pytest.param(2, None, marks=pytest.mark.exhaustive),
        (4, {"num_speculative_tokens": 3}),
        pytest.param(8, None, marks=pytest.mark.exhaustive),
    ],
)
def test_among_others_as_alone_on_one_device(tp, speculative):
    """Chunks, preemption, prefix hits, edits, masks, drafts, in the default plan's buckets."""
    model, asks = dummy_model(transposed=True), requests(True, logprobs=True)[:9]
    expected = serve_alone(model, asks, bucket_plan=ONE_BUCKET, **ALWAYS)
    engine = make_engine(model, pool_pages=20, tensor_parallel_size=tp, speculative_config=speculative, **ALWAYS)
    run = serve(engine, asks)
    assert len(engine.stats.padding.steps) >= 3 and run.num_chunks and run.stats.num_hit_tokens and run.stats.num_preemptions
    assert differences(run.answers, expected) == []


# -- the parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_a_table_keeps_its_bits(dtype):
    """Zeros of both signs, numbers that a sum would flush, NaN."""
    values = np.array([-0.0, 0.0, 1e-40, -3.5, np.nan, np.inf], np.float32)
    table = jnp.asarray(np.resize(values, (16, 6)), dtype)
    shard, mesh = Shard(AXIS, 4), make_mesh(4)
    look_up = jax.shard_map(shard.look_up, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(), check_vma=False)
    ids = np.array([0, 15, 7, 3, 8], np.int32)
    found = np.asarray(jax.jit(look_up)(table, ids))
    width = f"u{found.dtype.itemsize}"
    np.testing.assert_array_equal(found.view(width), np.asarray(table)[ids].view(width))


@pytest.mark.slow
@pytest.mark.parametrize("V", [2000, 33001])
@pytest.mark.parametrize("one_shape", [True, False])
def test_scores_have_the_bits_of_one_device(V, one_shape):
    """If blocks are of one shape; and they are right in any case."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 32)).astype(np.float32)
    weight = (0.5 * rng.standard_normal((V, 32))).astype(np.float32)
    tokens = rng.integers(0, V, 16).astype(np.int32)

    def scored(tp: int) -> list[np.ndarray]:
        how = {"max_logprobs": 4, "vocab_size": V, "one_shape": one_shape}
        if tp == 1:
            return jax.tree.leaves(jax.jit(lambda x, w, t: scoring.score(x, w, 0, t, jnp.bool_(True), **how))(x, weight, tokens))
        padded = np.pad(weight, ((0, -V % (128 * tp)), (0, 0)))
        shard = Shard(AXIS, tp)
        score = jax.shard_map(
            lambda x, w, t: scoring.score(x, w, 0, t, jnp.bool_(True), shard=shard, **how),
            mesh=make_mesh(tp),
            in_specs=(P(), P(AXIS), P()),
            out_specs=P(),
            check_vma=False,
        )
        return jax.tree.leaves(jax.jit(score)(x, padded, tokens))

    one = scored(1)
    for tp in (2, 8) if one_shape else ():
        for found, expected in zip(scored(tp), one, strict=True):
            np.testing.assert_array_equal(found, expected)
    logits = x.astype(np.float64) @ weight.astype(np.float64).T
    exact = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(one[0], exact[np.arange(16), tokens], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("V", [300, 5000])
def test_logprobs_have_the_bits_of_one_device(V):
    rng = np.random.default_rng(0)
    logits, tokens = (2 * rng.standard_normal((200, V))).astype(np.float32), rng.integers(0, V, 200).astype(np.int32)

    def logprobs(tp: int) -> list[np.ndarray]:
        of = functools.partial(sampler.token_logprobs, n=4, map_rows=RowTiles(16))
        if tp == 1:
            return jax.tree.leaves(jax.jit(of)(logits, tokens))
        of = functools.partial(of, shard=Shard(AXIS, tp))
        on_mesh = jax.shard_map(of, mesh=make_mesh(tp), in_specs=(P(None, AXIS), P()), out_specs=P(), check_vma=False)
        padded = np.pad(logits, ((0, 0), (0, -V % (128 * tp))), constant_values=-np.inf)
        return jax.tree.leaves(jax.jit(on_mesh)(padded, tokens))

    one = logprobs(1)
    for tp in (2, 4, 8):
        for found, expected in zip(logprobs(tp), one, strict=True):
            np.testing.assert_array_equal(found, expected)


# -- the checks can fail


@pytest.mark.slow
def test_found_out_where_contractions_are_cut(monkeypatch):
    monkeypatch.setattr(jaxserve.engine.sharding, "ModelShards", lambda *args, **_: ModelShards(*args))
    assert differences(served(8, ASKS), of_one_device("float32", "gqa")) != []


@pytest.mark.slow
def test_found_out_where_groups_of_heads_have_other_sizes(monkeypatch):
    monkeypatch.setattr(Attention, "fill_groups", lambda self, q: q)
    monkeypatch.setattr(Attention, "empty_groups", lambda self, o: o)
    assert differences(served(8, ASKS), of_one_device("float32", "gqa")) != []


@pytest.mark.slow
def test_found_out_where_a_cpu_has_the_weight_on_the_right(monkeypatch):
    monkeypatch.setattr(jaxserve.engine.resolution, "transpose_sharded", lambda model: model)
    assert differences(served(8, ASKS), of_one_device("float32", "gqa")) != []


@pytest.fixture(autouse=True)
def _few_programs():
    """See tests/engine/test_deterministic.py."""
    yield
    dummy.forget()
    jax.clear_caches()
    gc.collect()
