"""What completions and chats share: opening a stream, usage, and log-probabilities.

Owns the server's view of an engine (`Served`), the record of a call (usage, and the fields that all chunks have) and the form in
which clients read log-probabilities. Knows nothing of routes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import UNSET
from starlette.requests import Request

from jaxserve.moved import forward
from jaxserve.outputs import Logprob
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.errors import checking, describe
from jaxserve.serving.handover import asks_for_prefill, check_role, hand_over
from jaxserve.serving.messages import Delta
from jaxserve.serving.middleware import key_use
from jaxserve.serving.options import ServerOptions
from jaxserve.serving.parsers import Notation
from jaxserve.serving.protocol import GenerationRequest
from jaxserve.serving.responses import (
    DONE,
    ChatLogprobs,
    CompletionLogprobs,
    CompletionTokensDetails,
    PlainLogprob,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
    WeightVersions,
    event,
)
from jaxserve.serving.streaming import EventStream
from jaxserve.serving.streams import AnswerStream, Ask, RequestStream
from jaxserve.serving.tracing import traced
from jaxserve.structured_outputs import StructuredOutputsParams

logger: logging.Logger = logging.getLogger("jaxserve")

MAX_JOINED_BYTES = 4096  # of events that are sent as one


class Named(Protocol):
    """What a CallRecord reads of a request."""

    @property
    def model(self) -> str | None: ...


class Timed(Protocol):
    """What `open_stream` reads of a request."""

    @property
    def n(self) -> int | None: ...

    @property
    def timeout(self) -> float | None: ...

    @property
    def request_id(self) -> str | None: ...


@dataclass(frozen=True)
class Served:
    """A model that is served: its engine, the server's options, and the notations in which its chats are parsed."""

    engine: AsyncLLM
    options: ServerOptions
    notation: Notation
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> Sequence[str]:
        """The names of the model."""
        return self.options.names

    def stream(self, events: AsyncGenerator[bytes], on_end: Callable[[], None]) -> EventStream:
        """The response of these events, with the patience and the comments that the server was told."""
        return EventStream(events, on_end, self.options.patience, self.options.sse_keep_alive_interval)


def encode_prompt(
    served: Served, body: GenerationRequest, prompt: str | list[int], add_special_tokens: bool
) -> tuple[list[int], str | None]:
    """(token ids of a prompt, its text if one was given), cut to `truncate_prompt_tokens`. Raises ValueError for more than
    max_model_len of those, and for a text that is too long and not to be cut."""
    engine, keep = served.engine, body.truncate_prompt_tokens
    text = prompt if isinstance(prompt, str) else None
    if keep is None:
        return (prompt if isinstance(prompt, list) else engine.encode_prompt(prompt, add_special_tokens)), text
    longest, right = engine.config.scheduler.max_model_len, body.truncation_side == "right"
    if keep > longest:
        raise ValueError(f"truncate_prompt_tokens={keep} is more than max_model_len={longest}; give that at most, or -1")
    keep = longest - 1 if keep == -1 else keep
    if isinstance(prompt, list):
        return _kept(prompt, keep, right), None
    if engine.max_prompt_characters is not None:  # what is cut here is no part of the first or last max_model_len tokens
        prompt = _kept(prompt, engine.max_prompt_characters, right)
    ids = engine.encode_prompt(prompt, add_special_tokens)
    if len(ids) <= keep:
        return ids, text
    plain = engine.encode_prompt(prompt, add_special_tokens=False)
    head, tail = _around(plain, ids)
    num_plain = keep - len(head) - len(tail)
    ids = [*head, *_kept(plain, num_plain, right), *tail] if num_plain > 0 else _kept(ids, keep, right)
    return ids, engine.get_tokenizer().decode(ids, skip_special_tokens=False)


def _around(plain: list[int], ids: list[int]) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer put before and behind a text's own."""
    num_special = len(ids) - len(plain)
    begin = next((i for i in range(num_special + 1) if ids[i : i + len(plain)] == plain), 0)
    return ids[:begin], ids[begin + len(plain) :]


def _kept[T: (str, list[int])](prompt: T, length: int, right: bool) -> T:
    """As much of a prompt, cut on the right or else on the left."""
    return prompt[:length] if right else prompt[-length:]


def budgeted(
    notation: Notation, form: StructuredOutputsParams | None, body: GenerationRequest, prompt: str, continued: str = ""
) -> StructuredOutputsParams | None:
    """A form, or none, behind reasoning of `thinking_token_budget` tokens at most. prompt, continued: as `Notation.preamble`'s.

    Raises:
      ValueError: the model's chat template knows no reasoning.
    """
    if not body.has_budget:
        return form
    if not notation.reasoning:
        raise ValueError("thinking_token_budget: this model's chat template knows no reasoning whose tokens could be counted")
    preamble = notation.preamble(prompt, continued)
    if preamble is None:  # no reasoning may follow
        return form
    counted = {"preamble": preamble, "max_preamble_tokens": body.thinking_token_budget}
    return StructuredOutputsParams(**counted) if form is None else replace(form, **counted)


