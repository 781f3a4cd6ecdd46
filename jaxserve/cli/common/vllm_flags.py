"""vLLM's flags: which are ours by the same name or by another, and what there is instead of those that we don't have.

The names are those of `vllm serve` 0.32, and of some versions before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from absl import flags

from jaxserve.models.config import DTYPE_ALIASES

# Flags of `vllm serve` that `jaxserve serve` has by the same name.
SAME: tuple[str, ...] = (
    *("model", "served_model_name", "tokenizer", "skip_tokenizer_init", "config", "dtype", "seed"),
    *("host", "port", "uds", "api_key", "api_server_count", "root_path", "middleware"),
    *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "enable_prefix_caching"),
    *("enable_chunked_prefill", "long_prefill_token_threshold", "scheduling_policy", "async_scheduling"),
    *("tensor_parallel_size", "pipeline_parallel_size", "attention_backend", "moe_backend", "speculative_config"),
    *("chat_template", "default_chat_template_kwargs", "trust_request_chat_template", "tool_call_parser", "reasoning_parser"),
    *("generation_config", "override_generation_config", "response_role", "return_tokens_as_token_ids"),
    *("enable_prompt_tokens_details", "enable_force_include_usage", "enable_request_id_headers", "sse_keep_alive_interval"),
    *("enable_log_requests", "max_log_len"),
)
# vLLM's name -> ours, of the same thing.
OURS = {
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
    "device_memory_utilization": "gpu_memory_utilization",
    "spec_config": "speculative_config",
    "sc": "speculative_config",
    "shutdown_timeout": "grace",
    "asc": "api_server_count",
    "disable_uvicorn_access_log": "noaccess_log",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "nnodes": "num_hosts",
    "node_rank": "host_id",
    "r": "host_id",
    "otlp_traces_endpoint": "otlp_endpoint",
}
VALUES = {"dtype": DTYPE_ALIASES}  # our name of a flag -> vLLM's names of its values -> ours


@dataclass(frozen=True)
class Missing:
    """Flags of vLLM's that we don't have, for one reason. Names are written with spaces between them.

    instead: what to do. names: of flags that take a value. accepts: values of theirs that ask for what is so here anyway. switches:
    flags that take no value. granted: switches that ask for what is so here anyway.
    """

    instead: str
    names: str = ""
    accepts: tuple[str, ...] = ()
    switches: str = ""
    granted: str = ""


_DEVICES = (
    Missing("give --coordinator=ADDRESS:PORT, with --num_hosts and --host_id", "master_addr master_port"),
    Missing(
        "an engine's devices are counted by --tensor_parallel_size and --pipeline_parallel_size; run several engines behind "
        "`jaxserve router`, or with --ray --replicas",
        "data_parallel_size dp decode_context_parallel_size dcp prefill_context_parallel_size pcp n data_parallel_size_local dpl",
        accepts=("1",),
    ),
    Missing(
        "an engine's devices share the model by --tensor_parallel_size, --pipeline_parallel_size and --attention_groups alone",
        "data_parallel_rank dpn data_parallel_start_rank dpr data_parallel_address dpa data_parallel_rpc_port dpp "
        "data_parallel_backend dpb data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_supervisor_probe_failure_threshold dp_sync_interval distributed_executor_backend "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds all2all_backend cp_kv_cache_interleave_size "
        "dcp_kv_cache_interleave_size dcp_comm_backend eplb_config expert_placement_strategy elastic_ep_max_dp_size "
        "fault_tolerance_config ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold max_parallel_loading_workers",
        switches="data_parallel_hybrid_lb dph data_parallel_external_lb dpe data_parallel_multi_port_external_lb dpm "
        "enable_ep_weight_filter enable_eplb enable_elastic_ep enable_fault_tolerance enable_dbo "
        "enable_hc_sp enable_batch_sharded_sampling dcp_q_replicate headless ray_workers_use_nsight",
        granted="disable_custom_all_reduce disable_nccl_for_dp_synchronization",
    ),
    Missing("experts are cut over the devices of --tensor_parallel_size", granted="enable_expert_parallel ep"),
    Missing("an engine has no classes of workers", "worker_cls", accepts=("auto",)),
    Missing(
        "weights of a trainer come by /update_weights_from_path, or in Python by LLM.update_params",
        "worker_extension_cls weight_transfer_config",
    ),
    Missing("set JAX_PLATFORMS, such as cpu or cuda", "device", accepts=("auto",)),
    Missing("set CUDA_VISIBLE_DEVICES", "device_ids"),
    Missing("start the server with numactl", "numa_bind_nodes numa_bind_cpus", switches="numa_bind"),
)
_WEIGHTS = (
    Missing(
        "weights are bfloat16, float16 or float32; a quantised GGUF file is read into --dtype",
        "quantization q quantization_config",
        switches="allow_deprecated_quantization",
    ),
    Missing("what a file holds is told from the file: safetensors, GGUF or Orbax", "load_format", accepts=("auto", "safetensors")),
    Missing("what a file holds is told from the file: safetensors, GGUF or Orbax", "config_format", accepts=("auto", "hf")),
    Missing("what a file holds is told from the file: safetensors, GGUF or Orbax", "model_loader_extra_config ignore_patterns"),
    Missing("PyTorch's own files are not read; convert them to safetensors", "pt_load_map_location"),
    Missing(
        "how files are read is not a choice; /health is 200 when weights are loaded",
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size",
        switches="use_tqdm_on_load",
    ),
    Missing("set HF_HOME, which says where models from the hub lie", "download_dir"),
    Missing("download that revision and give its folder as the model", "revision"),
    Missing("download that revision and give its folder as --tokenizer", "tokenizer_revision"),
    Missing(
        "models are jaxserve's own Flax modules, and no code comes with a checkpoint",
        "code_revision model_class_overrides",
        switches="trust_remote_code",
    ),
    Missing("models are jaxserve's own Flax modules, and no code comes with a checkpoint", "model_impl", accepts=("auto",)),
    Missing("the tokenizer is the checkpoint's own", "tokenizer_mode", accepts=("auto", "hf")),
    Missing("edit the model's config.json", "hf_overrides rope_scaling rope_theta"),
    Missing("config.json lies beside the weights", "hf_config_path"),
    Missing("set HF_TOKEN", "hf_token"),
    Missing("models generate; there is no pooling or embedding", "runner task", accepts=("auto", "generate")),
    Missing("models generate; there is no pooling or embedding", "convert", accepts=("auto", "none")),
    Missing(
        "models generate; there is no pooling or embedding",
        "pooler_config io_processor_plugin",
        switches="enable_flash_late_interaction",
    ),
    Missing("models write one token after another; there is no diffusion", "diffusion_config dc"),
    Missing("use a request's logit_bias, or a grammar (structured outputs)", "logits_processors"),
    Missing(
        "there are no adapters; merge them into the weights, or serve merged weights from a folder of their own",
        "lora_modules max_loras max_lora_rank max_cpu_loras lora_dtype lora_target_modules default_mm_loras max_lora_cls_labels",
        switches="enable_lora fully_sharded_loras enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras",
    ),
    Missing(
        "models read text alone",
        "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_processor_device "
        "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_hasher_algorithm "
        "mm_ipc_gpu_memory_gb mm_tensor_ipc media_io_kwargs allowed_local_media_path allowed_media_domains video_pruning_rate "
        "video_pruning_method",
        switches="enable_mm_embeds interleave_mm_strings mm_device_do_normalize mm_encoder_only skip_mm_profiling "
        "trust_request_mm_kwargs enable_shm_tensor_arena",
        granted="language_model_only disable_chunked_mm_input",
    ),
    Missing("a prompt is text or token ids", switches="enable_prompt_embeds"),
)
_MEMORY = (
    Missing("the KV cache has the weights' dtype, --dtype", "kv_cache_dtype", accepts=("auto",)),
    Missing("the KV cache has the weights' dtype, --dtype", "kv_cache_dtype_skip_layers", switches="calculate_kv_scales"),
    Missing("give --num_pages or --gpu_memory_utilization", "kv_cache_memory_bytes"),
    Missing("XLA allocates the device's memory: see XLA_PYTHON_CLIENT_MEM_FRACTION", switches="enable_cumem_allocator"),
    Missing("preempted requests load what --kv_store has of them", "swap_space", accepts=("0",)),
    Missing("give --kv_store=host:4GiB, or disk:FOLDER:100GiB", "kv_offloading_size kv_offloading_backend"),
    Missing("weights lie on the device; take a smaller model or --dtype=bfloat16", "cpu_offload_gb", accepts=("0",)),
    Missing(
        "weights lie on the device; take a smaller model or --dtype=bfloat16",
        "cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step",
    ),
    Missing("pages are found by sha256", "prefix_caching_hash_algo", accepts=("sha256",)),
    Missing("prefixes are shared by whole pages, of --page_size tokens", "prefix_match_unit prefix_cache_retention_interval"),
    Missing(
        "KV is kept by --kv_store; --role=prefill and --role=decode share it through a folder, by NIXL or by Mooncake, behind "
        "`jaxserve router`",
        "kv_transfer_config ec_transfer_config ec_manager_config",
    ),
    Missing("`jaxserve router` keeps its own account of prefixes", "kv_events_config"),
    Missing("layers attend as the checkpoint says", switches="disable_sliding_window kv_sharing_fast_prefill swa_bounded_replay"),
    Missing("all layers have pages of one kind", granted="disable_hybrid_kv_cache_manager"),
    Missing(
        "--enable_control adds /sleep and /wake_up",
        "sleep_preserve_parameter_names",
        switches="enable_sleep_mode sleep_mode_offload_cudagraph enable_nccl_comm_suspend",
    ),
    Missing(
        "there are no Mamba, linear-attention or n-gram-embedding layers",
        "mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype "
        "mamba_ssu_algorithm gdn_prefill_backend kda_prefill_backend kda_decode_backend replayssm_buffer_len engram_config",
        switches="enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint use_replayssm",
    ),
)
_STEPS = (
    Missing("every step is a compiled program; --warm_up=first_use starts soonest", switches="enforce_eager"),
    Missing(
        "programs are compiled ahead, see --bucket_plan and --warm_up",
        "compilation_config cc optimization_level O cudagraph_capture_sizes max_cudagraph_capture_size cuda_graph_sizes "
        "max_seq_len_to_capture jit_monitor_mode",
        switches="jit_monitor_verbose",
    ),
    Missing(
        "--attention_backend, --matmul_backend and --moe_backend choose kernels; XLA makes the rest",
        "attention_config ac kernel_config ir_op_priority sparse_indexer_topk_backend",
        switches="enable_flashinfer_autotune",
    ),
    Missing(
        "--attention_backend, --matmul_backend and --moe_backend choose kernels; XLA makes the rest",
        "linear_backend",
        accepts=("auto",),
    ),
    Missing("there is no cascade attention to disable", granted="disable_cascade_attn disable_cascade_attention"),
    Missing("`jaxserve autotune` chooses limits for a workload", "performance_mode", accepts=("balanced",)),
    Missing("--async_scheduling (on) schedules a step ahead", "num_scheduler_steps", accepts=("1",)),
    Missing(
        "--long_prefill_token_threshold leaves room for other prompts",
        "max_num_partial_prefills max_long_partial_prefills",
        switches="long_prefill_token_threshold_adaptive",
    ),
    Missing("--batching_policy and --scheduling_policy choose how steps are composed", "scheduler_cls"),
    Missing("--batching_policy and --scheduling_policy choose how steps are composed", "prefill_schedule_interval", accepts=("1",)),
    Missing("give --max_num_batched_tokens, the budget of every step", "max_num_scheduled_tokens"),
    Missing("give --max_num_seqs, of running requests and of a step", "max_num_active_seqs"),
    Missing("--max_waiting bounds the samples that wait; more are refused with 429", "max_num_queued_reqs max_num_queued_tokens"),
    Missing(
        "a request is admitted when its next tokens have pages; --max_num_seqs bounds how many run",
        "watermark",
        accepts=("0", "0.0"),
    ),
    Missing(
        "a request is admitted when its next tokens have pages; --max_num_seqs bounds how many run",
        switches="scheduler_reserve_full_isl",
    ),
    Missing("give --speculative_config, as JSON", "spec_method spec_model spec_tokens"),
)
_ANSWERS = (
    Missing("a request may ask for 20, as OpenAI's API allows", "max_logprobs", accepts=("20",)),
    Missing("log-probabilities are of the raw logits", "logprobs_mode", accepts=("raw_logprobs",)),
    Missing("sampling has one precision, whatever the model's", switches="use_fp64_gumbel"),
    Missing(
        "an answer has tokens and log-probabilities, and nothing else of the model",
        "aux_output_config",
        switches="enable_return_routed_experts return_sampling_mask enable_trace_replay",
    ),
    Missing("outputs carry no watermark", "watermark_config"),
    Missing("grammars are llguidance's", "guided_decoding_backend", accepts=("auto", "guidance")),
    Missing("grammars are llguidance's", "structured_outputs_config.backend", accepts=("auto", "guidance", "xgrammar")),
    Missing("grammars are llguidance's; a form says its options itself", "structured_outputs_config"),
    Missing("--tool_call_parser is auto unless given", granted="enable_auto_tool_choice"),
    Missing("choose from --tool_call_parser's values", "tool_parser_plugin"),
    Missing("a tool's own strict says whether its arguments are held to its schema", "tool_strict_level", accepts=("auto",)),
    Missing("tools are the client's to run", "tool_server"),
    Missing("tools are left out of the prompt where tool_choice is none", granted="exclude_tools_when_tool_choice_none"),
    Missing("--reasoning_parser is auto unless given, and says what begins and ends reasoning", "reasoning_config"),
    Missing("--reasoning_parser is auto unless given", granted="enable_reasoning"),
    Missing("choose from --reasoning_parser's values", "reasoning_parser_plugin"),
    Missing("the template is asked what it takes", "chat_template_content_format", accepts=("auto",)),
    Missing("each step's tokens are sent at once, unless a request gives stream_interval", "stream_interval", accepts=("1",)),
    Missing("answers have no system_fingerprint", "fingerprint_mode", accepts=("none",)),
    Missing("answers have no system_fingerprint", "fingerprint_value"),
    Missing("/metrics counts the drafts of all requests together", "per_request_spec_decode_metrics", accepts=("none",)),
    Missing("--otlp_endpoint sends a trace of each request; /metrics has all together", switches="enable_per_request_metrics"),
)
_SERVER = (
    Missing("the server speaks OpenAI's API and Anthropic's, over HTTP alone", "grpc_port", switches="grpc"),
    Missing("Cohere's API and its prompts are not here", "cohere_format", switches="cohere_is_reasoning_model"),
    Missing(
        "a message with thinking disabled gives the chat template enable_thinking=false",
        "anthropic_disabled_thinking_effort",
    ),
    Missing("/inference/v1/generate is always there; --skip_tokenizer_init does without a tokenizer", switches="tokens_only"),
    Missing("/inference/v1/generate and /render are always there; /derender is not", granted="enable_scale_out"),
    Missing("the route is always there", granted="enable_tokenizer_info_endpoint"),
    Missing(
        "/openapi.json is always there, and the schema that the server holds to",
        switches="disable_fastapi_docs enable_offline_docs",
    ),
    Missing("give --max_header_bytes, of a request line and its headers", "h11_max_header_count h11_max_incomplete_event_size"),
    Missing("start the server again for a new certificate", switches="enable_ssl_refresh"),
    Missing("threads of the server's own tokenise long prompts", "renderer_num_workers", accepts=("1",)),
    Missing(
        "logs go to stderr; --noaccess_log leaves out a line a request",
        "uvicorn_log_level disable_access_log_for_endpoints log_level log_config_file logging_config",
        switches="log_error_stack",
    ),
    Missing(
        "outputs are never logged, and prompts with --enable_log_requests alone",
        switches="enable_log_outputs enable_log_deltas",
        granted="disable_log_requests",
    ),
    Missing("figures are at /metrics, and not logged", switches="aggregate_engine_logging", granted="disable_log_stats"),
    Missing(
        "/metrics has what is measured; --demand_log writes a line a step",
        "custom_histogram_buckets kv_cache_metrics_sample show_hidden_metrics_for_version",
        switches="kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_logging_iteration_details",
    ),
    Missing("/load is always there", granted="enable_server_load_tracking"),
    Missing("spans of --otlp_endpoint are as detailed as they get; /metrics has figures", "collect_detailed_traces"),
    Missing(
        "trace with jax.profiler in Python; `jaxserve tune profile` times steps",
        "profiler_config",
        switches="enable_layerwise_nvtx_tracing",
    ),
    Missing("every option has a flag of its own", "additional_config"),
    Missing("vLLM's environment variables are not read", switches="fail_on_environ_validation"),
)
# Headings of the page, behind "Not here:" -> rows.
ROWS: dict[str, tuple[Missing, ...]] = {
    "several devices": _DEVICES,
    "weights": _WEIGHTS,
    "memory": _MEMORY,
    "steps": _STEPS,
    "answers": _ANSWERS,
    "the server": _SERVER,
}
MISSING: dict[str, Missing] = {
    name: row for rows in ROWS.values() for row in rows for name in f"{row.names} {row.switches} {row.granted}".split()
}


class Refused(ValueError):
    """A flag of vLLM's that we don't have; the message says what to use."""


class AcceptedAsIs(Exception):
    """A flag of vLLM's that asks for nothing, if it has one of `values` (any, if there are none)."""

    def __init__(self, values: tuple[str, ...], takes_value: bool, instead: str):
        self.values = values
        self.takes_value = takes_value
        self.instead = instead


