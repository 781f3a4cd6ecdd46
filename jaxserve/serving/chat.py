"""`/v1/chat/completions`: answers to conversations, whole or streamed, with reasoning and tool calls in fields of their own."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.serving.beams import open_deltas
from jaxserve.serving.chat_protocol import Chat, ChatRequest, NamedTool
from jaxserve.serving.generation import (
    CallRecord,
    Served,
    budgeted,
    chat_logprobs,
    encode_prompt,
    plain_prompt_logprobs,
    request_id_of,
    spaced,
    until_done,
)
from jaxserve.serving.handover import answer_prefill, asks_for_prefill
from jaxserve.serving.messages import Delta
from jaxserve.serving.parsers import CallPart, Content, Notation, OutputParser, Piece, Reasoning
from jaxserve.serving.protocol import check_model
from jaxserve.serving.responses import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    CalledToolDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    MessageDelta,
    encode,
)
from jaxserve.serving.streaming import unless_gone
from jaxserve.serving.streams import AnswerStream, Ask
from jaxserve.serving.tool_forms import tool_form
from jaxserve.text.tokenizer import Tokenizer


def render(served: Served, body: Chat, *, with_tools: bool = True, effort: str | None = None) -> str:
    """The prompt of a chat, as text. effort: OpenAI's reasoning_effort.

    Raises:
      ValueError: what the model's template can't do; a template of the request's own, which the server does not trust.
    """
    if body.chat_template is not None and not served.options.trust_request_chat_template:
        raise ValueError("chat_template: this server renders no template of a request's own (--trust_request_chat_template)")
    tokenizer = served.engine.get_tokenizer()
    variables = body.template_variables(with_tools=with_tools, defaults=served.options.default_chat_template_kwargs)
    if effort is not None:
        asked = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        read = tokenizer.template_variables(body.chat_template) & asked.keys()
        if not read:
            raise ValueError("reasoning_effort: this model's chat template reads neither that nor enable_thinking")
        variables = {name: asked[name] for name in read} | variables
    messages = [message.plain() for message in body.messages]
    return tokenizer.apply_chat_template(messages, chat_template=body.chat_template, **variables)


async def create_chat_completion(served: Served, body: ChatRequest, request: Request) -> Response:
    """The answer to a request, once it is complete, or a stream of chunks."""
    check_model(body.model, served.names)
    if asks_for_prefill(request.headers):
        return await unless_gone(request, answer_prefill(_open(served, body, request)))
    if body.stream:
        stream = await unless_gone(request, _open(served, body, request))  # a form may take a while to compile
        answer = ChatAnswer(served, body, stream, request_id_of(request, body))
        return served.stream(until_done(answer.chunks(), stream), stream.close)
    return Response(encode(await unless_gone(request, complete_chat(served, body, request))), media_type="application/json")


async def _open(served: Served, body: ChatRequest, request: Request) -> AnswerStream:
    """Queues the request and returns its stream. Raises what refuses it."""
    form_field = "tools" if body.form is None and not body.has_budget else body.form_field
    return await open_deltas(served, request, body, 1, lambda: [_ready(served, ask_of_chat(served, body))], form_field)


async def open_chat(served: Served, body: ChatRequest, request: Request) -> ChatAnswer:
    """Queues a chat that is answered in another form than chat completions have. Raises what refuses it."""
    return ChatAnswer(served, body, await _open(served, body, request), request_id_of(request, body))


async def complete_chat(served: Served, body: ChatRequest, request: Request) -> ChatCompletion:
    """The whole answer. Raises what refuses the request, and RequestError if it fails."""
    async with await _open(served, body, request) as stream:
        return await ChatAnswer(served, body, stream, request_id_of(request, body)).whole()


def _ready(served: Served, ask: Ask) -> Ask:
    return replace(ask, params=served.engine.ready(ask.params))


def ask_of_chat(served: Served, body: ChatRequest) -> Ask:
    """What a chat asks of the engine, which `AsyncLLM.ready` has not yet seen. Raises ValueError for what can't be served."""
    engine = served.engine
    notation, shows_tokens = served.notation, body.logprobs or body.return_token_ids
    if body.include_reasoning is False and shows_tokens and notation.reasoning:
        raise ValueError("include_reasoning=false: logprobs and return_token_ids would show the tokens of the reasoning")
    text = render(served, body, with_tools=bool(body.shown_tools), effort=body.reasoning_effort)
    form = tool_form(body, notation) or body.form
    ids, kept = encode_prompt(served, body, text, bool(body.add_special_tokens))  # by default only those the template has written
    if form is not None:
        form = replace(form, preamble=notation.preamble(kept or "", body.continued))
    params = body.sampling_params(
        engine.default_sampling_params,
        max_tokens=body.max_completion_tokens or body.max_tokens or engine.recommended_max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        form=budgeted(notation, form, body, kept or "", body.continued),
    )
    marks = notation.for_tools(shown=bool(body.shown_tools), held=body.must_call).marks
    if body.skip_special_tokens is None and any(map(engine.get_tokenizer().is_special, marks)):
        params = params.with_(skip_special_tokens=False)
    return Ask(ids, params, kept, body.priority or 0, body.cache_salt)


