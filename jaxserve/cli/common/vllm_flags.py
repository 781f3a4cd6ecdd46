"""vLLM's flags: which are ours by another name, and what there is instead of those that we don't have.

Flags that both have under one name are in neither table.
"""

from __future__ import annotations

from dataclasses import dataclass

from absl import flags

# vLLM's name -> ours, of the same thing.
OURS = {
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
    "spec_config": "speculative_config",
    "sc": "speculative_config",
    "disable_uvicorn_access_log": "noaccess_log",
}


@dataclass(frozen=True)
class Missing:
    """A flag of vLLM's that we don't have.

    instead: what to do. accepts: values that ask for what is so here anyway. takes_value: it is no switch.
    """

    instead: str
    accepts: tuple[str, ...] = ()
    takes_value: bool = True


_ONE_DEVICE = "an engine has one device; run a server a device behind `jaxserve router`"
_NO_LORA = "there are no adapters; merge them into the weights, or serve merged weights from a folder of their own"
_TEXT_ONLY = "models read text alone"
_STEPS = "programs are compiled ahead, see --bucket_plan and --warm_up"
_FILES = "what a file holds is told from the file: safetensors, GGUF or Orbax"
_NO_REMOTE = "models are jaxserve's own Flax modules, and no code comes with a checkpoint"
_TELEMETRY = "there is no tracing; /metrics has Prometheus's figures"
_CONTEXT = "edit the model's config.json"