def translate(name: str, known: flags.FlagValues) -> str:
    """Our name of a flag that was given, with underscores: its own, or where the command has an engine's flags vLLM's.

    A name with a dot is vLLM's for a part of a flag's JSON. Here a flag is given whole.

    known: the command's flags by name.

    Raises:
      Refused: vLLM's, and there is none here.
      AcceptedAsIs: vLLM's, and certain values ask for what is so here anyway.
    """
    if name in known:
        return name
    positive, dot, _ = name.removeprefix("no_").partition(".")
    positive = re.sub(r"^O\d$", "O", positive)  # a level may stand right behind it
    ours = OURS.get(positive, positive)
    if dot and "speculative_config" in known and ours == "speculative_config":
        raise Refused("give --speculative_config whole, as JSON")
    if dot and name in MISSING:
        positive = name
    if dot and positive not in MISSING:
        return name
    if name == f"no_{positive}" and ours in known and known[ours].boolean:
        return f"no{ours}"
    if ours in known or ours.startswith("no") and ours[2:] in known:
        return ours
    if "gpu_memory_utilization" not in known or positive not in MISSING:
        return name
    row = MISSING[positive]
    is_switch = positive not in row.names.split()
    if is_switch and name == f"no_{positive}":
        raise AcceptedAsIs((), False, row.instead)  # off, as it is here
    if name == positive and (positive in row.granted.split() or not is_switch and row.accepts):
        raise AcceptedAsIs(() if is_switch else row.accepts, not is_switch, row.instead)
    raise Refused(row.instead)