@dataclass
class _ChatSample:
    """One choice, as far as it has come."""

    parser: OutputParser
    role: str
    begun: bool = False
    call_ids: list[str] = field(default_factory=list)

    def read(self, delta: Delta) -> list[Piece]:
        pieces = self.parser.feed(delta.text)
        return pieces + self.parser.finish() if delta.finish_reason else pieces

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.parser.num_calls else reason

    def message_delta(self, pieces: list[Piece]) -> MessageDelta:
        made = MessageDelta()
        if not self.begun:
            self.begun, made.role, made.content = True, self.role, ""
        content = "".join(p.text for p in pieces if isinstance(p, Content))
        reasoning = "".join(p.text for p in pieces if isinstance(p, Reasoning))
        calls = [self._call_delta(p) for p in pieces if isinstance(p, CallPart)]
        if content:
            made.content = content
        if reasoning:
            made.reasoning = made.reasoning_content = reasoning
        if calls:
            made.tool_calls = calls
        return made

    def _call_delta(self, part: CallPart) -> CalledToolDelta:
        if part.name is None:
            return CalledToolDelta(part.index, CalledFunction(arguments=part.arguments))
        self.call_ids.append(f"call_{uuid.uuid4().hex[:24]}")
        return CalledToolDelta(part.index, CalledFunction(part.name, part.arguments), self.call_ids[-1], "function")


@dataclass
class _Thought:
    """Counts the tokens of a sample's reasoning, which end with the token `end`, and begin with `begin` where there is one. What
    comes behind is content."""

    begin: int | None
    end: int
    thinking: bool
    ended: bool = False
    num_tokens: int = 0

    def feed(self, token_ids: Iterable[int]) -> None:
        for i in token_ids:
            if i == self.end:
                self.thinking, self.ended = False, True
            elif i == self.begin and not self.ended:
                self.thinking = True
            else:
                self.num_tokens += self.thinking


def _thoughts(notation: Notation, tokenizer: Tokenizer, ask: Ask, continued: str) -> list[_Thought]:
    """One of each sample; none where the model does not reason, or where tokens do not say when."""
    if notation.reasoning is None:
        return []
    begin, end = (tokenizer.backend.token_to_id(marks[0]) for marks in (notation.reasoning.begin, notation.reasoning.end))
    thinking = notation.is_thinking(ask.prompt or "", continued)
    if end is None or not (thinking or begin is not None):
        return []
    return [_Thought(begin, end, thinking) for _ in range(ask.params.n)]


