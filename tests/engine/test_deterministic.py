"""`deterministic="always"`: equal bits whatever buckets a request's steps run in.

What each request gets alone, in steps of one shape, is compared with what it gets among others: in the default plan's buckets, cut
to other chunks, with prefix hits, preempted and resumed, with drafts, at drawn times. Tokens, log-probabilities and the prompts'
scores are equal to the last bit. Each part that is broken is found out.
"""

import dataclasses
import gc
from typing import Any

import jax
import numpy as np
import pytest

import jaxserve.execution.body
from jaxserve import BucketPlan, EngineConfig
from jaxserve.execution.programs import GPU_COMPILER_OPTIONS, gpu_compiler_options
from jaxserve.execution.resolved_config import resolve_config
from jaxserve.models import row_tiles
from jaxserve.models.row_tiles import RowTiles
from jaxserve.sampling import logit_edits
from kernels.cpu import library
from tests import dummy, workload
from tests.dummy import CONFIG, ONE_BUCKET, SEQS, TOKENS, Ask, Run, differences, dummy_model, make_engine, serve, serve_alone
from tests.engine.test_engine_experts import SPARSE
from tests.selection import chosen, exhaustive_unless
from tests.workload import SMALL_POOL, requests

OPTIMISED = True
ALWAYS: dict[str, Any] = {"deterministic": "always"}
XLA: dict[str, Any] = {"attention_backend": "xla", "matmul_backend": "xla"}  # where bits follow the shapes unless something is done
BIASED = dataclasses.replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=False, tie_word_embeddings=True)
MODELS = {"dense": CONFIG, "biased": BIASED, "experts": SPARSE}
KINDS = [(name, dtype, transposed) for name in MODELS for dtype in ("float32", "bfloat16") for transposed in (True, False)]
PLAN = BucketPlan(decode=(2, 4, SEQS), mixed=((8, SEQS), (16, SEQS), (TOKENS, SEQS)), head_rows=(2, SEQS))
FEW = 9  # of the requests: chunks, random draws, samples of one prompt, edits and prompt scores are among them


@pytest.fixture(autouse=True)
def _few_programs():
    """Linux gives a process 65,530 mappings of memory. Each of these programs, made of loops over tiles, takes hundreds."""
    yield
    dummy.forget()
    workload.forget()
    jax.clear_caches()
    gc.collect()


def buckets_of(run: Run) -> set[int]:
    return {s.num_tokens for s in run.schedules}


def check(model, asks: list[Ask], pool_pages: int = SMALL_POOL[True], **settings) -> list[str]:
    """What differs from each request alone, of a run that did meet several shapes of steps, chunks, hits and preemptions."""
    expected = serve_alone(model, asks, bucket_plan=ONE_BUCKET, **ALWAYS)
    engine = make_engine(model, pool_pages=pool_pages, **(ALWAYS | settings))
    run = serve(engine, asks)
    assert len(engine.stats.padding.steps) >= 3, "the run stayed in a few buckets"
    assert run.num_mixed_steps and run.num_chunks and run.stats.num_hit_tokens and run.stats.num_preemptions
    return differences(run.answers, expected)


@pytest.mark.slow  # tests/models/test_row_tiles.py is the faster relative
@pytest.mark.parametrize(
    ("kind", "dtype", "transposed"),
    chosen(  # in CI each model in each dtype, each of which is transposed for some model
        KINDS,
        quick=lambda *_: False,
        in_ci=lambda kind, dtype, transposed: transposed == ((dtype == "float32") != (kind == "biased")),
    ),
)
def test_any_bucket_as_alone_in_one(kind, dtype, transposed):
    model = dummy_model(dtype, MODELS[kind], transposed=transposed)
    assert check(model, requests(True)[:FEW], 20) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", exhaustive_unless(lambda seed: seed < 2, range(4)))
def test_drawn_traffic(seed):
    """Other arrivals, budgets, policies and pools."""
    rng = np.random.default_rng(seed)
    asks = [dataclasses.replace(ask, at=int(rng.integers(12))) for ask in requests(True, logprobs=True)]
    settings: dict[str, Any] = {
        "max_num_batched_tokens": int(rng.integers(6, 25)),
        "bucket_plan": PLAN,
        "async_scheduling": bool(rng.integers(2)),
        "enable_mixed_steps": None,
        "batching_policy": str(rng.choice(["sarathi", "orca"])),
        "enable_chunked_prefill": True,
    }
    model = dummy_model("float32", transposed=bool(seed % 2))
    expected = serve_alone(model, asks, bucket_plan=ONE_BUCKET, **ALWAYS)
    engine = make_engine(model, pool_pages=int(rng.integers(48, 60)), **ALWAYS, **settings)
    run = serve(engine, asks)
    assert len(engine.stats.padding.steps) >= 3 and run.num_chunks
    assert differences(run.answers, expected) == [], settings


@pytest.mark.slow
def test_drafts_change_nothing():
    """Drafts are verified in buckets of their own, and tokens and bits are those without them."""
    asks = list(requests(True)[:FEW])
    speculative: dict[str, Any] = {"speculative_config": {"num_speculative_tokens": 3}}
    assert check(dummy_model(transposed=True), asks, 20, **speculative) == []


def answers_by_plan(asks: list[Ask], **settings) -> list[dict[str, Any]]:
    """What the asks get in steps of one shape, and what in the default plan's; heads and bodies are traced anew."""
    plans: tuple[dict[str, Any], ...] = {"bucket_plan": ONE_BUCKET}, {}
    model = dummy_model(transposed=True)
    return [serve(make_engine(model, compile_anew="all", **settings, **plan), asks).answers for plan in plans]


