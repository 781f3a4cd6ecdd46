"""`/inference/v1/generate`: token ids in, token ids out, as vLLM has it. It needs no tokenizer unless text is asked for. And
`/inference/v1/abort_requests`, which ends requests of any route.

Owns the requests, their answers and chunks, and how log-probabilities are written by token id.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from msgspec import UNSET, Struct, UnsetType
from pydantic import ConfigDict, Field, create_model
from starlette.responses import Response

from jaxserve.outputs import Logprob
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.serving.errors import RefusedError
from jaxserve.serving.generation import (
    CallRecord,
    Served,
    chat_logprobs,
    finite,
    open_stream,
    plain_prompt_logprobs,
    request_id_of,
    until_done,
)
from jaxserve.serving.messages import Delta, FailedError
from jaxserve.serving.openapi import answers
from jaxserve.serving.protocol import PASSED_ON, GenerationRequest, StreamOptions, check_model
from jaxserve.serving.responses import PromptLogprobs, Usage, WeightVersions, encode
from jaxserve.serving.streaming import unless_gone
from jaxserve.serving.streams import Ask, RequestStream
from jaxserve.serving.strict_model import Model, Text, Texts, TokenIds, if_given
from jaxserve.serving.vllm_fields import VLLMModel
from jaxserve.structured_outputs import StructuredOutputsParams

ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)


class OutputSampling(VLLMModel):
    """What `sampling_params` has beside the fields that completions and chats have by the same names."""

    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="By default up to the model's length.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of so many likeliest tokens.")
    detokenize: bool | None = Field(None, description="false does not go with output_mode=text, nor with stop.")


_TAKEN = ("logit_bias", "structured_outputs", "spaces_between_special_tokens", "thinking_token_budget")
_SHARED = {name: GenerationRequest.model_fields[name] for name in (*PASSED_ON, *_TAKEN)}
if TYPE_CHECKING:

    class GenerateSampling(OutputSampling, GenerationRequest): ...
else:
    GenerateSampling = create_model(
        "GenerateSampling",
        __base__=OutputSampling,
        __doc__="How to sample, under SamplingParams' names.",
        **{name: (made.annotation, made) for name, made in _SHARED.items()},
    )


class GenerateRequest(VLLMModel):
    """`POST /inference/v1/generate`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(json_schema_extra={"allOf": [if_given("stream_options", "object", "stream")]})

    token_ids: TokenIds
    sampling_params: GenerateSampling
    model: str | None = Field(None, description="One of /v1/models; by default the one that is served.")
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")] | None = None
    output_mode: Literal["tokens", "text"] | None = Field(None, description="text: the answer has the text too.")
    return_token_ids: bool | None = Field(None, description="Answer with the prompt's token ids too.")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only with stream=true.")
    reasoning_ended: bool | None = Field(
        None,
        description="false: a form holds behind the model's reasoning, as /render says it; else from the first token on.",
    )
    cache_salt: Text | None = Field(None, description="Prompts share cached prefixes only under one salt.")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Lower is served first, if the server was told to.")
    timeout: float | None = Field(None, gt=0, description="Ours: seconds from its arrival that it may take; then 504.")

    @property
    def n(self) -> int | None:
        return self.sampling_params.n


class AbortRequests(Model):
    """`POST /inference/v1/abort_requests`."""

    request_ids: Texts = Field(description="As clients gave them (X-Request-Id, or request_id), or as answers have them in id.")


# ---- answers


class IdLogprob(Struct):
    token_id: int
    logprob: float
    rank: int | None


class SampledLogprob(Struct):
    """Of a token of the output. top_logprobs: the sampled token, then the likeliest others by rank, or those asked for by id."""

    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[IdLogprob]


class IdLogprobs(Struct):
    content: list[SampledLogprob]


