"""Metrics by vLLM's names: which of them there are, and what they count."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.outputs import RequestMetrics
from jaxserve.serving.messages import Aborted, Delta, LoopStats, Report, RequestTotals
from jaxserve.serving.metrics import VLLM_PREFIX, Metrics
from jaxserve.serving.vllm_metrics import MISSING_METRICS
from scripts.write_options import all_families

# Families that vLLM 0.32 exports, and some of each kind that is not here; a name alone is copied.
THEIRS = """num_requests_running num_requests_waiting num_requests_waiting_by_reason engine_sleep_state kv_cache_usage_perc
prefix_cache_queries prefix_cache_hits external_prefix_cache_queries external_prefix_cache_hits num_preemptions prompt_tokens
prompt_tokens_by_source prompt_tokens_cached generation_tokens request_success admission_rejections request_prompt_tokens
request_generation_tokens iteration_tokens_total request_max_num_generation_tokens request_params_n request_params_max_tokens
time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_num_preemptions request_prefill_kv_computed_tokens cache_config_info spec_decode_num_drafts spec_decode_num_draft_tokens
spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos"""
SLEEP = "sleep_mode_operation_duration_seconds sleep_mode_operations_in_flight"
OTHERS = """corrupted_requests watermark_requests num_requests_kv_fetch_by_stage mm_cache_queries mm_cache_hits
prompt_tokens_cached_by_source kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds
lora_requests_info estimated_flops_per_gpu estimated_read_bytes_per_gpu estimated_write_bytes_per_gpu
rl_weight_update_operation_duration_seconds rl_weight_update_operations_in_flight tool_call_parser_invocations_total
websocket_connection_duration_seconds websocket_connections_active websocket_connections_total nixl_xfer_time_seconds
nixl_bytes_transferred mooncake_store_operation_total kv_offload_load_bytes kv_offload_tiering_read_bytes
simple_kv_offload_used_blocks hf3fs_num_failed_load hisparse_cache_hits diffusion_num_denoising_steps"""


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(name, values of labels but the model's) -> value, of all samples."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found[sample.name, *labels] = sample.value
    return found


def taken(stats: LoopStats, *events, metrics: Metrics | None = None) -> dict[tuple[str, ...], float]:
    metrics = metrics or Metrics("m", prefix=VLLM_PREFIX)
    metrics.take(Report(list(events), stats))
    return values(metrics)


def test_vllms_families_by_vllms_names():
    from jaxserve.engine.stats import KVStoreStats

    metrics = Metrics("m", cache={"block_size": 4}, prefix=VLLM_PREFIX)
    metrics.take(Report([], LoopStats(kv_store=KVStoreStats())))
    families = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    missing = [name for name in f"{THEIRS} {SLEEP}".split() if f"vllm:{name}" not in families]
    assert not missing and not any(f"vllm:{name}" in families for name in MISSING_METRICS)
    assert not any(name.startswith("jaxserve:") for name in families)
    assert all(
        name.startswith("jaxserve:") for name in {f.name for f in text_string_to_metric_families(Metrics("m").render().decode())}
    )


def test_every_other_family_of_vllms_has_a_row():
    def row(name: str) -> str | None:
        return next((key for key in MISSING_METRICS if name == key or (key.endswith("_") and name.startswith(key))), None)

    assert {row(name) for name in OTHERS.split()} == set(MISSING_METRICS)
    assert not [name for name in f"{THEIRS} {SLEEP}".split() if row(name)]


def test_families_that_rows_name_are_there():
    ours = {family.name.removeprefix("jaxserve:") for family in all_families()}
    named = {name for text in MISSING_METRICS.values() for name in re.findall(r"`(\w+)`", text)}
    assert named and not named - ours


def test_tokens_of_turns_count_prompts_and_what_was_generated():
    metrics = Metrics("m", prefix=VLLM_PREFIX)
    for prompt, cached, generated in ((7, 4, 1), (7, 4, 2), (7, 4, 2), (12, 4, 4)):
        found = taken(LoopStats(prompt_tokens=prompt, prompt_tokens_cached=cached, generated_tokens=generated), metrics=metrics)
    assert (found["vllm:iteration_tokens_total_sum",], found["vllm:iteration_tokens_total_count",]) == (12 + 4, 3)
    assert found["vllm:prompt_tokens_total",] == 12 and found["vllm:prompt_tokens_cached_total",] == 4
    assert found["vllm:prompt_tokens_by_source_total", "local_compute"] == 8
    assert found["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 4


def test_what_waits_and_why_and_what_was_refused():
    metrics = Metrics("m", prefix=VLLM_PREFIX, num_refused=lambda: 2)
    found = taken(LoopStats(num_waiting=5, num_held=2), metrics=metrics)
    assert found["vllm:num_requests_waiting",] == 5
    assert [found["vllm:num_requests_waiting_by_reason", reason] for reason in ("capacity", "deferred")] == [3, 2]
    assert found["vllm:admission_rejections_total", "max_num_queued_reqs"] == 2


@pytest.mark.parametrize("level,state", list(enumerate(("awake", "weights_offloaded", "discard_all"))))
def test_the_state_of_sleep(level, state):
    found = taken(LoopStats(sleep_level=level))
    states = {labels[0]: value for (name, *labels), value in found.items() if name == "vllm:engine_sleep_state"}
    assert states[state] == 1 and sum(states.values()) == 1


def test_how_requests_end():
    found = taken(LoopStats())
    assert [found["vllm:request_success_total", reason] for reason in ("stop", "length", "abort", "error")] == [0] * 4
    totals = RequestTotals(9, 7, 2, 5, RequestMetrics(0.0, 1.0, 2.0, 3.0, num_preemptions=1), 5, 4)
    ended = [Delta("a", 0, "", [], finish_reason="stop"), Delta("a", 1, "", [], finish_reason="length", totals=totals)]
    found = taken(LoopStats(), *ended, Aborted("b", 3))
    assert [found["vllm:request_success_total", reason] for reason in ("stop", "length", "abort", "error")] == [1, 1, 3, 0]
    for name, value in (
        ("request_max_num_generation_tokens", 5),
        ("request_generation_tokens", 7),
        ("request_prefill_kv_computed_tokens", 9 - 4),
        ("request_num_preemptions", 1),
        ("request_params_max_tokens", 5),
    ):
        assert (found[f"vllm:{name}_sum",], found[f"vllm:{name}_count",]) == (value, 1), name
