"""Engines of several layouts share a store of KV: what one has saved another loads, each layer and head in its place."""

import contextlib
import dataclasses
import random
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve import SamplingParams
from jaxserve.execution.compilation import compile_counts
from jaxserve.kv_store.host import HostTier
from jaxserve.kv_store.store import TieredStore
from tests.dummy import ONE_BUCKET, Ask, assert_empty, differences, dummy_model, make_engine, serve
from tests.engine.store_faults import Flaky
from tests.engine.store_fuzz import Fuzz, converse
from tests.engine.storing import NAME, counts, prompt, settle, stored
from tests.parallel.eight_devices.equal_bits import ALWAYS
from tests.parallel.models import MODELS, assert_like_one_device, engine_of
from tests.selection import exhaustive_unless

# Bits do not depend on the number of devices with deterministic="always": whose answers are not those of one device to the last
# log-probability has loaded something else.
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, logprobs=2)
ASKS = [Ask(prompt(n, seed=n), DRAWN) for n in (21, 30, 12)]
DEEP = dataclasses.replace(MODELS["three_kv_heads"], num_layers=3, sliding_windows=(None, 6, None))
CASES = [  # (stages, devices of each): whole heads and copies, one of zeros, copies alone; stages of unlike many layers
    (MODELS["gqa"], "float32", ((1, 1), (1, 2), (1, 4))),
    (MODELS["three_kv_heads"], "float32", ((1, 1), (1, 2))),
    (MODELS["mqa_biases"], "bfloat16", ((1, 1), (1, 4))),
    (DEEP, "float32", ((1, 1), (2, 2))),
]


def engine_at(size: tuple[int, int], model: Any, folder: Any, **settings: Any):
    engine = make_engine(
        model,
        bucket_plan=ONE_BUCKET,
        pipeline_parallel_size=size[0],
        tensor_parallel_size=size[1],
        kv_store=f"disk:{folder}:16MiB",
        weights_id=NAME,
        **{**ALWAYS, **settings},
    )
    stored(engine).load_seconds = 60.0
    return contextlib.closing(engine)


