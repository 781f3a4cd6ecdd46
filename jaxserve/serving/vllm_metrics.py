"""Metric families of vLLM's that are not here: why, or what tells the same.

Owns this table, of vLLM 0.32's names without their prefix. A name that ends in _ stands for all that begin with it.
"""

from __future__ import annotations

MISSING_METRICS: dict[str, str] = {
    "corrupted_requests": "NaNs end a step: `step_failures`, `request_failures`, and /health",
    "diffusion_": "there are no models that write by diffusion",
    "estimated_flops_per_gpu": "step times are measured: `step_time_seconds`",
    "estimated_read_bytes_per_gpu": "step times are measured: `step_time_seconds`",
    "estimated_write_bytes_per_gpu": "step times are measured: `step_time_seconds`",
    "hf3fs_": "there is no tier of this kind",
    "hisparse_": "there is no sparse attention over pages on the host",
    "kv_block_idle_before_evict_seconds": "pages are not followed one by one",
    "kv_block_lifetime_seconds": "pages are not followed one by one",
    "kv_block_reuse_gap_seconds": "pages are not followed one by one",
    "kv_offload_": "`kv_store_pages_read`, `kv_store_bytes_written`, `kv_store_read_seconds` and others, by tier",
    "lora_requests_info": "there are no adapters",
    "mm_cache_hits": "prompts are text",
    "mm_cache_queries": "prompts are text",
    "mooncake_store_operation_": "`kv_store_pages_read` and others, with the tier's name",
    "nixl_": "`kv_store_pages_read` and others, with the tier's name; `kv_store_num_failures`",
    "num_requests_kv_fetch_by_stage": "samples that wait for a store's pages are `num_requests_waiting_by_reason` deferred",
    "prompt_tokens_cached_by_source": "`external_prefix_cache_hits` are those of a store; its tiers are counted in pages and bytes",
    "rl_weight_update_operation_duration_seconds": "weights are read from a path, and the call answers when it is done",
    "rl_weight_update_operations_in_flight": "weights are read from a path, and the call answers when it is done",
    "simple_kv_offload_": "`kv_store_pages_read` and others, by tier",
    "tool_call_parser_invocations_total": "calls are in answers alone, and are not counted",
    "watermark_requests": "outputs carry no watermark",
    "websocket_connection_duration_seconds": "there are no WebSockets",
    "websocket_connections_active": "there are no WebSockets",
    "websocket_connections_total": "there are no WebSockets",
}