def markdown(helps: Mapping[str, str]) -> str:
    """The tables of all flags, for a page. helps: of `jaxserve serve`'s flags, by name.

    Raises:
      KeyError: a name of SAME or OURS that is no flag of ours.
    """
    lines = ["### The same", "", "| flag | what it does here |", "| --- | --- |"]
    lines += [f"| `{_shown(name)}` | {_cell(helps[name])} |" for name in SAME]
    lines += ["", "### By another name", "", "| vLLM | jaxserve | what it does |", "| --- | --- | --- |"]
    for theirs, ours in OURS.items():
        what = f"Turns off: {helps[ours[2:]]}" if ours.startswith("no") and ours[2:] in helps else helps[ours]
        lines.append(f"| `{_shown(theirs)}` | `{_shown(ours)}` | {_cell(what)} |")
    for title, rows in ROWS.items():
        lines += ["", f"### Not here: {title}", "", "| vLLM | accepted | instead |", "| --- | --- | --- |"]
        for row in rows:
            accepted = ", ".join(f"`{value}`" for value in row.accepts)
            refused = row.switches if row.accepts else f"{row.names} {row.switches}".strip()
            for names, means in ((row.names if row.accepts else "", accepted), (refused, ""), (row.granted, "given")):
                if names:
                    shown = ", ".join(f"`{_shown(name)}`" for name in names.split())
                    lines.append(f"| {shown} | {means} | {_cell(row.instead)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _shown(name: str) -> str:
    is_short = len(name) <= 3 and name != "uds"
    return ("-" if is_short else "--") + name.replace("_", "-")
