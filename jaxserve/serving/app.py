"""The HTTP application: its routes and its middleware.

Owns the routes and their documentation. Knows nothing of how anything is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import inspect
from collections.abc import AsyncGenerator, Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match

from jaxserve.serving import tokens
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.bodies import reading_route
from jaxserve.serving.chat import create_chat_completion
from jaxserve.serving.chat_page import read_chat_page
from jaxserve.serving.chat_protocol import ChatRequest, Invocation, TokenizeChatRequest
from jaxserve.serving.completions import create_completion
from jaxserve.serving.control import AskAll, control_routes, routes_of_all
from jaxserve.serving.dialects.anthropic import messages_routes
from jaxserve.serving.dialects.chat_batch import chat_batch_routes
from jaxserve.serving.dialects.generate import abort_routes, generate_routes
from jaxserve.serving.dialects.render import render_routes
from jaxserve.serving.dialects.response_store import open_store
from jaxserve.serving.dialects.responses import Responses, responses_routes
from jaxserve.serving.errors import RefusedError, on_error
from jaxserve.serving.generation import Served
from jaxserve.serving.keys import KeyRing
from jaxserve.serving.messages import HTTPAnswered, Ready, Report, RequestError, UnavailableError
from jaxserve.serving.metrics import Metrics, load_of, make_metrics
from jaxserve.serving.middleware import KeyCheck, LastResort, LoadReport, RequestLog, RootPath, body_limit
from jaxserve.serving.notations import CALLS, REASONING, chosen
from jaxserve.serving.openapi import Limits, answers, publish
from jaxserve.serving.options import CONTROL_PATHS, CrossOrigin, ServerOptions, check_can_share, check_role_has_store, needs_one
from jaxserve.serving.parsers import Notation
from jaxserve.serving.protocol import CompletionRequest, DetokenizeRequest, TokenizeCompletionRequest, check_model
from jaxserve.serving.responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    Health,
    Load,
    ModelCard,
    ModelList,
    ModelPermission,
    TokenizerInfo,
    Tokens,
    Version,
    encode,
)
from jaxserve.serving.streaming import ClientGoneError, unless_gone
from jaxserve.serving.tracing import Tracing

ANSWERED = (RequestValidationError, HTTPException, RequestError, RefusedError)
GENERATION_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)


def make_app(
    engine: AsyncLLM,
    options: ServerOptions,
    *,
    shares_engine: bool = False,
    one_of_several: str | None = None,
    ask_all: AskAll | None = None,
) -> FastAPI:
    """The application. Its lifespan starts the engine, and shuts it down at the end; `state.keys` is its KeyRing.

    shares_engine: other processes use the engine, by a hub that this one asks for what only all of them together can say.
    one_of_several: "api_server_count" or "replicas", where that option says that others answer the same clients, so that a later
      request may come to another one than an earlier one's. None: this application answers all.
    ask_all: passes a control call on to all of them, to `state.controls` of each. None: control routes are of this engine alone.

    Raises:
      ValueError: a role without a shared store; an otlp_endpoint without OpenTelemetry; as `KeyRing`; as `check_can_share`.
    """
    if one_of_several is not None:
        check_can_share(options, one_of_several, asks_all=ask_all is not None)
    check_role_has_store(options.role, engine.config.engine.kv_store)
    served = Served(engine, options, _notation(engine, options))
    keys = KeyRing(options.api_keys, options.api_keys_file)
    metrics = None if shares_engine else make_metrics(engine.config, options, engine.stats, lambda: engine.num_refused, keys)
    tracing = None if options.otlp_endpoint is None else Tracing(options.otlp_endpoint, options.names[0], options.role)
    engine.listener = _all([listener.take for listener in (metrics, tracing) if listener is not None])
    kept = (options.response_store, options.max_stored_responses, options.max_stored_bytes)
    store = open_store(*kept) if one_of_several is None else None
    responses = Responses(served, store, one_of_several)

    app = FastAPI(
        title="jaxserve",
        version=version("jaxserve"),
        description="OpenAI's API on a JAX inference engine.",
        lifespan=_lifespan(engine, responses, tracing, shares_engine),
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=_error_handlers(),
        middleware=_middleware(options, engine, metrics, keys, lambda: paths),
    )
    app.state.keys = keys
    app.router.route_class = reading_route(engine.read_body)
    _generation_routes(app, served)
    _model_routes(app, served, options.root or options.names[0])
    for add_routes in (chat_batch_routes, generate_routes, render_routes, messages_routes):
        add_routes(app, served)
    responses_routes(app, responses)
    if one_of_several is not None:
        _refuse_what_one_process_keeps(app, one_of_several)
    else:
        abort_routes(app, served)
    _token_routes(app, served)
    _operator_routes(app, served, metrics)
    if options.enable_control and metrics is not None:
        _control_routes(app, engine, metrics, ask_all)
    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    publish(app, _limits(engine, served, options), open_paths=options.open_paths if options.has_keys else None)
    return app


def _error_handlers() -> dict[Any, Any]:
    return {ClientGoneError: _nobody_listens, **dict.fromkeys(ANSWERED, on_error), 405: _on_wrong_method}


def _control_routes(app: FastAPI, engine: AsyncLLM, metrics: Metrics, ask_all: AskAll | None) -> None:
    """The control routes. Where they ask all of several, those of this engine are an application of their own, `state.controls`."""
    if ask_all is None:
        control_routes(app, engine, metrics)
        return
    routes_of_all(app, ask_all)
    app.state.controls = own = FastAPI(
        openapi_url=None, redirect_slashes=False, exception_handlers=_error_handlers(), middleware=[Middleware(LastResort)]
    )
    own.router.route_class = reading_route(engine.read_body)
    control_routes(own, engine, metrics)


def _limits(engine: AsyncLLM, served: Served, options: ServerOptions) -> Limits:
    """Of requests, as the published schema has them."""
    return Limits(
        options.names,
        engine.config.model.vocab_size,
        _template_variables(engine),
        served.notation.tool_calls is not None,
        engine.config.scheduler.order == "priority",
        options.trust_request_chat_template,
        served.notation.counts_tokens(engine.tokenizer),
        engine.config.scheduler.max_model_len,
        served.notation.reasoning is not None,
    )


def _all(listeners: list[Callable[[Report], None]]) -> Callable[[Report], None] | None:
    def take(report: Report) -> None:
        for listener in listeners:
            listener(report)

    return listeners[0] if len(listeners) == 1 else take if listeners else None


def _lifespan(engine: AsyncLLM, responses: Responses, tracing: Tracing | None, shares_engine: bool) -> Callable[[FastAPI], Any]:
    """Starts the engine, and shuts down what a server has at its end."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        if shares_engine:
            engine.tell(Ready())
        yield
        await responses.close()
        await engine.shutdown(0)  # the HTTP server has waited for requests as long as it wants to
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    return lifespan


