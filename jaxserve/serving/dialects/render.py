"""`/v1/chat/completions/render`, `/v1/completions/render` and `/v1/messages/render`, as vLLM has them: what a request asks of the
engine, as the body of `/inference/v1/generate`, which answers it with token ids. Nothing is generated.

Owns how a prompt and its SamplingParams are written as such a body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from msgspec import Struct
from starlette.responses import Response

from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.chat import ask_of_chat
from jaxserve.serving.chat_protocol import ChatRequest
from jaxserve.serving.completions import asks_of_completion
from jaxserve.serving.dialects.anthropic import RENAMED, to_chat
from jaxserve.serving.dialects.anthropic_protocol import MessagesRequest
from jaxserve.serving.dialects.generate import GenerateSampling
from jaxserve.serving.dialects.turn import beside, renaming
from jaxserve.serving.errors import RefusedError, checking
from jaxserve.serving.forms import OPTIONS
from jaxserve.serving.generation import Served, request_id_of
from jaxserve.serving.openapi import answers
from jaxserve.serving.protocol import CompletionRequest, StreamOptions, check_model
from jaxserve.serving.responses import encode
from jaxserve.serving.streaming import unless_gone
from jaxserve.serving.streams import Ask
from jaxserve.structured_outputs import KINDS, StructuredOutputsParams

ERRORS = (400, 401, 404, 408, 413, 500, 503)


class Rendered(Struct, kw_only=True):
    """The body of a request for `/inference/v1/generate`. reasoning_ended: of an output that has a form, whether that holds from
    the first token on; null where there is none."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    reasoning_ended: bool | None
    return_token_ids: bool | None
    timeout: float | None


RenderedPrompts = list[Rendered]


def render_routes(app: FastAPI, served: Served) -> None:
    """Adds the routes."""

    @app.post("/v1/chat/completions/render", response_model=None, **answers(Rendered, *ERRORS))
    async def render_chat(body: ChatRequest, request: Request) -> Response:
        (rendered,) = await _rendered(served, body, request, "chatcmpl", lambda: [ask_of_chat(served, body)])
        return _json(rendered)

    @app.post("/v1/completions/render", response_model=None, **answers(RenderedPrompts, *ERRORS))
    async def render_completions(body: CompletionRequest, request: Request) -> Response:
        asks = partial(asks_of_completion, served, body, lambda params: params)
        return _json(await _rendered(served, body, request, "cmpl", asks))

    @app.post("/v1/messages/render", response_model=None, **answers(Rendered, *ERRORS))
    async def render_messages(body: MessagesRequest, request: Request) -> Response:
        with renaming(RENAMED):
            check_model(body.model, served.names)
            chat = await beside(served, request, lambda: to_chat(served, body))
            chat.stream = body.stream
            (rendered,) = await _rendered(served, chat, request, "chatcmpl", lambda: [ask_of_chat(served, chat)])
        return _json(rendered)


def _json(answer: Rendered | RenderedPrompts) -> Response:
    return Response(encode(answer), media_type="application/json")


async def _rendered(
    served: Served, body: ChatRequest | CompletionRequest, request: Request, prefix: str, read: Callable[[], Sequence[Ask]]
) -> list[Rendered]:
    """A body for each prompt. read: reads the prompts, on a thread. Raises what refuses the request."""
    check_model(body.model, served.names)
    if body.use_beam_search:
        raise RefusedError("use_beam_search: /inference/v1/generate has no beam search", param="use_beam_search")
    if body.max_tokens == 0:
        raise RefusedError("max_tokens=0: /inference/v1/generate answers with a token at least", param="max_tokens")
    size, request_id = len(await request.body()), f"{prefix}-{request_id_of(request, body)}"

    def work() -> list[Rendered]:
        with checking(body.form_field):
            asks = read()
            names = [request_id] if len(asks) == 1 else [f"{request_id}-{i}" for i in range(len(asks))]
            return [_written(served, body, name, ask) for name, ask in zip(names, asks, strict=True)]

    return await unless_gone(request, served.engine.aside(size, work))


def _written(served: Served, body: ChatRequest | CompletionRequest, request_id: str, ask: Ask) -> Rendered:
    served.engine.ready(ask.params)  # raises what the engine would
    num_tokens, longest = len(ask.prompt_token_ids), served.engine.config.scheduler.max_model_len
    if not 0 < num_tokens < longest:
        raise RefusedError(
            f"a prompt of {num_tokens} tokens: the model's maximum context length is {longest} tokens, with the answer"
        )
    form, options = ask.params.structured_outputs, body.stream_options if body.stream else None
    assert form is None or isinstance(form, StructuredOutputsParams)
    ended = None if form is None else form.preamble is None
    if isinstance(body, ChatRequest) and form is not None and form.preamble is not None:
        if body.continued and not form.preamble[0]:
            raise RefusedError("continue_final_message: of an answer that breaks off in its reasoning no form can be rendered")
        # What the engine answers is not parsed, so that nothing could be left out; a budget is of thinking, which there is then.
        ended = body.include_reasoning is False and form.max_preamble_tokens is None
    return Rendered(
        request_id=request_id,
        model=body.model or served.names[0],
        token_ids=ask.prompt_token_ids,
        sampling_params=_sampling(ask.params, form),
        stream=bool(body.stream),
        stream_options=options.model_dump(exclude_none=True) if isinstance(options, StreamOptions) else None,
        cache_salt=ask.cache_salt,
        priority=ask.priority,
        reasoning_ended=ended,
        return_token_ids=body.return_token_ids,
        timeout=body.timeout,
    )


def _sampling(params: SamplingParams, form: StructuredOutputsParams | None) -> dict[str, Any]:
    """Every field of `/inference/v1/generate` that is set, so that the server's own defaults change nothing."""
    written = {name: getattr(params, name, None) for name in GenerateSampling.model_fields}
    written |= {"detokenize": None, "structured_outputs": None, "thinking_token_budget": None}
    if params.repetition_detection is not None:
        written["repetition_detection"] = asdict(params.repetition_detection)  # pyright: ignore[reportArgumentType]
    if form is not None:
        written["thinking_token_budget"] = form.max_preamble_tokens
        fields = {name: value for name in (*KINDS, *OPTIONS) if (value := getattr(form, name))}
        written["structured_outputs"] = fields or None
    return {name: value for name, value in written.items() if value not in (None, (), [])}