@dataclass
class CallRecord:
    """The tokens that a call has used so far, and the fields that its chunks have in common."""

    id: str
    model: str
    prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)  # by prompt
    paged_tokens: dict[str, int] = field(default_factory=dict)  # by prompt: those of whole pages, where prefixes are cached
    reasoning_tokens: int | None = None  # None: the model does not reason, or its marks are no tokens
    with_details: bool = False  # whether the usage says how many tokens of the prompts were cached
    with_versions: bool = False  # whether the weights may change

    @classmethod
    def of(cls, prefix: str, served: Served, body: Named, stream: AnswerStream, request_id: str) -> CallRecord:
        num_prompt_tokens = sum(len(ask.prompt_token_ids) for ask in stream.asks.values())
        details, control = served.options.enable_prompt_tokens_details, served.options.enable_control
        id_, model = f"{prefix}-{request_id}", body.model or served.names[0]
        record = cls(id_, model, num_prompt_tokens, with_details=details, with_versions=control)
        if (cache := served.engine.config.cache).enable_prefix_caching:
            lengths = {name: len(ask.prompt_token_ids) for name, ask in stream.asks.items()}
            record.paged_tokens = {name: length - length % cache.page_size for name, length in lengths.items()}
        return record

    def add(self, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        self.cached_tokens[delta.request_id] = delta.num_cached_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts whose KV was cached."""
        return sum(self.cached_tokens.values())

    @property
    def num_written_tokens(self) -> int:
        """Tokens of the prompts that were computed, in whole pages, and are cached now."""
        return sum(max(0, self.paged_tokens.get(name, 0) - cached) for name, cached in self.cached_tokens.items())

    def weight_versions(self, delta: Delta) -> WeightVersions:
        """Which weights sampled which tokens of a sample that ends with this delta, where they may change."""
        return UNSET if delta.weight_versions is None or not self.with_versions else delta.weight_versions

    def usage(self) -> Usage:
        total = self.prompt_tokens + self.completion_tokens
        usage = Usage(self.prompt_tokens, self.completion_tokens, total)
        if self.with_details:
            usage.prompt_tokens_details = PromptTokensDetails(self.num_cached_tokens, self.num_written_tokens)
        if self.reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(self.reasoning_tokens)
        return usage

    @property
    def common(self) -> dict[str, Any]:
        """The fields of every answer and chunk."""
        return {"id": self.id, "created": self.created, "model": self.model}


async def open_stream(
    served: Served,
    request: Request,
    body: Timed,
    num_prompts: int,
    read: Callable[[], list[Ask]],
    form_field: str,
) -> RequestStream:
    """Opens the stream of a request. Whether there is room is checked before its prompts are read.

    Args:
      num_prompts: of the request.
      read: reads the prompts; a thread runs it where the body is long.
      form_field: the parameter that has the output's form.

    Raises:
      RefusedError, RequestError: the request is refused.
    """
    arrival = time.monotonic()
    with checking(form_field):
        asks = hand_over(await read_asks(served, request, body, num_prompts, read, arrival), request.headers)
        asks = traced(asks, request.headers)
        use = key_use(request)
        spend = None if use is None else use.spend
        return await served.engine.open(asks, request_id_of(request, body), timeout=body.timeout, arrival=arrival, spend=spend)


async def read_asks(
    served: Served, request: Request, body: Timed, num_prompts: int, read: Callable[[], list[Ask]], arrival: float
) -> list[Ask]:
    """The prompts of a request, read within its deadline. Raises as `open_stream`, and ValueError for a wrong one."""
    engine = served.engine
    check_role(served.options.role, request.headers)
    n = 1 if asks_for_prefill(request.headers) else body.n or engine.default_sampling_params.n
    size, num_samples = len(await request.body()), num_prompts * n
    asks = await engine.read(size, read, num_samples, timeout=body.timeout, arrival=arrival)
    if served.options.enable_log_requests:
        for ask in asks:
            log_request(request_id_of(request, body), ask, served.options.max_log_len)
    return asks


def log_request(request_id: str, ask: Ask, max_log_len: int | None) -> None:
    """A line of the log about a prompt. max_log_len: most of its characters, and of its token ids; None: all of them."""
    prompt = ask.prompt if ask.prompt is None else ask.prompt[:max_log_len]
    ids = ask.prompt_token_ids[:max_log_len]
    logger.info("request %s: %d tokens, prompt %r, ids %s, %s", request_id, len(ask.prompt_token_ids), prompt, ids, ask.params)


def request_id_of(request: Request, body: Timed) -> str:
    """The request's name: the client's X-Request-Id, else the body's `request_id`, else a random one."""
    return request.state.request_id if request.state.named_by_client else body.request_id or request.state.request_id


async def spaced(deltas: AsyncIterator[Delta], interval: int) -> AsyncGenerator[Delta]:
    """The deltas, those of a sample joined until they have `interval` tokens. A sample's first and last come at once."""
    begun: set[tuple[str, int]] = set()
    held: dict[tuple[str, int], Delta] = {}
    async for delta in deltas:
        sample = (delta.request_id, delta.index)
        if sample in held:
            delta = _joined(held.pop(sample), delta)
        if sample in begun and delta.finish_reason is None and len(delta.token_ids) < interval:
            held[sample] = delta
            continue
        begun.add(sample)
        yield delta


def _joined(first: Delta, then: Delta) -> Delta:
    logprobs = None if then.logprobs is None else [*(first.logprobs or ()), *then.logprobs]
    return replace(then, text=first.text + then.text, token_ids=first.token_ids + then.token_ids, logprobs=logprobs)


async def until_done(chunks: AsyncIterator[Any], stream: AnswerStream) -> AsyncGenerator[bytes]:
    """Chunks as events, then OpenAI's end mark. An error becomes an event too, since the status has been sent by then. Those that
    nothing is waited for between are sent as one: a stream's last chunk, its usage and the end mark."""
    held = b""
    async with stream:
        try:
            async for chunk in chunks:
                held += event(chunk)
                if not stream.finished or len(held) > MAX_JOINED_BYTES:
                    yield held
                    held = b""
        except Exception as error:
            held += event(describe(error)[1])
        yield held + DONE


def plain_prompt_logprobs(found: Sequence[Mapping[int, Logprob] | None] | None) -> list[dict[str, PlainLogprob] | None] | None:
    if found is None:
        return None
    return [
        None if entry is None else {str(i): PlainLogprob(x.logprob, x.rank, x.decoded_token) for i, x in entry.items()}
        for entry in found
    ]


def completion_logprobs(
    token_ids: Sequence[int],
    found: Sequence[Mapping[int, Logprob] | None],
    num_top: int,
    offset: int,
    first: str = "",
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """(log-probabilities of tokens whose text begins at character `offset`, the character at which it ends).

    An entry of `found` is None for the first token of a prompt, which has no log-probability. Its text is `first`. as_ids: tokens
    are written as "token_id:N"; offsets are those of the text.
    """
    made = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, found, strict=True):
        text = first if entry is None else entry[token_id].decoded_token or ""
        made.tokens.append(_token_id(token_id) if as_ids else text)
        made.text_offset.append(offset)
        made.token_logprobs.append(None if entry is None else finite(entry[token_id].logprob))
        made.top_logprobs.append(None if entry is None else _by_text(token_id, entry, num_top, as_ids))
        offset += len(text)
    return made, offset


def _token_id(token_id: int) -> str:
    """A token in place of its text, as vLLM writes it."""
    return f"token_id:{token_id}"


def _by_text(token_id: int, entry: Mapping[int, Logprob], num_top: int, as_ids: bool) -> dict[str, float]:
    """Log-probabilities by text, of the token itself and, after it as in vLLM's answers, of the likeliest tokens, or those that
    were asked for by id. Of two with one text the likelier counts."""
    found: dict[str, float] = {}
    for i, x in sorted(entry.items(), key=lambda item: (item[0] != token_id, item[1].rank or 0)):
        if i == token_id or (x.rank or 0) <= num_top:
            text = _token_id(i) if as_ids else x.decoded_token or ""
            found[text] = max(finite(x.logprob), found.get(text, -math.inf))
    return found


def chat_logprobs(
    delta: Delta, num_top: int | None, bytes_of: Mapping[int, bytes] | None, as_ids: bool = False
) -> ChatLogprobs | None:
    """A delta's log-probabilities in a chat's form. num_top: of so many likeliest tokens; None: of the token, then of those that
    were asked for by id. bytes_of: token id -> its bytes; None where tokens are not byte-level. as_ids: tokens are written as
    "token_id:N"; their bytes stay."""
    if delta.logprobs is None:
        return None
    entries = zip(delta.token_ids, delta.logprobs, strict=True)
    return ChatLogprobs([_token_logprob(i, entry, num_top, bytes_of, as_ids) for i, entry in entries])


def _token_logprob(
    token_id: int, entry: Mapping[int, Logprob], num_top: int | None, bytes_of: Mapping[int, bytes] | None, as_ids: bool
) -> TokenLogprob:
    def said(i: int, x: Logprob) -> TopLogprob:
        token = _token_id(i) if as_ids else x.decoded_token or ""
        return TopLogprob(token, finite(x.logprob), None if bytes_of is None else list(bytes_of[i]))

    of_it = said(token_id, entry[token_id])
    if num_top is None:
        top = [said(i, x) for i, x in entry.items()]
    else:
        ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        top = [said(i, x) for i, x in ranked if (x.rank or 0) <= num_top]
    return TokenLogprob(of_it.token, of_it.logprob, of_it.bytes, top)


def finite(logprob: float) -> float:
    """The value, or -9999 where it is lower, as OpenAI has it: JSON has no infinity."""
    return max(logprob, -9999.0)


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
