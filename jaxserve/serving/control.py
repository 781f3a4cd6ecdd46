"""Routes that control the engine: pause and resume, other weights, the prefix cache, sleep, and what it is set to.

They exist only with options.ServerOptions.enable_control, and always need an API key. Of several replicas, which share an address,
the one that gets a call passes it on to all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import httpx
from fastapi import Body, FastAPI, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.errors import RefusedError, checking
from jaxserve.serving.fleet_answers import FleetAnswer
from jaxserve.serving.metrics import Metrics
from jaxserve.serving.openapi import answers
from jaxserve.serving.options import CONTROL_PATHS
from jaxserve.serving.protocol import SleepRequest, UpdateWeightsRequest, UpdateWeightVersionRequest
from jaxserve.serving.responses import Done, Paused, ServerInfo, Sleeping, WeightInfo, encode
from jaxserve.serving.strict_model import OnlyFalse

DEFAULT_SLEEP = SleepRequest(level=1)


@dataclass(frozen=True)
class ControlCall:
    """A request of a control route, as it is passed on to a replica. target: its path and query."""

    method: str
    target: str
    content_type: str | None
    body: bytes

    @classmethod
    async def of(cls, request: Request) -> ControlCall:
        query = request.scope["query_string"].decode("latin-1")
        target = f"{request.scope['path']}?{query}" if query else request.scope["path"]
        return cls(request.method, target, request.headers.get("content-type"), await request.body())

    async def ask(self, app: ASGIApp) -> tuple[int, bytes]:
        """The status and body of an application's answer."""
        headers = {} if self.content_type is None else {"Content-Type": self.content_type}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica", timeout=None) as client:
            answer = await client.request(self.method, self.target, content=self.body, headers=headers)
        return answer.status_code, answer.content


AskAll = Callable[[ControlCall], Awaitable[tuple[int, FleetAnswer]]]  # asks all of several, and returns as `answer_of_all`


def _json(answer: Any) -> Response:
    return Response(encode(answer), media_type="application/json")


def control_routes(app: FastAPI, engine: AsyncLLM, metrics: Metrics) -> None:
    """Adds the routes."""
    _pause_routes(app, engine)
    _sleep_routes(app, engine, metrics)
    simple, with_body = answers(Done, 400, 401, 500, 503), answers(Done, 400, 401, 408, 409, 413, 500, 503)

    @app.post("/reset_prefix_cache", response_model=None, **simple)
    async def reset_prefix_cache(
        reset_external: Annotated[bool, Query(description="Find nothing in a kv_store either that lies there now.")] = False,
        reset_running_requests: Annotated[OnlyFalse, Query(description="Requests keep their pages: /pause ends them.")] = False,
    ) -> Response:
        return _json(Done(success=await engine.reset_prefix_cache(reset_external)))

    @app.post("/update_weights_from_path", response_model=None, **with_body)
    async def update_weights_from_path(body: UpdateWeightsRequest) -> Response:
        try:
            with checking():
                version = await engine.update_weights_from_path(body.path, body.in_flight, body.weight_version)
        except OSError as error:  # FileNotFoundError among them
            raise HTTPException(400, str(error)) from None
        except RuntimeError as error:
            raise HTTPException(409, str(error)) from None
        return _json(Done(weight_version=version))

    @app.post("/update_weight_version", response_model=None, **with_body)
    async def update_weight_version(body: UpdateWeightVersionRequest) -> Response:
        with checking():
            await engine.update_weight_version(body.new_version)
        return _json(Done(success=True, weight_version=body.new_version, new_version=body.new_version))

    @app.get("/weight_info", response_model=None, **answers(WeightInfo, 401))
    async def weight_info() -> Response:
        return _json(WeightInfo(engine.stats.weight_version))

    @app.get("/server_info", response_model=None, **answers(ServerInfo, 400, 401))
    async def server_info(config_format: Literal["text", "json"] = "text") -> Response:
        config: Any = {name: _plain(getattr(engine.config, name)) for name in ("engine", "model", "scheduler", "cache")}
        return _json(ServerInfo(config if config_format == "json" else str(config), _versions()))


def routes_of_all(app: FastAPI, ask_all: AskAll) -> None:
    """Adds routes of the same paths, which pass a call on to all of several and answer with what each of them said."""

    async def ask(request: Request) -> Response:
        status, answer = await ask_all(await ControlCall.of(request))
        return Response(encode(answer), status, media_type="application/json")

    for path in CONTROL_PATHS:
        app.add_api_route(path, ask, methods=["GET", "POST"], include_in_schema=False)


def _pause_routes(app: FastAPI, engine: AsyncLLM) -> None:
    @app.post("/pause", response_model=None, **answers(Done, 400, 401, 409, 500, 503))
    async def pause(
        mode: Annotated[Literal["abort", "wait", "keep"], Query(description="What becomes of requests under way.")] = "abort",
        clear_cache: Annotated[bool, Query(description="Forget cached prefixes too, unless mode is keep.")] = True,
    ) -> Response:
        try:
            await engine.pause(mode)
        except RuntimeError as error:
            raise HTTPException(409, str(error)) from None
        if mode == "keep" or not clear_cache:
            return _json(Done("paused"))
        return _json(Done("paused", reset=await engine.reset_prefix_cache()))

    @app.post("/resume", response_model=None, **answers(Done, 401, 500, 503))
    async def resume() -> Response:
        await engine.resume()
        return _json(Done("resumed"))

    @app.get("/is_paused", response_model=None, **answers(Paused, 401))
    async def is_paused() -> Response:
        return _json(Paused(engine.is_paused))


def _sleep_routes(app: FastAPI, engine: AsyncLLM, metrics: Metrics) -> None:
    @app.post("/sleep", response_model=None, **answers(Done, 400, 401, 408, 409, 413, 500, 503))
    async def sleep(
        request: Request,
        body: Annotated[SleepRequest, Body()] = DEFAULT_SLEEP,
        level: Annotated[int | None, Query(ge=1, le=2, description="As the body's, before which it goes.")] = None,
        mode: Annotated[
            Literal["abort", "wait"] | None, Query(description="What becomes of requests under way; by default they forbid it.")
        ] = None,
    ) -> Response:
        if (await request.body()).strip() == b"null":  # which FastAPI takes for no body
            raise RefusedError("the body must be an object, or left out")
        level = body.level if level is None else level
        try:
            if mode is not None:
                await engine.pause(mode)
            try:
                with metrics.sleep_operation("sleep"):
                    await engine.sleep(level)
            finally:
                if mode is not None:
                    await engine.resume()
        except RuntimeError as error:
            raise HTTPException(409, str(error)) from None
        return _json(Done("sleeping", level=level))

    @app.post("/wake_up", response_model=None, **answers(Done, 400, 401, 500, 503))
    async def wake_up(
        tags: Annotated[
            list[Literal["weights", "kv_cache"]] | None, Query(description="What wakes; by default both. It sleeps until both do.")
        ] = None,
    ) -> Response:
        with metrics.sleep_operation("wake"):
            is_awake = await engine.wake_up(tags)
        return _json(Done("awake" if is_awake else "sleeping", tags=tags))

    @app.get("/is_sleeping", response_model=None, **answers(Sleeping, 401))
    async def is_sleeping() -> Response:
        return _json(Sleeping(engine.stats.is_asleep))


def _plain(value: Any) -> Any:
    """A setting as JSON; what has no form there as its text."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("jaxserve", "jax", "jaxlib", "flax", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