MISSING = {
    # several devices
    "tensor_parallel_size": Missing(_ONE_DEVICE, ("1",)),
    "tp": Missing(_ONE_DEVICE, ("1",)),
    "pipeline_parallel_size": Missing(_ONE_DEVICE, ("1",)),
    "pp": Missing(_ONE_DEVICE, ("1",)),
    "data_parallel_size": Missing(_ONE_DEVICE, ("1",)),
    "dp": Missing(_ONE_DEVICE, ("1",)),
    "decode_context_parallel_size": Missing(_ONE_DEVICE, ("1",)),
    "enable_expert_parallel": Missing(_ONE_DEVICE, takes_value=False),
    "distributed_executor_backend": Missing(_ONE_DEVICE),
    "disable_custom_all_reduce": Missing(_ONE_DEVICE, takes_value=False),
    "nnodes": Missing(_ONE_DEVICE, ("1",)),
    "worker_cls": Missing(_ONE_DEVICE, ("auto",)),
    # weights
    "quantization": Missing("weights are bfloat16, float16 or float32; a quantised GGUF file is read into --dtype"),
    "q": Missing("weights are bfloat16, float16 or float32; a quantised GGUF file is read into --dtype"),
    "load_format": Missing(_FILES, ("auto", "safetensors")),
    "model_loader_extra_config": Missing(_FILES),
    "config_format": Missing(_FILES, ("auto", "hf")),
    "download_dir": Missing("set HF_HOME, which says where models from the hub lie"),
    "revision": Missing("download that revision and give its folder as the model"),
    "code_revision": Missing(_NO_REMOTE),
    "tokenizer_revision": Missing("download that revision and give its folder as --tokenizer"),
    "tokenizer_mode": Missing("the tokenizer is the checkpoint's own", ("auto", "hf")),
    "hf_overrides": Missing(_CONTEXT),
    "hf_config_path": Missing("config.json lies beside the weights"),
    "hf_token": Missing("set HF_TOKEN"),
    "rope_scaling": Missing(_CONTEXT),
    "rope_theta": Missing(_CONTEXT),
    "trust_remote_code": Missing(_NO_REMOTE, takes_value=False),
    "model_impl": Missing(_NO_REMOTE, ("auto",)),
    "runner": Missing("models generate; there is no pooling or embedding", ("auto", "generate")),
    "task": Missing("models generate; there is no pooling or embedding", ("auto", "generate")),
    "convert": Missing("models generate; there is no pooling or embedding", ("auto", "none")),
    "device": Missing("set JAX_PLATFORMS, such as cpu or cuda", ("auto",)),
    "logits_processors": Missing("use a request's logit_bias, or a grammar (structured outputs)"),
    "enable_lora": Missing(_NO_LORA, takes_value=False),
    "lora_modules": Missing(_NO_LORA),
    "max_loras": Missing(_NO_LORA),
    "max_lora_rank": Missing(_NO_LORA),
    "max_cpu_loras": Missing(_NO_LORA),
    "lora_dtype": Missing(_NO_LORA),
    "limit_mm_per_prompt": Missing(_TEXT_ONLY),
    "mm_processor_kwargs": Missing(_TEXT_ONLY),
    "mm_processor_cache_gb": Missing(_TEXT_ONLY),
    "allowed_local_media_path": Missing(_TEXT_ONLY),
    # memory
    "kv_cache_dtype": Missing("the KV cache has the weights' dtype, --dtype", ("auto",)),
    "kv_cache_memory_bytes": Missing("give --num_pages or --gpu_memory_utilization"),
    "calculate_kv_scales": Missing("the KV cache has the weights' dtype, --dtype", takes_value=False),
    "swap_space": Missing("preempted requests are computed again, so that nothing is swapped", ("0",)),
    "cpu_offload_gb": Missing("weights lie on the device; take a smaller model or --dtype=bfloat16", ("0",)),
    "prefix_caching_hash_algo": Missing("pages are found by sha256", ("sha256",)),
    "kv_transfer_config": Missing("a request stays on one server; `jaxserve router` sends it where its prefix is cached"),
    "kv_events_config": Missing("`jaxserve router` keeps its own account of prefixes"),
    "disable_sliding_window": Missing("layers attend as the checkpoint says", takes_value=False),
    "disable_hybrid_kv_cache_manager": Missing("all layers have pages of one kind", takes_value=False),
    "enable_sleep_mode": Missing("--enable_control adds /sleep and /wake_up", takes_value=False),
    # steps
    "enforce_eager": Missing("every step is a compiled program; --warm_up=first_use starts soonest", takes_value=False),
    "compilation_config": Missing(_STEPS),
    "O": Missing(_STEPS),
    "cuda_graph_sizes": Missing(_STEPS),
    "max_seq_len_to_capture": Missing(_STEPS),
    "num_scheduler_steps": Missing("--async_scheduling (on) schedules a step ahead", ("1",)),
    "max_num_partial_prefills": Missing("--long_prefill_token_threshold leaves room for other prompts"),
    "max_long_partial_prefills": Missing("--long_prefill_token_threshold leaves room for other prompts"),
    "scheduler_cls": Missing("--batching_policy and --scheduling_policy choose how steps are composed"),
    "disable_cascade_attention": Missing("there is no cascade attention to disable", takes_value=False),
    # answers
    "max_logprobs": Missing("a request may ask for as many as the API allows"),
    "logprobs_mode": Missing("log-probabilities are of the raw logits", ("raw_logprobs",)),
    "generation_config": Missing("defaults are the checkpoint's generation_config.json", ("auto",)),
    "override_generation_config": Missing("edit the checkpoint's generation_config.json, or say it in the request"),
    "guided_decoding_backend": Missing("grammars are llguidance's", ("auto", "guidance")),
    "structured_outputs_config": Missing("grammars are llguidance's"),
    "enable_auto_tool_choice": Missing("--tool_call_parser is auto unless given", ("",), takes_value=False),
    "tool_parser_plugin": Missing("choose from --tool_call_parser's values"),
    "enable_reasoning": Missing("--reasoning_parser is auto unless given", ("",), takes_value=False),
    "reasoning_parser_plugin": Missing("choose from --reasoning_parser's values"),
    "chat_template": Missing("put it beside the tokenizer as chat_template.jinja"),
    "chat_template_content_format": Missing("the template is asked what it takes", ("auto",)),
    "response_role": Missing("answers are the assistant's", ("assistant",)),
    # the server
    "uds": Missing("the server listens on --host and --port"),
    "root_path": Missing("let the proxy strip the path"),
    "middleware": Missing("put a proxy before the server"),
    "allowed_origins": Missing("put a proxy before the server"),
    "ssl_ca_certs": Missing("a client shows --api_key, no certificate"),
    "uvicorn_log_level": Missing("--noaccess_log leaves out a line a request"),
    "enable_log_requests": Missing("prompts are never logged", takes_value=False),
    "disable_log_requests": Missing("prompts are never logged", ("",), takes_value=False),
    "disable_log_stats": Missing("figures are at /metrics, and not logged", ("",), takes_value=False),
    "max_log_len": Missing("prompts are never logged"),
    "disable_fastapi_docs": Missing("the published schema is part of the API", takes_value=False),
    "api_server_count": Missing("one process serves; `jaxserve router` joins several", ("1",)),
    "otlp_traces_endpoint": Missing(_TELEMETRY),
    "collect_detailed_traces": Missing(_TELEMETRY),
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

    known: the command's flags by name.

    Raises:
      Refused: vLLM's, and there is none here.
      AcceptedAsIs: vLLM's, and certain values ask for what is so here anyway.
    """
    if name in known:
        return name
    positive = name.removeprefix("no_")
    ours = OURS.get(positive, positive)
    if positive != name and ours in known and known[ours].boolean:
        return f"no{ours}"
    if ours in known or ours.startswith("no") and ours[2:] in known:
        return ours
    if "page_size" in known and positive in MISSING:
        row = MISSING[positive]
        if positive != name and not row.takes_value:
            raise AcceptedAsIs((), False, row.instead)  # off, as it is here
        if row.accepts and positive == name:
            raise AcceptedAsIs(row.accepts, row.takes_value, row.instead)
        raise Refused(row.instead)
    return name


def markdown() -> str:
    """Both tables, for the page that compares us with vLLM."""
    lines = ["| vLLM | jaxserve |", "| --- | --- |"]
    lines += [f"| `{_shown(theirs)}` | `{_shown(ours)}` |" for theirs, ours in OURS.items()]
    lines += ["", "| vLLM | values that are accepted | instead |", "| --- | --- | --- |"]
    for name, row in MISSING.items():
        accepted = ", ".join(f"`{value}`" for value in row.accepts if value) or ("given" if row.accepts else "")
        lines.append(f"| `{_shown(name)}` | {accepted} | {row.instead} |")
    return "\n".join(lines) + "\n"


def _shown(name: str) -> str:
    return ("-" if len(name) == 1 else "--") + name.replace("_", "-")
