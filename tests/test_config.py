"""EngineConfig: what it accepts, what `resolve` decides from the model and the device, and how many pages a pool gets."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from jaxserve.buckets.plan import BucketPlan
from jaxserve.config import EngineConfig, options
from jaxserve.execution import memory
from jaxserve.execution.memory import PageShape, decide_num_pages
from jaxserve.execution.resolved_config import resolve_config
from jaxserve.models import ModelConfig
from jaxserve.scheduling.config import CacheConfig, SchedulerConfig
from scripts import write_options
from tests.alphabet_model import CONFIG

MODEL = ModelConfig.from_hf(CONFIG | {"max_position_embeddings": 4096})  # 1 layer, 1 KV head of 16: 128 B of float32 a token
GIB = 2**30
PLAN = BucketPlan(decode=(2, 4), mixed=((16, 4), (64, 4)), head_rows=(4,))


def resolve(config: dict | None = None, model: ModelConfig = MODEL, **given):
    device = {"kv_dtype": np.float32, "platform": "cpu", "device_limit": None, "weight_bytes": 0} | given
    return resolve_config(EngineConfig(**config or {}), model, **device)


# ---- values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int8"),
        ("dtype", "fp16"),
        ("dtype", np.float32),
        ("max_model_len", 0),
        ("max_model_len", 1024.0),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", -1),
        ("max_num_batched_tokens", "2048"),
        ("page_size", 0),
        ("page_size", 12),
        ("num_pages", 0),
        ("num_pages", "all"),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", math.nan),
        ("gpu_memory_utilization", True),
        ("enable_prefix_caching", None),
        ("enable_prefix_caching", "no"),
        ("enable_chunked_prefill", 1),
        ("enable_mixed_steps", "auto"),
        ("scheduling_policy", "lifo"),
        ("batching_policy", "vllm"),
        ("long_prefill_token_threshold", -1),
        ("long_prefill_token_threshold", True),
        ("seed", 1.0),
        ("seed", None),
        ("bucket_plan", 3),
        ("bucket_plan", [1]),
        ("warm_up", True),
        ("async_scheduling", 0),
        ("attention_backend", "flash"),
        ("attention_backend", "mosaic_sm100"),
        ("demand_log", 5),
        ("compilation_cache_dir", 5),
    ],
)
def test_refuses_and_names_option_and_value(name, value):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{name: value})
    assert str(error.value).startswith(f"{name}={value!r} must be")


def test_numpys_integers_are_integers():
    numbers: dict[str, Any] = {"max_num_seqs": np.int64(4), "seed": np.uint8(3)}
    config = EngineConfig(**numbers)
    assert config == EngineConfig(max_num_seqs=4, seed=3) and type(config.max_num_seqs) is type(config.seed) is int


def test_vllms_names_of_dtypes_are_ours():
    assert EngineConfig(dtype="half") == EngineConfig(dtype="float16") and EngineConfig(dtype="float").dtype == "float32"


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_profile_that_cannot_be_used_is_refused_at_once(tmp_path, text):
    path = tmp_path / "steps.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"step times '{path}' cannot be used"):
        EngineConfig(tbt_slo_ms=100, step_times=path)


def test_more_sequences_than_a_step_has_tokens_are_refused_with_the_fix():
    with pytest.raises(ValueError, match="max_num_seqs=64 must not exceed max_num_batched_tokens=32.*raise the budget or lower"):
        EngineConfig(max_num_seqs=64, max_num_batched_tokens=32)
    with pytest.raises(ValueError, match="max_num_seqs=64 must not exceed"):
        SchedulerConfig(max_model_len=9, max_num_seqs=64, max_num_batched_tokens=32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ('{"format": "other"}', "'format' must be"),
        ('{"format": "jaxserve-bucket-plan-1", "mixed": [[2, 4]], "head_rows": [4]}', "more sequences than tokens"),
        ('{"format": "jaxserve-bucket-plan-1", "mixed": [[4, 4]], "heads": [4]}', "unknown fields"),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused_at_once_and_its_file_named(tmp_path, text, message):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        EngineConfig(bucket_plan=path)
    assert f"bucket_plan={str(path)!r}" in str(error.value)


# ---- what follows from what


def test_the_attention_backend_is_the_users_or_the_devices():
    assert resolve().attention_backend == "xla"
    assert resolve(attention_backend="mosaic_sm90").attention_backend == "mosaic_sm90"  # what "auto" is on that device
    assert EngineConfig(attention_backend="reference").attention_backend == "reference"


def test_defaults():
    cpu, gpu = resolve(), resolve(platform="gpu", device_limit=80 * GIB)
    for got in (cpu, gpu):
        limits = got.scheduler
        assert (limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len) == (2048, 128, 4096)
        assert (limits.policy, limits.order, got.cache.enable_prefix_caching) == ("sarathi", "fcfs", True)
        got.plan.check(128, 2048)
    assert (cpu.cache.page_size, gpu.cache.page_size) == (64, 64)
    assert (cpu.max_pages_per_seq, gpu.max_pages_per_seq) == (64, 64)
    assert gpu.cache.num_pages == 128 * 64 and gpu.pool_bytes == 128 * 4096 * 128  # all that 128 requests could use


@pytest.mark.parametrize(
    ("given", "budget", "seqs"),
    [
        ({"max_num_batched_tokens": 64}, 64, 64),  # a step must hold a token of each
        ({"max_num_seqs": 4096}, 4096, 4096),
        ({"max_num_seqs": 8}, 2048, 8),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 8}, 512, 8),
        ({"enable_chunked_prefill": False}, 4096, 128),  # a whole prompt must fit a step
        ({"enable_chunked_prefill": False, "max_model_len": 3000}, 3000, 128),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, 256, 128),
        ({"batching_policy": "orca"}, 4096, 128),  # does not chunk of its own
        ({"batching_policy": "orca", "enable_chunked_prefill": True}, 2048, 128),
        ({"bucket_plan": PLAN}, 64, 4),
        ({"bucket_plan": PLAN, "max_num_seqs": 2}, 64, 2),
        ({"bucket_plan": PLAN, "max_num_batched_tokens": 32}, 32, 4),
    ],
)
def test_limits_that_are_not_given_follow_those_that_are(given, budget, seqs):
    got = resolve(given)
    assert (got.scheduler.max_num_batched_tokens, got.scheduler.max_num_seqs) == (budget, seqs)


def test_options_reach_the_parts():
    got = resolve(
        {
            "max_model_len": 100,
            "page_size": 8,
            "num_pages": 50,
            "enable_prefix_caching": False,
            "scheduling_policy": "priority",
            "batching_policy": "prefill_first",
            "enable_chunked_prefill": True,
            "enable_mixed_steps": False,
            "long_prefill_token_threshold": 7,
        }
    )
    assert got.cache == CacheConfig(page_size=8, num_pages=50, enable_prefix_caching=False)
    limits = dataclasses.asdict(got.scheduler)
    assert (
        limits.items()
        >= {
            "max_model_len": 100,
            "policy": "prefill_first",
            "order": "priority",
            "chunked": True,
            "mixed": False,
            "long_prefill_token_threshold": 7,
        }.items()
    )
    assert got.pages == PageShape(1, 1, 8, 16, np.float32) and got.max_pages_per_seq == 13


def test_a_plan_may_come_from_a_file_or_be_what_one_holds(tmp_path):
    PLAN.save(tmp_path / "plan.json", tuned_for="a test")
    assert resolve({"bucket_plan": str(tmp_path / "plan.json")}).plan == PLAN
    assert resolve({"bucket_plan": json.loads(PLAN.to_json())}).plan == PLAN
    with pytest.raises(ValueError, match="bucket_plan=.* cannot be used: bucket plan: 'format' must be"):
        EngineConfig(bucket_plan={"decode": [1]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_len": 5000}, "max_model_len=5000 must not exceed the model's max_position_embeddings=4096"),
        (
            {"max_model_len": 1024, "num_pages": 63, "page_size": 16},
            "max_model_len=1024 needs 64 pages of 16 tokens, the pool has 63: raise num_pages",
        ),
        ({"bucket_plan": PLAN, "max_num_batched_tokens": 65}, "plan holds steps of at most 64 tokens.*lower it"),
        ({"bucket_plan": PLAN, "max_num_seqs": 5}, r"lower max_num_seqs to 4 or add a bucket \(64, 5\)"),
        (
            {"bucket_plan": BucketPlan(mixed=((64, 8),), head_rows=(4,)), "max_num_seqs": 8},
            "head_rows go up to 4, fewer than max_num_seqs=8",
        ),
        ({"batching_policy": "prefill_first", "enable_mixed_steps": True}, "no step left to put first"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 8}, "runs prompts whole; set chunked=True"),
    ],
)
def test_contradictions_are_refused_with_the_fix(given, message):
    with pytest.raises(ValueError, match=message):
        resolve(given)


def test_a_model_longer_than_the_pool_is_cut_to_it_unless_asked_for():
    assert resolve({"num_pages": 10, "page_size": 16}).scheduler.max_model_len == 160
    assert resolve({"num_pages": 10, "page_size": 16, "max_model_len": 160}).scheduler.max_model_len == 160


# ---- pages

SHAPE = PageShape(num_layers=2, num_kv_heads=4, page_size=16, head_dim=128, dtype=np.float16)
PAGE_BYTES = 2 * 2 * 4 * 16 * 128 * 2  # layers, k and v, heads, tokens, dims, bytes


def pages_of(limit: int | None, **given) -> int:
    numbers = {"max_num_seqs": 10**6, "max_model_len": 1024, "utilization": 1.0, "weight_bytes": 0, "temp_bytes": 0} | given
    return decide_num_pages(SHAPE, device_limit=limit, **numbers)


def test_page_bytes():
    assert SHAPE.page_bytes == PAGE_BYTES == math.prod(SHAPE.layer(1)) * 2 * 2
    assert SHAPE.layer(7) == (7, 2, 4, 16, 128)


def test_what_weights_and_programs_leave_goes_to_pages():
    assert pages_of(1000 * PAGE_BYTES) == 1000
    assert pages_of(1000 * PAGE_BYTES, utilization=0.5) == 500
    assert pages_of(1000 * PAGE_BYTES, weight_bytes=300 * PAGE_BYTES, temp_bytes=100 * PAGE_BYTES) == 600
    assert pages_of(1000 * PAGE_BYTES, weight_bytes=1) == 999  # no part of a page


def test_the_reserve_is_enough_for_programs_that_have_a_workspace_where_the_largest_have_none():
    # Of a tiny Qwen3 with XLA's attention, compiled for an H100 (scripts.aot_check): bodies by rising tokens, two heads, scoring.
    bodies, heads, score = (32.0, 32.1, 32.0, 32.3, 32.4, 33.0, 34.0, 36.0, 30.2), (4.1, 14.6), 9.1
    reserve = memory.reserve_bytes(int(mib * 2**20) for mib in (bodies[-1], heads[-1], score))
    assert max(bodies + heads) * 2**20 <= reserve <= 2 * max(bodies + heads) * 2**20


def test_no_more_pages_than_the_sequences_could_use():
    assert pages_of(1000 * PAGE_BYTES, max_num_seqs=3, max_model_len=100) == 3 * 7


def test_a_cpu_gives_a_quarter_of_its_memory_and_a_pool_of_at_most_one_gib(monkeypatch):
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 64 * GIB)
    assert pages_of(None, max_model_len=10**6) == GIB // PAGE_BYTES
    assert pages_of(None, max_model_len=10**6, num_devices=8) == GIB // 8 // PAGE_BYTES, "virtual devices share a memory"
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 400 * PAGE_BYTES)
    assert pages_of(None, max_model_len=10**6, utilization=0.5) == 50


def test_no_room_for_a_page_is_refused_with_the_numbers(monkeypatch):
    with pytest.raises(ValueError, match=r"0.9 of 80.0 GiB less weights 73.00 GiB and programs 1.00 GiB leaves -2048 MiB") as error:
        pages_of(80 * GIB, utilization=0.9, weight_bytes=73 * GIB, temp_bytes=GIB)
    assert "raise gpu_memory_utilization" in str(error.value)
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 3 * PAGE_BYTES)
    with pytest.raises(ValueError, match="no KV page fits") as error:
        pages_of(None)
    assert "weights" not in str(error.value), "on a CPU they are not counted"


# ---- speculation


def test_speculation_brings_buckets_for_its_drafts():
    """On a GPU more of them than on a CPU, where a few tokens fill the device; with a plan of one's own, only the plan's."""
    given = {"max_num_seqs": 32, "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'}
    assert resolve(given).plan.draft == ((1, 2), (1, 4), (4, 2), (4, 4), (16, 2))
    gpu = resolve(given, platform="gpu", device_limit=8 * GIB)
    assert gpu.plan.draft == ((1, 2), (1, 4), (4, 2), (4, 4), (16, 2), (16, 4), (32, 2), (32, 4))
    assert gpu.plan.max_head_rows >= 160 and gpu.speculative is not None and gpu.speculative.num_speculative_tokens == 4
    assert resolve({}).plan.draft == () and resolve({}).speculative is None
    plan = dataclasses.replace(PLAN, head_rows=(8,))
    assert resolve({"bucket_plan": plan, "speculative_config": {"num_speculative_tokens": 4}}).plan == plan
    with pytest.raises(ValueError, match="num_speculative_tokens=4 takes 5 tokens and logits rows"):
        resolve({"bucket_plan": PLAN, "speculative_config": {"num_speculative_tokens": 4}})
    with pytest.raises(
        ValueError, match="num_speculative_tokens=14 drafts never fit a request of max_model_len=16 tokens: draft 13 at"
    ):
        resolve({"max_model_len": 16, "speculative_config": {"num_speculative_tokens": 14}})
    assert resolve({"max_model_len": 16, "speculative_config": {"num_speculative_tokens": 13}}).speculative is not None
    with pytest.raises(ValueError, match="method='mtp' must be one of ngram"):
        resolve({"speculative_config": {"method": "mtp", "num_speculative_tokens": 4}})


# ---- the table


def test_every_option_is_described_and_its_default_passes_its_own_check():
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    assert list(options()) == names
    for name, (field, option) in options().items():
        assert option.help.endswith(".") and option.group
        assert (field.default is None) == bool(option.unset), f"{name}: what None means is said exactly where it is the default"
        assert f"{name}: {option.help}" in str(EngineConfig.__doc__)


def test_no_default_is_written_twice():
    """Those of limits that the scheduler has too are its own."""
    config = EngineConfig()
    assert (config.batching_policy, config.scheduling_policy) == (SchedulerConfig.policy, SchedulerConfig.order)
    assert config.long_prefill_token_threshold == SchedulerConfig.long_prefill_token_threshold
    limits = resolve().scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (
        SchedulerConfig.max_num_seqs,
        SchedulerConfig.max_num_batched_tokens,
    )
    assert str(SchedulerConfig.max_num_seqs) in options()["max_num_seqs"][1].unset


def test_the_page_of_options_is_current():
    assert write_options.PAGE.read_text() == write_options.page(), "python -m scripts.write_options writes it"
    assert write_options.FIELDS.read_text() == write_options.fields_page(), "python -m scripts.write_options writes it"
    assert write_options.ROUTES.read_text() == write_options.routes_page(), "python -m scripts.write_options writes it"
    assert write_options.METRICS.read_text() == write_options.metrics_page(), "python -m scripts.write_options writes it"


def test_a_write_policy_needs_a_store():
    with pytest.raises(ValueError, match="kv_store_write_policy='write_through' is of a kv_store: give one"):
        EngineConfig(kv_store_write_policy="write_through")
    assert EngineConfig(kv_store="host:1MiB", kv_store_write_policy="write_through").kv_store