def _refuse_what_one_process_keeps(app: FastAPI, count: str) -> None:
    """Routes whose requests would have to find the process that an earlier one was answered by. count: as one_of_several."""

    async def refuse(request: Request) -> Response:
        raise RefusedError(f"{request.url.path} {needs_one(count)}", status=501)

    for path in ("/v1/responses/{rest:path}", "/inference/v1/abort_requests"):
        app.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)


def _notation(engine: AsyncLLM, options: ServerOptions) -> Notation:
    templates = engine.tokenizer.chat_templates.values() if engine.tokenizer else ()
    found = Notation.of_template("\n".join(templates))
    reasoning = chosen("reasoning_parser", options.reasoning_parser, REASONING, found.reasoning)
    return Notation(reasoning, chosen("tool_call_parser", options.tool_call_parser, CALLS, found.tool_calls))


def _template_variables(engine: AsyncLLM) -> frozenset[str]:
    try:
        return engine.get_tokenizer().template_variables()
    except ValueError:  # no tokenizer, or no template: chats will be refused with that
        return frozenset()


def _middleware(
    options: ServerOptions, engine: AsyncLLM, metrics: Metrics | None, keys: KeyRing, paths: Callable[[], frozenset[str]]
) -> list[Middleware]:
    """metrics: None: those of a hub, which is told of each answer."""
    cors = options.cross_origin

    def tell(path: str, status: int) -> None:
        engine.tell(HTTPAnswered(path, status, engine.num_refused))

    return [
        *map(_named_middleware, options.middleware),
        *([] if cors is None else [_cors(cors)]),
        *([Middleware(RootPath, root_path=options.root_path)] if options.root_path else []),
        Middleware(
            RequestLog,
            paths=paths,
            count=tell if metrics is None else metrics.count_http,
            answers_id=options.enable_request_id_headers,
        ),
        Middleware(KeyCheck, keys=keys, open_paths=options.open_paths, control_paths=CONTROL_PATHS),
        Middleware(LoadReport, load=lambda: load_of(engine.stats)),
        Middleware(LastResort),
        body_limit(options),
    ]


def _cors(given: CrossOrigin) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=given.origins,
        allow_methods=given.methods,
        allow_headers=given.headers,
        allow_credentials=given.credentials,
    )