@pytest.mark.parametrize(("config", "dtype", "sizes"), CASES)
def test_what_one_engine_saves_others_load(tmp_path, config, dtype, sizes):
    model = dummy_model(dtype, config, transposed=True)
    right = serve(make_engine(model, bucket_plan=ONE_BUCKET, **ALWAYS), ASKS).answers
    num_full = sum((len(ask.prompt) - 1) // 4 * 4 for ask in ASKS)  # the last token is computed
    names, blobs = set(), []
    for saves in sizes:
        folder = tmp_path / "x".join(map(str, saves))
        with engine_at(saves, model, folder) as engine:
            assert differences(serve(engine, ASKS).answers, right) == []
            settle(engine)
            names.add(engine.pool.root_names[0])
        blobs.append({path.name: path.read_bytes() for path in folder.rglob("*.kv")})
        for loads in sizes:
            with engine_at(loads, model, folder) as engine:
                assert differences(serve(engine, ASKS).answers, right) == []
                assert counts(engine).num_hit_tokens == num_full, f"from {saves} to {loads}"
                assert counts(engine).num_failed_loads == 0
                assert_empty(engine)
    assert len(names) == 1, "pages have one name"
    assert blobs[0] and all(blob == blobs[0] for blob in blobs), "and are the same bytes"


@pytest.mark.parametrize("size", exhaustive_unless(lambda size: size == (2, 1), [(1, 2), (2, 1)]), ids=str)
def test_nothing_compiles_after_warm_up(tmp_path, size):
    with engine_at(size, dummy_model(), tmp_path, warm_up="first_use", compile_anew="all") as engine:
        engine.runner.warm_up()
        before = compile_counts().programs
        for _ in range(2):
            serve(engine, ASKS)
            settle(engine)
            engine.reset_prefix_cache()
        assert counts(engine).num_hit_tokens and compile_counts().programs == before


def test_devices_move_their_own_heads_alone(tmp_path):
    """`take` and `put` have no message between devices, and no device a head of another."""
    with engine_at((1, 4), dummy_model(config=MODELS["three_kv_heads"]), tmp_path) as engine:
        programs: Any = engine.runner.programs
        for key in ("take", "put"):
            text = programs.get(key).as_text()
            for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
                assert f" {collective}" not in text, key
        runner: Any = engine.runner
        taken = runner.take_pages([0])
        (kv,) = taken.parts
        assert kv.shape[3] == 12 and kv.addressable_shards[0].data.shape[3] == 3  # each head four times
        assert np.asarray(taken).shape[3] == 3


def test_an_engine_on_a_mesh_of_one_other_device_has_a_store(tmp_path):
    mesh = Mesh(np.array(jax.devices()[3:4]), ("tp",))
    settings = {"kv_store": f"disk:{tmp_path}:16MiB", **ALWAYS}
    with contextlib.closing(engine_of(dummy_model(), 1, mesh=mesh, **settings)) as engine:
        first = serve(engine, ASKS).answers
        settle(engine)
        engine.reset_prefix_cache()
        assert differences(serve(engine, ASKS).answers, first) == [] and counts(engine).num_hit_tokens


GROUPS: dict[str, Any] = {"tensor_parallel_size": 4, "attention_groups": 2}


def grouped(folder: Any, **settings: Any):
    """Two groups of two devices each, and a pool for each."""
    options = {"kv_store": f"disk:{folder}:16MiB", "weights_id": NAME, **GROUPS, **settings}
    engine = make_engine(dummy_model(config=MODELS["three_kv_heads"]), bucket_plan=ONE_BUCKET, **options)
    stored(engine).load_seconds = 60.0
    return contextlib.closing(engine)


def test_groups_share_a_store(tmp_path):
    """Each group saves its own pages and loads what either has saved. Another layout's engine finds the same pages."""
    model = dummy_model(config=MODELS["three_kv_heads"])
    right = serve(make_engine(model, bucket_plan=ONE_BUCKET, **GROUPS), ASKS).answers
    num_full = sum((len(ask.prompt) - 1) // 4 * 4 for ask in ASKS)
    with grouped(tmp_path) as engine:
        assert differences(serve(engine, ASKS).answers, right) == []
        assert all(pool.num_queried_tokens for pool in engine.pools), "both groups had requests"
        settle(engine)
        assert engine.pools[1].root_names == engine.pools[0].root_names
        name = engine.pool.root_names[0]
    for order in (ASKS, ASKS[::-1]):  # of which each group gets others
        with grouped(tmp_path) as engine:
            found = serve(engine, order).answers
            for i, ask in enumerate(order):
                assert found[str(i)].tokens == right[str(ASKS.index(ask))].tokens
                assert found[str(i)].logprobs == right[str(ASKS.index(ask))].logprobs
            assert counts(engine).num_hit_tokens == num_full and counts(engine).num_failed_loads == 0
            assert_empty(engine)
    kv_store = f"disk:{tmp_path}:16MiB"
    with contextlib.closing(make_engine(model, bucket_plan=ONE_BUCKET, kv_store=kv_store, weights_id=NAME)) as engine:
        stored(engine).load_seconds = 60.0
        assert_like_one_device(serve(engine, ASKS).answers, serve(make_engine(model, bucket_plan=ONE_BUCKET), ASKS).answers)
        assert engine.pool.root_names[0] == name and counts(engine).num_hit_tokens == num_full


@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "attention_groups": 2}], ids=str)
def test_a_store_that_fails_at_random_changes_no_answer(layout):
    fuzz, engine = Fuzz(), make_engine(dummy_model(), bucket_plan=ONE_BUCKET, pool_pages=20, kv_store="host:64KiB", **layout)
    with contextlib.closing(engine):
        pages = stored(engine)
        pages.store.close()
        pages.store, pages.load_seconds = TieredStore([Flaky(HostTier(pages._layout, 64 << 10), 1)]), 0.02
        converse(fuzz, engine, 100, random.Random(1), update_from=0.8)
    assert fuzz.num_hit_tokens and fuzz.num_failed_loads and fuzz.num_preemptions and fuzz.done["abort"]
    assert fuzz.wrong(**layout) == []