@pytest.mark.slow
@pytest.mark.parametrize("fenced", [True, False])
def test_penalties_are_computed_apart_from_the_heads_shape(fenced, monkeypatch):
    """Penalties that follow how many rows are computed together give other tokens in other heads, unless they run in tiles."""
    right = logit_edits._penalise_counted
    monkeypatch.setattr(
        logit_edits,
        "_penalise_counted",
        lambda x, counts, presence, *rest: right(x, counts, presence * x.shape[0] / 4, *rest),
    )
    if not fenced:
        edit = logit_edits.edit
        monkeypatch.setattr(logit_edits, "edit", lambda *args, map_rows, **kwargs: edit(*args, **kwargs))
    asks = [ask.changed(presence_penalty=0.4) for ask in requests(True)[:2]]
    assert (differences(*answers_by_plan(asks, **ALWAYS)) == []) is fenced


# -- the checks can fail


def differs_when_broken(**settings) -> bool:
    """Whether a lone request's bits follow its buckets."""
    return differences(*answers_by_plan(requests(True, logprobs=True)[:2], **settings)) != []


@pytest.mark.slow
def test_found_out_where_nothing_is_fixed():
    assert differs_when_broken(deterministic="bucket", **XLA)


@pytest.mark.slow
def test_found_out_where_rows_are_computed_at_once(monkeypatch):
    monkeypatch.setattr(RowTiles, "__call__", lambda self, f, *xs, num_rows=None: row_tiles.whole(f, *xs))
    assert differs_when_broken(**ALWAYS, **XLA)


@pytest.mark.slow
def test_found_out_where_attention_follows_the_bucket(monkeypatch):
    plan_work = jaxserve.execution.body.plan_work
    monkeypatch.setattr(
        jaxserve.execution.body, "plan_work", lambda *args, fixed_tiles, **kwargs: plan_work(*args, fixed_tiles=False, **kwargs)
    )
    assert differs_when_broken(**ALWAYS, **XLA)


# -- what it can't be had with


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"attention_backend": "reference"}, "attention_backend='reference' follows the bucket"),
        ({"speculative_config": {"num_speculative_tokens": 2, "acceptance": "rejection"}}, "acceptance='rejection'"),
        ({"deterministic": "sometimes"}, "must be one of auto, bucket, always"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_engine(dummy_model(), **(ALWAYS | settings))


def test_refused_with_experts_that_follow_the_bucket():
    with pytest.raises(ValueError, match="moe_backend='reference' follows the bucket"):
        make_engine(dummy_model("float32", SPARSE), moe_backend="reference", **ALWAYS)


@pytest.mark.parametrize(
    "config, backend, message",
    [
        (CONFIG, "xla", "needs attention_backend='mosaic_sm90' on a GPU, found 'xla'"),
        (SPARSE, "mosaic_sm90", "is for dense models"),
    ],
)
def test_refused_on_a_gpu(config, backend, message):
    with pytest.raises(NotImplementedError, match=message):
        resolve_on_gpu(config, backend, "always")
    assert resolve_on_gpu(config, backend, "bucket").deterministic == "bucket"


def test_refused_on_gpus_that_share_a_group_of_heads():
    with pytest.raises(NotImplementedError, match="num_kv_heads=2 is no multiple of tensor_parallel_size=4"):
        resolve_on_gpu(CONFIG, "mosaic_sm90", "always", tensor_parallel_size=4)
    assert resolve_on_gpu(CONFIG, "mosaic_sm90", "always", tensor_parallel_size=2).deterministic == "always"


def test_a_gpu_has_compiler_options_for_it():
    assert resolve_on_gpu(CONFIG, "mosaic_sm90", "always").deterministic == "always"
    assert gpu_compiler_options("always")["xla_gpu_experimental_force_split_k"] == 1
    assert gpu_compiler_options("bucket") == GPU_COMPILER_OPTIONS


def test_refused_on_other_devices():
    with pytest.raises(NotImplementedError, match="is for CPUs and Hopper GPUs, found platform 'tpu': use 'bucket'"):
        resolve_on_gpu(CONFIG, "xla", "always", platform="tpu")
    assert resolve_on_gpu(CONFIG, "xla", "bucket", platform="tpu").deterministic == "bucket"


def resolve_on_gpu(config, backend, deterministic, platform="gpu", tensor_parallel_size=1):
    return resolve_config(
        EngineConfig(deterministic=deterministic, num_pages=64, page_size=64, tensor_parallel_size=tensor_parallel_size),
        config,
        kv_dtype=np.float16,
        platform=platform,
        device_limit=2**34,
        attention_backend=backend,
        weight_bytes=0,
    )


def test_auto_is_always_where_that_costs_nothing():
    assert make_engine(dummy_model()).config.deterministic == ("always" if library.lacks() is None else "bucket")
    assert make_engine(dummy_model(), **XLA).config.deterministic == "bucket"
    assert make_engine(dummy_model(), attention_backend="xla").config.deterministic == "bucket"
    assert make_engine(dummy_model(config=SPARSE)).config.deterministic == "bucket"
    assert (
        make_engine(dummy_model(), speculative_config={"num_speculative_tokens": 2, "acceptance": "rejection"}).config.deterministic
        == "bucket"
    )
    assert "deterministic: always" in make_engine(dummy_model(), **ALWAYS).describe()