class GenerateChoice(Struct, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Any = None  # IdLogprobs; with the text, ChatLogprobs
    text: str | UnsetType = UNSET
    weight_versions: WeightVersions = UNSET


class Generated(Struct, kw_only=True):
    """An answer, or a chunk of one. prompt_logprobs: in a stream's first chunk."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[GenerateChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class AbortedRequests(Struct):
    """num_aborted: requests that were under way, the prompts of one counted one by one."""

    num_aborted: int


_PREFIXES = ("generate-tokens-", "chatcmpl-", "cmpl-")  # of ids in answers, before the request's own


def abort_routes(app: FastAPI, served: Served) -> None:
    """Adds the route that ends requests."""

    @app.post("/inference/v1/abort_requests", response_model=None, **answers(AbortedRequests, 400, 401, 408, 413, 500, 503))
    async def abort_requests(body: AbortRequests) -> Response:
        given = set(body.request_ids)
        named = {name.removeprefix(prefix) for name in given for prefix in _PREFIXES}
        return Response(encode(AbortedRequests(await served.engine.end(given | named))), media_type="application/json")


def generate_routes(app: FastAPI, served: Served) -> None:
    """Adds the route."""

    @app.post("/inference/v1/generate", response_model=None, **answers(Generated, *ERRORS, also="text/event-stream"))
    async def generate(body: GenerateRequest, request: Request) -> Response:
        check_model(body.model, served.names)
        if body.stream_options is not None and not body.stream:
            raise RefusedError("stream_options may be given only with stream=true", param="stream_options")
        stream = await unless_gone(request, _open(served, body, request))
        answer = _Answer(served, body, stream, request_id_of(request, body))
        if body.stream:
            return served.stream(until_done(answer.chunks(), stream), stream.close)
        return Response(encode(await unless_gone(request, answer.whole())), media_type="application/json")


async def _open(served: Served, body: GenerateRequest, request: Request) -> RequestStream:
    """Queues the request. Raises what refuses it."""
    return await open_stream(served, request, body, 1, lambda: [_ask(served, body)], "structured_outputs")


def _ask(served: Served, body: GenerateRequest) -> Ask:
    engine = served.engine
    if body.output_mode == "text" and engine.tokenizer is None:
        raise ValueError("output_mode=text requires a tokenizer, and no tokenizer was loaded (--skip_tokenizer_init)")
    params = sampling_params(body, engine.default_sampling_params, engine.recommended_max_tokens)
    params = engine.ready(params.with_(structured_outputs=_behind_reasoning(served, body)))
    return Ask(body.token_ids, params, None, body.priority or 0, body.cache_salt)


def _behind_reasoning(served: Served, body: GenerateRequest) -> StructuredOutputsParams | None:
    """The form of the output, or none, behind the reasoning that may come first, whose tokens a budget may count. Raises
    ValueError where the model knows no reasoning."""
    form, budget = body.sampling_params.structured_outputs, body.sampling_params.thinking_token_budget
    has_budget = budget is not None and budget >= 0
    if body.reasoning_ended or not has_budget and (form is None or body.reasoning_ended is None):
        return form
    if not served.notation.reasoning:
        said = "thinking_token_budget" if has_budget else "reasoning_ended=false"
        raise ValueError(f"{said}: this model's chat template knows no reasoning")
    preamble = served.notation.preamble(served.engine.get_tokenizer().decode(body.token_ids, skip_special_tokens=False))
    if preamble is None:
        return form
    counted = {"preamble": preamble, "max_preamble_tokens": budget if has_budget else None}
    return StructuredOutputsParams(**counted) if form is None else replace(form, **counted)


def sampling_params(body: GenerateRequest, defaults: SamplingParams, max_tokens: int | None = None) -> SamplingParams:
    """The server's defaults, changed by what was given; max_tokens where that is not. Text is made where somebody reads it. Raises
    as SamplingParams does."""
    given = {
        name: value
        for name in type(body.sampling_params).model_fields
        if (value := getattr(body.sampling_params, name)) is not None
    }
    if "logit_bias" in given:
        given["logit_bias"] = {int(i): bias for i, bias in given["logit_bias"].items()}
    if "min_tokens" in given and "max_tokens" in given:
        given["min_tokens"] = min(given["min_tokens"], given["max_tokens"])
    for name in ("spaces_between_special_tokens", "thinking_token_budget"):
        given.pop(name, None)
    reads_text = body.output_mode == "text" or bool(given.get("stop"))
    if given.pop("detokenize", None) is False and reads_text:
        raise ValueError("sampling_params: detokenize=false, but output_mode=text and stop need the text")
    return defaults.with_(**{"max_tokens": max_tokens, "detokenize": reads_text} | given)


class _Answer:
    """The answer to one request: `whole`, or `chunks` for a stream."""

    def __init__(self, served: Served, body: GenerateRequest, stream: RequestStream, request_id: str):
        self._body, self._stream = body, stream
        self._record = CallRecord.of("generate-tokens", served, body, stream, request_id)
        (self._ask,) = stream.asks.values()
        self._text = body.output_mode == "text"
        self._bytes_of: Mapping[int, bytes] | None = None
        if self._text and served.engine.get_tokenizer().is_byte_level:
            self._bytes_of = served.engine.get_tokenizer().token_bytes()

    def _answer(self, choices: list[GenerateChoice], usage: Usage | None) -> Generated:
        record = self._record
        return Generated(
            request_id=record.id,
            model=record.model,
            created=record.created,
            output_mode="text" if self._text else "tokens",
            choices=choices,
            usage=usage,
        )

    def _choice(self, delta: Delta) -> GenerateChoice:
        """A delta as a choice. Raises FailedError for a sample that ends with an error."""
        self._record.add(delta)
        if delta.finish_reason == "error":
            raise FailedError(str(delta.stop_reason))
        choice = GenerateChoice(
            index=delta.index,
            token_ids=list(delta.token_ids),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            weight_versions=UNSET if delta.weight_versions is None else delta.weight_versions,
        )
        num_top = None if self._ask.params.logprob_token_ids else self._ask.params.logprobs or 0
        if self._text:
            choice.text = delta.text
            choice.logprobs = chat_logprobs(delta, num_top, self._bytes_of)
        elif delta.logprobs is not None:
            choice.logprobs = IdLogprobs([_sampled(i, x, num_top) for i, x in zip(delta.token_ids, delta.logprobs, strict=True)])
        return choice

    async def chunks(self) -> AsyncGenerator[Generated]:
        options = self._body.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        first = True
        async for delta in self._stream:
            choice = self._choice(delta)
            if not (choice.token_ids or choice.finish_reason or choice.text):
                continue
            chunk = self._answer([choice], self._record.usage() if continuous else None)
            if first and self._body.return_token_ids:
                chunk.prompt_token_ids = list(self._ask.prompt_token_ids)
            if delta.prompt_logprobs is not None:
                chunk.prompt_logprobs = plain_prompt_logprobs(delta.prompt_logprobs)
            first = False
            yield chunk
        if continuous or (options and options.include_usage):
            yield self._answer([], self._record.usage())

    async def whole(self) -> Generated:
        choices: dict[int, GenerateChoice] = {}
        prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
        async with self._stream:
            async for delta in self._stream:
                new = self._choice(delta)
                prompt_logprobs = prompt_logprobs or delta.prompt_logprobs
                choice = choices.setdefault(new.index, new)
                if choice is new:
                    continue
                choice.token_ids += new.token_ids
                choice.finish_reason, choice.stop_reason = new.finish_reason, new.stop_reason
                choice.weight_versions = new.weight_versions
                if self._text:
                    choice.text += new.text  # pyright: ignore[reportOperatorIssue]
                if choice.logprobs is not None and new.logprobs is not None:
                    choice.logprobs.content += new.logprobs.content
        answer = self._answer([choices[i] for i in sorted(choices)], self._record.usage())
        if self._ask.params.prompt_logprobs is not None:
            answer.prompt_logprobs = plain_prompt_logprobs(prompt_logprobs)
        if self._body.return_token_ids:
            answer.prompt_token_ids = list(self._ask.prompt_token_ids)
        return answer


def _sampled(token_id: int, entry: Mapping[int, Logprob], num_top: int | None) -> SampledLogprob:
    """num_top: as `chat_logprobs`'."""

    def of(i: int) -> IdLogprob:
        return IdLogprob(i, finite(entry[i].logprob), entry[i].rank)

    if num_top is None:
        top = [of(i) for i in entry]
    else:
        others = sorted((i for i in entry if i != token_id and (entry[i].rank or 0) <= num_top), key=lambda i: entry[i].rank or 0)
        top = [of(i) for i in (token_id, *others)]
    own = of(token_id)
    return SampledLogprob(token_id, own.logprob, own.rank, top)
