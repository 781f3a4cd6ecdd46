"""Routes that control the engine: `/pause`, `/resume`, `/update_weights_from_path`, `/reset_prefix_cache`, `/sleep`, `/wake_up`.

They exist only with options.ServerOptions.enable_control, and always need an API key.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.errors import RefusedError, checking
from jaxserve.serving.openapi import answers
from jaxserve.serving.protocol import SleepRequest, UpdateWeightsRequest
from jaxserve.serving.responses import Done, encode

DEFAULT_SLEEP = SleepRequest(level=1)


def _done(reset: bool | None = None) -> Response:
    done = Done() if reset is None else Done(reset=reset)
    return Response(encode(done), media_type="application/json")


def control_routes(app: FastAPI, engine: AsyncLLM) -> None:
    """Adds the routes."""
    simple, with_body = answers(Done, 401, 500, 503), answers(Done, 400, 401, 408, 409, 413, 500, 503)

    @app.post("/pause", response_model=None, **simple)
    async def pause() -> Response:
        await engine.pause()
        return _done()

    @app.post("/resume", response_model=None, **simple)
    async def resume() -> Response:
        await engine.resume()
        return _done()

    @app.post("/reset_prefix_cache", response_model=None, **simple)
    async def reset_prefix_cache() -> Response:
        return _done(await engine.reset_prefix_cache())

    @app.post("/update_weights_from_path", response_model=None, **with_body)
    async def update_weights_from_path(body: UpdateWeightsRequest) -> Response:
        try:
            with checking():
                await engine.update_weights_from_path(body.path, body.in_flight)
        except OSError as error:  # FileNotFoundError among them
            raise HTTPException(400, str(error)) from None
        except RuntimeError as error:
            raise HTTPException(409, str(error)) from None
        return _done()

    @app.post("/sleep", response_model=None, **with_body)
    async def sleep(request: Request, body: Annotated[SleepRequest, Body()] = DEFAULT_SLEEP) -> Response:
        if (await request.body()).strip() == b"null":  # which FastAPI takes for no body
            raise RefusedError("the body must be an object, or left out")
        try:
            await engine.sleep(body.level)
        except RuntimeError as error:
            raise HTTPException(409, str(error)) from None
        return _done()

    @app.post("/wake_up", response_model=None, **simple)
    async def wake_up() -> Response:
        await engine.wake_up()
        return _done()
