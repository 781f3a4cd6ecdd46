"""`/v1/completions`: continuations of texts or token ids, in OpenAI's answers and chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.beams import open_deltas
from jaxserve.serving.generation import (
    CallRecord,
    Served,
    budgeted,
    completion_logprobs,
    encode_prompt,
    plain_prompt_logprobs,
    request_id_of,
    spaced,
    until_done,
)
from jaxserve.serving.handover import answer_prefill, asks_for_prefill
from jaxserve.serving.messages import Delta
from jaxserve.serving.protocol import CompletionRequest, check_model
from jaxserve.serving.responses import Completion, CompletionChoice, encode
from jaxserve.serving.streaming import unless_gone
from jaxserve.serving.streams import AnswerStream, Ask

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def create_completion(served: Served, body: CompletionRequest, request: Request) -> Response:
    """The answer to a request, once it is complete, or a stream of chunks."""
    check_model(body.model, served.names)
    if asks_for_prefill(request.headers):
        return await unless_gone(request, answer_prefill(_open(served, body, request)))
    if body.stream:
        stream = await unless_gone(request, _open(served, body, request))  # a form may take a while to compile
        answer = _CompletionAnswer(served, body, stream, request_id_of(request, body))
        return served.stream(until_done(answer.chunks(), stream), stream.close)
    return Response(encode(await unless_gone(request, _complete(served, body, request))), media_type="application/json")


async def _open(served: Served, body: CompletionRequest, request: Request) -> AnswerStream:
    """Queues the request and returns its stream. Raises what refuses it."""
    asks = partial(asks_of_completion, served, body, served.engine.ready)
    return await open_deltas(served, request, body, len(body.prompts), asks, body.form_field)


async def _complete(served: Served, body: CompletionRequest, request: Request) -> Completion:
    async with await _open(served, body, request) as stream:
        return await _CompletionAnswer(served, body, stream, request_id_of(request, body)).whole()


def asks_of_completion(served: Served, body: CompletionRequest, ready: Callable[[SamplingParams], SamplingParams]) -> list[Ask]:
    """What the prompts of a request ask of the engine. ready: `AsyncLLM.ready`, or what leaves the parameters as they are. Raises
    ValueError for what can't be served."""
    engine = served.engine
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)  # 0: the one is left out of the answer
    params = body.sampling_params(engine.default_sampling_params, max_tokens=max_tokens, logprobs=body.logprobs, form=body.form)
    if body.echo and body.logprobs is not None:
        params = params.with_(prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    params = ready(params)
    asks = []
    for prompt in body.prompts:
        ids, text = encode_prompt(served, body, prompt, body.add_special_tokens is not False)
        if text is None and (body.has_budget or body.echo and engine.tokenizer is not None):
            text = engine.get_tokenizer().decode(ids, skip_special_tokens=False)
        its = params
        if body.has_budget:
            its = params.with_(structured_outputs=budgeted(served.notation, body.form, body, text or ""))
        asks.append(Ask(ids, its, text, body.priority or 0, body.cache_salt))
    return asks


class _CompletionAnswer:
    """The answer to one request: `whole`, or `chunks` for a stream."""

    def __init__(self, served: Served, body: CompletionRequest, stream: AnswerStream, request_id: str):
        self._body, self._stream = body, stream
        self._tokenizer = served.engine.tokenizer
        self._record = CallRecord.of("cmpl", served, body, stream, request_id)
        self._usage, self._continuous_usage = body.usage_of_stream(served.options.enable_force_include_usage)
        self._as_ids = body.tokens_as_ids(served.options.return_tokens_as_token_ids)
        self._prompt_index = {name: i for i, name in enumerate(stream.request_ids)}
        self._offsets = [0] * stream.num_samples  # where the text of each choice ends, in characters
        self._begun = [False] * stream.num_samples

    def _choice(self, delta: Delta) -> CompletionChoice:
        """A delta as a choice. The first one of a choice begins with the prompt, if `echo` asks for that."""
        ask = self._stream.asks[delta.request_id]
        index = self._prompt_index[delta.request_id] * ask.params.n + delta.index
        choice = CompletionChoice(index, delta.text, None, delta.finish_reason, delta.stop_reason)  # pyright: ignore[reportArgumentType]
        token_ids, found = list(delta.token_ids), None if delta.logprobs is None else list(delta.logprobs)
        if not self._begun[index]:
            self._begun[index] = True
            if self._body.prompt_logprobs is not None:
                choice.prompt_logprobs = plain_prompt_logprobs(delta.prompt_logprobs)
            if self._body.return_token_ids:
                choice.prompt_token_ids = list(ask.prompt_token_ids)
            if self._body.echo:
                choice.text = (ask.prompt or "") + choice.text
                if found is not None:
                    found = [*delta.prompt_logprobs, *found]
                    token_ids = ask.prompt_token_ids + token_ids
        if self._body.return_token_ids:
            choice.token_ids = list(delta.token_ids)
        choice.weight_versions = self._record.weight_versions(delta)
        if found is not None:
            num_top = self._body.logprobs or 0
            first = ""
            if found[:1] == [None] and self._tokenizer is not None:
                first = self._tokenizer.decode(token_ids[:1], skip_special_tokens=False)
            made = completion_logprobs(token_ids, found, num_top, self._offsets[index], first, self._as_ids)
            choice.logprobs, self._offsets[index] = made
        return choice

    async def _deltas(self) -> AsyncGenerator[Delta]:
        """What the answer is made of: with max_tokens=0 the token that the engine samples all the same is left out."""
        async for delta in self._stream:
            if self._body.max_tokens == 0:
                logprobs = None if delta.logprobs is None else []
                delta = replace(delta, text="", token_ids=[], logprobs=logprobs, weight_versions=None)
            yield delta

    async def chunks(self) -> AsyncGenerator[Completion]:
        record = self._record
        async for delta in spaced(self._deltas(), self._body.stream_interval or 1):
            record.add(delta)
            choice = self._choice(delta)
            if not (choice.text or choice.finish_reason or choice.logprobs or choice.token_ids or self._continuous_usage):
                continue  # a character that is not complete yet
            chunk = Completion(**record.common, choices=[choice])
            if self._usage:
                chunk.usage = record.usage() if self._continuous_usage else None
            yield chunk
        if self._usage:
            yield Completion(**record.common, choices=[], usage=record.usage())

    async def whole(self) -> Completion:
        choices: dict[int, CompletionChoice] = {}
        async for delta in self._deltas():
            self._record.add(delta)
            new = self._choice(delta)
            choice = choices.setdefault(new.index, new)
            if choice is not new:
                choice.text += new.text
                choice.finish_reason, choice.stop_reason = new.finish_reason, new.stop_reason
                choice.weight_versions = new.weight_versions
                if new.token_ids:
                    choice.token_ids += new.token_ids  # pyright: ignore[reportOperatorIssue]
                if choice.logprobs is not None and new.logprobs is not None:
                    for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
                        getattr(choice.logprobs, name).extend(getattr(new.logprobs, name))
        return Completion(**self._record.common, choices=[choices[i] for i in sorted(choices)], usage=self._record.usage())
