"""Engines on 1, 2 and 4 devices share a store of KV: what one has saved another loads, head by head in its place."""

import contextlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve import SamplingParams
from jaxserve.execution.compilation import compile_counts
from tests.dummy import ONE_BUCKET, Ask, assert_empty, differences, dummy_model, make_engine, serve
from tests.engine.storing import NAME, counts, prompt, settle, stored
from tests.parallel.eight_devices.equal_bits import ALWAYS
from tests.parallel.models import MODELS, engine_of

# Bits do not depend on the number of devices with deterministic="always": whose answers are not those of one device to the last
# log-probability has loaded something else.
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, logprobs=2)
ASKS = [Ask(prompt(n, seed=n), DRAWN) for n in (21, 30, 12)]
CASES = [  # whole heads and copies, one of zeros, copies alone
    ("gqa", "float32", (1, 2, 4)),
    ("three_kv_heads", "float32", (1, 2)),
    ("mqa_biases", "bfloat16", (1, 4)),
]


def engine_at(tp: int, model: Any, folder: Any, **settings: Any):
    engine = make_engine(
        model,
        bucket_plan=ONE_BUCKET,
        tensor_parallel_size=tp,
        kv_store=f"disk:{folder}:16MiB",
        weights_id=NAME,
        **{**ALWAYS, **settings},
    )
    stored(engine).load_seconds = 60.0
    return contextlib.closing(engine)


@pytest.mark.parametrize(("name", "dtype", "sizes"), CASES)
def test_what_one_engine_saves_others_load(tmp_path, name, dtype, sizes):
    model = dummy_model(dtype, MODELS[name], transposed=True)
    right = serve(make_engine(model, bucket_plan=ONE_BUCKET, **ALWAYS), ASKS).answers
    num_full = sum((len(ask.prompt) - 1) // 4 * 4 for ask in ASKS)  # the last token is computed
    names, blobs = set(), []
    for saves in sizes:
        folder = tmp_path / str(saves)
        with engine_at(saves, model, folder) as engine:
            assert differences(serve(engine, ASKS).answers, right) == []
            settle(engine)
            names.add(engine.pool.root_names[0])
        blobs.append({path.name: path.read_bytes() for path in folder.rglob("*.kv")})
        for loads in sizes:
            with engine_at(loads, model, folder) as engine:
                assert differences(serve(engine, ASKS).answers, right) == []
                assert counts(engine).num_hit_tokens == num_full, f"from {saves} devices to {loads}"
                assert counts(engine).num_failed_loads == 0
                assert_empty(engine)
    assert len(names) == 1, "pages have one name"
    assert blobs[0] and all(blob == blobs[0] for blob in blobs), "and are the same bytes"


def test_nothing_compiles_after_warm_up(tmp_path):
    with engine_at(2, dummy_model(), tmp_path, warm_up="first_use", compile_anew="all") as engine:
        engine.runner.warm_up()
        before = compile_counts().programs
        for _ in range(2):
            serve(engine, ASKS)
            settle(engine)
            engine.reset_prefix_cache()
        assert counts(engine).num_hit_tokens and compile_counts().programs == before


def test_devices_move_their_own_heads_alone(tmp_path):
    """`take` and `put` have no message between devices, and no device a head of another."""
    with engine_at(4, dummy_model(config=MODELS["three_kv_heads"]), tmp_path) as engine:
        programs: Any = engine.runner.programs
        for key in ("take", "put"):
            text = programs.get(key).as_text()
            for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
                assert f" {collective}" not in text, key
        runner: Any = engine.runner
        taken = runner.take_pages([0])
        assert taken.kv.shape[3] == 12 and taken.kv.addressable_shards[0].data.shape[3] == 3  # each head four times
        assert np.asarray(taken).shape[3] == 3


def test_an_engine_on_a_mesh_of_one_other_device_has_a_store(tmp_path):
    mesh = Mesh(np.array(jax.devices()[3:4]), ("tp",))
    settings = {"kv_store": f"disk:{tmp_path}:16MiB", **ALWAYS}
    with contextlib.closing(engine_of(dummy_model(), 1, mesh=mesh, **settings)) as engine:
        first = serve(engine, ASKS).answers
        settle(engine)
        engine.reset_prefix_cache()
        assert differences(serve(engine, ASKS).answers, first) == [] and counts(engine).num_hit_tokens