class ChatAnswer:
    """The answer to one request: `whole`, or `chunks` for a stream; `parts` for other forms of an answer."""

    def __init__(self, served: Served, body: ChatRequest, stream: AnswerStream, request_id: str):
        self._body = body
        self.stream: AnswerStream = stream
        self._usage, self._continuous_usage = body.usage_of_stream(served.options.enable_force_include_usage)
        self._as_ids = body.tokens_as_ids(served.options.return_tokens_as_token_ids)
        self._role = body.role or served.options.response_role
        self._echo = body.last_text if body.echo and body.role else ""
        tokenizer = served.engine.get_tokenizer()
        self._bytes_of: Mapping[int, bytes] | None = tokenizer.token_bytes() if tokenizer.is_byte_level else None
        self.record: CallRecord = CallRecord.of("chatcmpl", served, body, stream, request_id)
        (ask,) = stream.asks.values()
        notation = served.notation.for_tools(shown=bool(body.shown_tools), held=body.must_call)
        max_calls = 1 if body.parallel_tool_calls is False else None
        prompt = ask.prompt or ""
        self._samples = [
            _ChatSample(OutputParser(notation, prompt, max_calls, body.continued, body.parameters), self._role)
            for _ in range(ask.params.n)
        ]
        self._thoughts = _thoughts(notation, tokenizer, ask, body.continued)
        if self._thoughts:
            self.record.reasoning_tokens = 0
        self._prompt_token_ids = list(ask.prompt_token_ids) if body.return_token_ids else None
        self._prompt_text = ask.prompt if body.return_prompt_text else None

    def _read(self, delta: Delta) -> list[Piece]:
        self.record.add(delta)
        if self._thoughts:
            self._thoughts[delta.index].feed(delta.token_ids)
            self.record.reasoning_tokens = sum(thought.num_tokens for thought in self._thoughts)
        pieces = self._samples[delta.index].read(delta)
        return pieces if self._body.include_reasoning is not False else [p for p in pieces if not isinstance(p, Reasoning)]

    def logprobs(self, delta: Delta) -> ChatLogprobs | None:
        """The log-probabilities of a delta's tokens, if the request asks for any."""
        num_top = None if self._body.logprob_token_ids else self._body.top_logprobs or 0
        return chat_logprobs(delta, num_top, self._bytes_of, self._as_ids)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        usage = self.record.usage() if self._continuous_usage else None if self._usage else UNSET  # null, or left out
        return ChatChunk(**self.record.common, choices=[choice], usage=usage)

    def _first_chunks(self) -> Iterator[ChatChunk]:
        """The role of each sample, which comes at once, and what the answer goes on with where that is asked for."""
        for i, sample in enumerate(self._samples):
            chunk = self._chunk(ChatChunkChoice(i, sample.message_delta([])))
            if not i and self._prompt_token_ids is not None:
                chunk.prompt_token_ids = self._prompt_token_ids
            if not i and self._prompt_text is not None:
                chunk.prompt_text = self._prompt_text
            yield chunk
        for i in range(len(self._samples) if self._echo else 0):
            yield self._chunk(ChatChunkChoice(i, MessageDelta(content=self._echo)))

    async def parts(self) -> AsyncGenerator[tuple[list[Piece], Delta]]:
        """The pieces that each delta completes, and the delta, its finish_reason being a chat's."""
        async for delta in self.stream:
            pieces = self._read(delta)
            delta.finish_reason = self._samples[delta.index].finish_reason(delta.finish_reason)
            yield pieces, delta

    async def chunks(self) -> AsyncGenerator[ChatChunk]:
        body = self._body
        for first in self._first_chunks():
            yield first
        async for delta in spaced(aiter(self.stream), body.stream_interval or 1):
            sample = self._samples[delta.index]
            made = sample.message_delta(self._read(delta))
            choice = ChatChunkChoice(delta.index, made, self.logprobs(delta))
            if delta.finish_reason:
                choice.finish_reason = sample.finish_reason(delta.finish_reason)  # pyright: ignore[reportAttributeAccessIssue]
                choice.stop_reason = delta.stop_reason
                choice.weight_versions = self.record.weight_versions(delta)
            if body.return_token_ids:
                choice.token_ids = list(delta.token_ids)
            needed = delta.finish_reason or choice.logprobs or choice.token_ids or self._continuous_usage
            if made == MessageDelta() and not needed:
                continue  # a character or a mark that is not complete yet
            chunk = self._chunk(choice)
            if delta.prompt_logprobs is not None:
                chunk.prompt_logprobs = plain_prompt_logprobs(delta.prompt_logprobs)
            yield chunk
        if self._usage:
            yield ChatChunk(**self.record.common, choices=[], usage=self.record.usage())

    async def whole(self) -> ChatCompletion:
        pieces: list[list[Piece]] = [[] for _ in self._samples]
        logprobs: list[ChatLogprobs | None] = [ChatLogprobs([]) if self._body.logprobs else None for _ in self._samples]
        ends: dict[int, Delta] = {}
        token_ids: list[list[int]] = [[] for _ in self._samples]
        prompt_logprobs = None
        async for delta in self.stream:
            pieces[delta.index] += self._read(delta)
            token_ids[delta.index] += delta.token_ids
            new, so_far = self.logprobs(delta), logprobs[delta.index]
            if new is not None and so_far is not None:
                so_far.content += new.content
            if delta.finish_reason:
                ends[delta.index] = delta
            prompt_logprobs = prompt_logprobs or delta.prompt_logprobs
        choices = [
            ChatChoice(i, self._message(pieces[i]), logprobs[i], sample.finish_reason(ends[i].finish_reason), ends[i].stop_reason)  # pyright: ignore[reportArgumentType]
            for i, sample in enumerate(self._samples)
        ]
        for choice in choices:
            choice.weight_versions = self.record.weight_versions(ends[choice.index])
        answer = ChatCompletion(**self.record.common, choices=choices, usage=self.record.usage())
        answer.prompt_token_ids, answer.prompt_text = self._prompt_token_ids, self._prompt_text
        if self._body.return_token_ids:
            for choice in choices:
                choice.token_ids = token_ids[choice.index]
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = plain_prompt_logprobs(prompt_logprobs)
        return answer

    def _message(self, pieces: list[Piece]) -> AssistantMessage:
        message = _message(pieces)
        message.role = self._role
        if isinstance(self._body.tool_choice, NamedTool):
            message.content = message.content or ""  # as vLLM has it; other calls stand beside null
        if self._echo:
            message.content = self._echo + (message.content or "")
        return message


def _message(pieces: list[Piece]) -> AssistantMessage:
    content = "".join(p.text for p in pieces if isinstance(p, Content))
    reasoning = "".join(p.text for p in pieces if isinstance(p, Reasoning))
    calls: dict[int, CalledTool] = {}
    for part in (p for p in pieces if isinstance(p, CallPart)):
        if part.name is not None:
            calls[part.index] = CalledTool(f"call_{uuid.uuid4().hex[:24]}", CalledFunction(part.name, ""))
        calls[part.index].function.arguments += part.arguments  # pyright: ignore[reportOperatorIssue]
    message = AssistantMessage(content if content or not calls else None)
    if reasoning:
        message.reasoning = message.reasoning_content = reasoning
    if calls:
        message.tool_calls = list(calls.values())
    return message
