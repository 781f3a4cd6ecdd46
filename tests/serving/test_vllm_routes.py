"""Every route of vLLM's servers is here, or is answered with the reason."""

import re
from typing import Any

from jaxserve.serving.app import make_app
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.options import CONTROL_PATHS, ServerOptions
from jaxserve.serving.vllm_routes import MISSING_ROUTES, ROUTES
from tests.serving.http_server import serving

# Routes of vLLM 0.32.0, as of 2026-11-26: those of `vllm serve`, whatever its model and its environment. A name alone is copied.
THEIRS = {
    "GET": """/docs /docs/oauth2-redirect /fault_tolerance/status /get_world_size /health /is_paused /is_sleeping
/kv_event_sources /load /metrics /openapi.json /ping /ready /readyz /server_info /static /tokenizer_info /v1/models
/v1/responses/{response_id} /version /weight_info""",
    "POST": """/abort_requests /classify /cohere/v2/chat /cohere/v2/chat/render /collective_rpc /detokenize /fault_tolerance/apply
/finish_weight_update /generative_scoring /inference/v1/abort_requests /inference/v1/generate /init_weight_transfer_engine
/invocations /is_scaling_elastic_ep /pause /ping /pooling /release_kv_cache_memory /rerank /reset_encoder_cache
/reset_mm_cache /reset_prefix_cache /resume /scale_elastic_ep /score /shutdown_weight_transfer_engine /sleep
/start_draft_weight_update /start_profile /start_weight_update /stop_profile /tokenize /update_weight_version
/update_weights /v1/audio/transcriptions /v1/audio/translations /v1/chat/completions /v1/chat/completions/batch
/v1/chat/completions/derender /v1/chat/completions/render /v1/completions /v1/completions/derender /v1/completions/render
/v1/embeddings /v1/load_lora_adapter /v1/messages /v1/messages/count_tokens /v1/messages/render /v1/rerank /v1/responses
/v1/responses/render /v1/responses/{response_id}/cancel /v1/score /v1/systemone /v1/unload_lora_adapter /v2/embed /v2/rerank
/wake_up /weight_checker""",
    "WEBSOCKET": """/v1/realtime""",
}


def plain(route: str) -> str:
    """Without the names of what stands in a path."""
    return re.sub(r"\{[^}]*\}", "{}", route)


def routes_of_a_server(llm: Any) -> set[str]:
    options = ServerOptions(names=("alphabet",), api_keys=("k",), enable_control=True)
    routes: list[Any] = make_app(AsyncLLM(llm), options).routes
    return {plain(f"{method} {route.path}") for route in routes for method in route.methods}


def test_every_route_of_vllms_has_one_row():
    theirs = [f"{method} {path}" for method, paths in THEIRS.items() for path in paths.split()]
    assert len(theirs) == 81 and sorted(theirs) == sorted([*ROUTES, *MISSING_ROUTES])


def test_routes_of_the_tables_are_here_or_not(shared_llm):
    ours = routes_of_a_server(shared_llm)
    assert not {plain(name) for name in ROUTES} - ours and not {plain(name) for name in MISSING_ROUTES} & ours
    paths = {name.partition(" ")[2] for name in ours}
    named = {path for why in MISSING_ROUTES.values() for path in re.findall(r"(?<!\w)/[\w/.]*\w", why)}
    assert "/pause" in named and not named - paths
    own = set(CONTROL_PATHS) - {name.partition(" ")[2] for name in ROUTES}
    assert own == {"/update_weights_from_path"}, "the control routes that vLLM does not have"


def test_a_slash_too_many_leads_to_the_route(server, shared_llm):
    """By a relative address, so that it holds behind a proxy, and no client's Host comes back in it."""
    asked = server.client.get("/v1/models/?a=b", headers={"Host": "elsewhere"})
    assert asked.status_code == 307 and asked.headers["Location"] == "../models?a=b"
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
    assert server.client.post("/v1/completions/", json=body, follow_redirects=True).json()["choices"][0]["text"] == "bc"
    for path in ("/v1/models//", "/nothing/", "/"):
        assert server.client.post(path).status_code in (404, 405)
    with serving(shared_llm, options={"root_path": "/llm"}) as behind:
        assert behind.client.get("/llm/v1/models/", follow_redirects=True).json()["data"]


def test_what_is_not_here_is_answered_with_the_reason(server):
    for name, why in MISSING_ROUTES.items():
        method, path = name.split()
        answer = server.client.request(method.replace("WEBSOCKET", "GET"), path)
        assert answer.status_code == 404 and answer.json()["error"]["message"] == f"this server does not have {path}: {why}"
    for path in ("/nothing", "/pause"):
        assert "does not have" not in server.client.post(path).text