def _named_middleware(name: str) -> Middleware:
    """The middleware of that name. Raises ValueError where there is none."""
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"middleware={name!r} must name a class or an async function as module.name: {error}") from None
    if isinstance(found, type):
        made: Any = found
        return Middleware(made)
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ValueError(f"middleware={name!r} is neither a class nor an async function")


async def _on_wrong_method(request: Request, error: Exception) -> Response:
    """405 with the methods of all routes of the path: Starlette tells those of the first alone."""
    routes: list[Any] = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
    return await on_error(request, HTTPException(405, headers={"Allow": ", ".join(sorted(methods))}))


async def _nobody_listens(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


def _json(answer) -> Response:
    return Response(encode(answer), media_type="application/json")


def _generation_routes(app: FastAPI, served: Served) -> None:
    streamed = "text/event-stream"

    @app.post("/v1/completions", response_model=None, **answers(Completion, *GENERATION_ERRORS, also=streamed))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        request.state.user = body.user
        return await create_completion(served, body, request)

    @app.post("/v1/chat/completions", response_model=None, **answers(ChatCompletion, *GENERATION_ERRORS, also=streamed))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        request.state.user = body.user
        return await create_chat_completion(served, body, request)

    @app.post("/invocations", response_model=None, include_in_schema=False)  # SageMaker's name of both
    async def invocations(body: Invocation, request: Request) -> Response:
        request.state.user = body.user
        if isinstance(body, ChatRequest):
            return await create_chat_completion(served, body, request)
        return await create_completion(served, body, request)


def _model_routes(app: FastAPI, served: Served, root: str) -> None:
    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=served.created,
            root=root,
            max_model_len=served.engine.config.scheduler.max_model_len,
            permission=[ModelPermission(id=f"modelperm-{hashlib.sha256(name.encode()).hexdigest()[:32]}", created=served.created)],
        )

    @app.get("/v1/models", response_model=None, **answers(ModelList, 401))
    async def models() -> Response:
        return _json(ModelList([card(name) for name in served.names]))

    @app.get("/v1/models/{model:path}", response_model=None, **answers(ModelCard, 401, 404))
    async def model(model: str) -> Response:
        if not model:
            raise HTTPException(404)  # /v1/models/ is /v1/models
        check_model(model, served.names)
        return _json(card(model))


def _token_routes(app: FastAPI, served: Served) -> None:
    errors = (400, 401, 404, 408, 413, 500)

    async def aside[T](request: Request, work: Callable[[], T]) -> T:
        size = len(await request.body())
        return await unless_gone(request, served.engine.aside(size, work))

    @app.post("/tokenize", response_model=None, **answers(Tokens, *errors))
    async def tokenize(body: TokenizeCompletionRequest | TokenizeChatRequest, request: Request) -> Response:
        return _json(await aside(request, lambda: tokens.tokenize(served, body)))

    @app.post("/detokenize", response_model=None, **answers(Detokenized, *errors))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        return _json(await aside(request, lambda: tokens.detokenize(served, body)))

    @app.get("/tokenizer_info", response_model=None, **answers(TokenizerInfo, 400, 401))
    async def tokenizer_info() -> Response:
        return _json(tokens.tokenizer_info(served))


def _operator_routes(app: FastAPI, served: Served, metrics: Metrics | None) -> None:
    """metrics: None: a hub has them."""
    page = read_chat_page()

    @app.get("/", include_in_schema=False)
    async def try_it() -> Response:
        return HTMLResponse(page.text, headers=page.headers)

    @app.get("/ping", response_model=None, **answers(Health, 503))
    @app.post("/ping", response_model=None, **answers(Health, 503))
    @app.get("/health", response_model=None, **answers(Health, 503))
    async def health() -> Response:
        try:
            served.engine.check_health()
        except UnavailableError as error:
            raise HTTPException(503, str(error)) from None
        said, role = served.engine.qualification, served.options.role
        version = served.engine.stats.weight_version if served.options.enable_control else UNSET
        kernels, role = UNSET if said is None else said, UNSET if role is None else role
        return _json(Health("ok", kernels=kernels, role=role, weight_version=version))

    @app.get(
        "/metrics",
        response_model=None,
        responses={200: {"description": "Prometheus's text format", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def prometheus() -> Response:
        text = metrics.render() if metrics is not None else await served.engine.ask("metrics")
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/load", response_model=None, **answers(Load, 401))
    async def load() -> Response:
        return _json(Load(served.engine.num_requests if metrics is not None else await served.engine.ask("num_requests")))

    @app.get("/version", response_model=None, **answers(Version))
    async def server_version() -> Response:
        return _json(Version(app.version))
