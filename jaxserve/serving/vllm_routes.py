"""vLLM's routes: what differs of those that are here, and why the others are not, or what to ask instead.

Owns these tables, of vLLM 0.32's "METHOD /path". What is said of requests' fields stands in vllm_fields.py.
"""

from __future__ import annotations

_RENDER = "without `--enable-scale-out`; `sampling_params` has what is set, and no `features`"
# Routes that are here -> what differs; "": nothing but that unknown fields are refused.
ROUTES: dict[str, str] = {
    "POST /v1/chat/completions": "",
    "POST /v1/chat/completions/batch": "",
    "POST /v1/completions": "",
    "GET /v1/models": "",
    "POST /v1/responses": "a response is kept unless `store` is false, which takes an environment variable there",
    "GET /v1/responses/{response_id}": "a stream has recent events alone; `DELETE` is here too",
    "POST /v1/responses/{response_id}/cancel": "",
    "POST /v1/messages": "",
    "POST /v1/messages/count_tokens": "",
    "POST /v1/chat/completions/render": _RENDER,
    "POST /v1/completions/render": _RENDER,
    "POST /v1/messages/render": _RENDER,
    "POST /inference/v1/generate": "without `--enable-scale-out`",
    "POST /inference/v1/abort_requests": "the ids of answers are taken too; answers with `num_aborted`, when it is done",
    "POST /tokenize": "",
    "POST /detokenize": "",
    "GET /tokenizer_info": "without a flag; special tokens and the chat template, and not all that the tokenizer's files say",
    "GET /health": "has a body with `status` and `reason`",
    "POST /invocations": "a chat where the body has `messages`, else a completion; no adapters and no sessions",
    "GET /ping": "has a body, as `/health`",
    "POST /ping": "has a body, as `/health`",
    "GET /load": "without `--enable-server-load-tracking`",
    "GET /version": "jaxserve's own",
    "GET /metrics": "has [names](metrics.md) with the prefix `jaxserve:`, or `vllm:` with `--vllm_metric_names`",
    "GET /openapi.json": "",
    "POST /pause": "`reset` in the answer says whether cached prefixes were forgotten",
    "POST /resume": "",
    "GET /is_paused": "",
    "POST /sleep": "without `mode` it is 409 while requests are under way, and does not abort them; no `mode=keep`, no `level=0`",
    "POST /wake_up": "",
    "GET /is_sleeping": "",
    "POST /reset_prefix_cache": "`reset_running_requests=true` is refused",
    "GET /server_info": "the settings are in `jaxserve_config`",
    "GET /weight_info": "",
    "POST /update_weight_version": "",
}
_READ_TEXT = "models read text alone"
_GENERATE = "models generate; there is no pooling or embedding"
_FROM_PATH = "weights come from a path by /update_weights_from_path, or in Python by LLM.update_params"
_NO_COHERE = "Cohere's API is not here: ask /v1/chat/completions"
_NO_ADAPTERS = "there are no adapters; merge them into the weights, or serve merged weights from a folder of their own"
_PROFILE = "trace with jax.profiler in Python; `jaxserve tune profile` times steps"
_PAGES = "documentation pages are not served; /openapi.json is the schema"
_FAULTS = "Ray starts a lost replica again, and `jaxserve router` goes round a server that is down"
_SCALE = "replicas on Ray follow the load: --ray --max_replicas"
# Routes that are not here -> why, or what to ask.
MISSING_ROUTES: dict[str, str] = {
    "POST /v1/responses/render": "render the same conversation as a chat: /v1/chat/completions/render",
    "POST /v1/chat/completions/derender": "/detokenize makes text of token ids, and /v1/chat/completions parses its own outputs",
    "POST /v1/completions/derender": "/detokenize makes text of token ids",
    "POST /cohere/v2/chat": _NO_COHERE,
    "POST /cohere/v2/chat/render": _NO_COHERE,
    "POST /v1/systemone": "give /v1/chat/completions a question and structured_outputs with the choice",
    "POST /generative_scoring": "give /v1/completions max_tokens=1, logprobs and logprob_token_ids",
    "POST /classify": _GENERATE,
    "POST /pooling": _GENERATE,
    "POST /score": _GENERATE,
    "POST /v1/score": _GENERATE,
    "POST /rerank": _GENERATE,
    "POST /v1/rerank": _GENERATE,
    "POST /v2/rerank": _GENERATE,
    "POST /v1/embeddings": _GENERATE,
    "POST /v2/embed": _GENERATE,
    "POST /v1/audio/transcriptions": _READ_TEXT,
    "POST /v1/audio/translations": _READ_TEXT,
    "WEBSOCKET /v1/realtime": _READ_TEXT,
    "POST /reset_mm_cache": _READ_TEXT,
    "POST /reset_encoder_cache": _READ_TEXT,
    "POST /v1/load_lora_adapter": _NO_ADAPTERS,
    "POST /v1/unload_lora_adapter": _NO_ADAPTERS,
    "POST /abort_requests": "/inference/v1/abort_requests ends requests by name, and /pause all of them",
    "POST /init_weight_transfer_engine": _FROM_PATH,
    "POST /shutdown_weight_transfer_engine": _FROM_PATH,
    "POST /start_weight_update": _FROM_PATH,
    "POST /start_draft_weight_update": _FROM_PATH,
    "POST /update_weights": _FROM_PATH,
    "POST /finish_weight_update": _FROM_PATH,
    "POST /weight_checker": "there are no checksums; /weight_info names the weights",
    "GET /get_world_size": "no trainer joins the engine's devices; /server_info says how many there are",
    "POST /release_kv_cache_memory": "/sleep frees the pages, and at level 1 keeps the weights on the host",
    "POST /collective_rpc": "clients run no code in the engine",
    "POST /start_profile": _PROFILE,
    "POST /stop_profile": _PROFILE,
    "GET /kv_event_sources": "`jaxserve router` keeps its own account of prefixes",
    "POST /scale_elastic_ep": _SCALE,
    "POST /is_scaling_elastic_ep": _SCALE,
    "POST /fault_tolerance/apply": _FAULTS,
    "GET /fault_tolerance/status": _FAULTS,
    "GET /ready": "of vLLM's supervisor of data-parallel servers: ask /health",
    "GET /readyz": "of vLLM's supervisor of data-parallel servers: ask /health",
    "GET /docs": _PAGES,
    "GET /docs/oauth2-redirect": _PAGES,
    "GET /static": _PAGES,
}


def instead_of(path: str) -> str | None:
    """Why a path of vLLM's is not here, or what to ask. None: it is here, or is not vLLM's either."""
    return next((why for route, why in MISSING_ROUTES.items() if route.partition(" ")[2] == path), None)
