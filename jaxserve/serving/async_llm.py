"""`AsyncLLM`: requests from an event loop, each with a stream of its own, on an engine that runs beside it.

Owns admission (how much may wait), deadlines, cancellation and shutting down. Knows nothing of HTTP, nor of steps: it talks to the
engine's loop in messages (messages.py).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.llm import LLM, PROMPT_FIELDS, with_bad_words_tokenized
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.engine_loop import EngineLoop
from jaxserve.serving.messages import (
    Abort,
    Aborted,
    Accepted,
    Add,
    Call,
    DeadlineError,
    Delta,
    Failed,
    LoopStats,
    QueueFullError,
    Reply,
    Report,
    Stop,
    UnavailableError,
)
from jaxserve.structured.grammars import GrammarError
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer

MAX_COMPILING = 256  # forms that may wait for the compiler; it takes most in milliseconds, and some in seconds
MAX_FORM = 256 * 2**10  # bytes of the form of an output, as JSON: what compiles it does not stop
SHORT = 4096  # characters, or bytes of a body, that are read on the spot; more of them on a thread, so that no stream waits for it


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt ready for the engine, and how to go on from it."""

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None


class RequestStream:
    """What comes of the prompts of one call: an asynchronous iterator of Deltas, in the order in which they come.

    `request_ids` are in the order of the prompts. Use it in an `async with`: leaving before the end aborts what still runs, and its
    pages are free before the next step is scheduled.
    """

    def __init__(self, owner: AsyncLLM, asks: Mapping[str, Ask], arrival: float, timeout: float | None):
        self._owner = owner
        self.asks = asks  # by request id
        self.request_ids: list[str] = list(asks)
        self.num_samples: int = sum(ask.params.n for ask in asks.values())
        self.arrival: float = arrival  # in seconds of time.monotonic()
        self.timeout: float | None = timeout  # seconds from there
        self._unfinished = set(asks)
        self._unaccepted = set(asks)
        self._deltas: deque[Delta] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def finished(self) -> bool:
        return not self._unfinished

    async def accepted(self) -> None:
        """Waits until the engine has queued all of the prompts. Raises what it refuses one with; none of them run then."""
        while self._unaccepted and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Delta:
        """The next Delta. Raises RequestError if the requests end otherwise."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            await self._wait()
        return self._deltas.popleft()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self, refused: bool = False) -> None:
        """Aborts what still runs; nothing if all has ended. refused: as Abort's."""
        self._owner._close(self, refused)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def take(self, event: Accepted | Delta | Failed) -> None:
        """An event of one of its requests."""
        if isinstance(event, Delta):
            self._deltas.append(event)
            if event.last:
                self._unfinished.discard(event.request_id)
        elif isinstance(event, Accepted):
            self._unaccepted.discard(event.request_id)
        else:
            self._unfinished.discard(event.request_id)
            self._error = self._error or event.error
        self.wake()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncLLM:
    """An `LLM` for asyncio: `generate` streams, requests of many tasks share the engine's steps.

    Args:
      llm: the model, loaded; from here on nothing else may use it. Its vocabulary is read here for forms, if it was not yet.
      max_waiting: samples that may wait beyond the engine's max_num_seqs; what comes on top is refused with QueueFullError.
      request_timeout: seconds that a request may take in all, waiting included; None: as long as it likes.
      max_failures: as `EngineLoop`'s.
      listener: called with every Report, on the event loop; for metrics.

    All methods are to be called on one event loop, the one that is running at the first call. Use it in an `async with`, or call
    `shutdown`.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int = 1024,
        request_timeout: float | None = None,
        max_failures: int = 3,
        listener: Callable[[Report], None] | None = None,
    ):
        if request_timeout is not None and not request_timeout > 0:
            raise ValueError(f"{request_timeout=} must be a number of seconds > 0, or None")
        if max_waiting < 0 or max_failures < 1:
            raise ValueError(f"{max_waiting=} must be at least 0 and {max_failures=} at least 1")
        self.tokenizer: Tokenizer | None = llm.tokenizer
        self.default_sampling_params: SamplingParams = llm.get_default_sampling_params()
        self.config: ResolvedConfig = llm.engine.config
        self.eos_token_ids: frozenset[int] = llm.engine.eos_token_ids
        self.request_timeout = request_timeout
        self.listener = listener
        self._limit = self.config.scheduler.max_num_seqs + max_waiting
        llm.grammars.prepare()  # so that no step will wait for it
        grammars = llm.grammars.beside(max_waiting=MAX_COMPILING)
        self._engine = EngineLoop(llm.engine, llm.tokenizer, grammars, self._from_engine, max_failures=max_failures)
        self.stats: LoopStats = self._engine.stats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, RequestStream] = {}  # by request id, until its last event
        self._num_samples = 0  # of all streams that are open, and of what is being read
        self._seconds_taken = 1.0  # by a request, lately
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids, self._serials = itertools.count(), itertools.count()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closing: str | None = None
        self._reading = ThreadPoolExecutor(2, "jaxserve-reader")  # of requests
        self._aside = ThreadPoolExecutor(1, "jaxserve-aside")  # whatever else is long: no request waits for it
        self._max_characters: int | None = None  # of a prompt
        if llm.tokenizer is not None and (longest := llm.tokenizer.max_token_bytes) is not None:
            self._max_characters = self.config.scheduler.max_model_len * longest

    def start(self) -> None:
        """Starts the engine's thread, if it has not been started; any other method does too."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._engine.start()

    async def __aenter__(self) -> AsyncLLM:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown(0)

    # -- requests

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("no tokenizer was loaded (skip_tokenizer_init=True): give prompts as token ids")
        return self.tokenizer

    async def read[T](
        self,
        size: int,
        work: Callable[[], T],
        num_samples: int,
        *,
        timeout: float | None = None,
        arrival: float | None = None,
    ) -> T:
        """What `work` returns, which makes ready what `open` will be given: on a thread where it reads many characters or bytes.
        Its samples take their room meanwhile, and its deadline counts.

        Raises:
          As `check_room` and `open`.
        """
        self.check_room(num_samples)
        limit, arrival = self._limit_of(timeout), time.monotonic() if arrival is None else arrival
        self._num_samples += num_samples
        try:
            async with asyncio.timeout(None if limit is None else arrival + limit - time.monotonic()):
                return await self._on(self._reading, size, work)
        except TimeoutError:
            raise _too_late(limit) from None
        finally:
            self._num_samples -= num_samples

    async def aside[T](self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns, as `read`, for what is no request: no request waits for it."""
        return await self._on(self._aside, size, work)

    async def _on[T](self, pool: ThreadPoolExecutor, size: int, work: Callable[[], T]) -> T:
        """Once begun it ends; whoever waits may be cancelled. UnavailableError if shutting down comes first."""
        if size <= SHORT:
            return work()
        if self._closing:
            raise UnavailableError(self._closing)
        result = asyncio.get_running_loop().run_in_executor(pool, work)
        try:
            return await result
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closing and task is not None and not task.cancelling():  # the pool dropped it
                raise UnavailableError(self._closing) from None
            raise

    def _limit_of(self, timeout: float | None) -> float | None:
        """Seconds that a request may take which asks for so many."""
        if timeout is not None and not timeout > 0:
            raise ValueError(f"{timeout=} must be a number of seconds > 0, or None")
        return min((t for t in (timeout, self.request_timeout) if t is not None), default=None)

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. ValueError where no tokenizer was loaded, and, before it is tokenised, for a text that is too long
        whatever its tokens are."""
        tokenizer = self.get_tokenizer()
        if self._max_characters is not None and len(text) > self._max_characters:
            most = f"max_model_len={self.config.scheduler.max_model_len} tokens have {self._max_characters} at most"
            raise ValueError(f"the prompt has {len(text)} characters; {most}")
        return tokenizer.encode(text, add_special_tokens)

    async def open(
        self,
        asks: Sequence[Ask],
        request_id: str | None = None,
        *,
        timeout: float | None = None,
        arrival: float | None = None,
    ) -> RequestStream:
        """Queues prompts and returns their stream once the engine has taken them all, and compiled the forms of their outputs.

        Args:
          asks: one or more.
          request_id: what their requests are called in logs; by default something new. It need not be unique.
          timeout: seconds from their arrival that they may take, within the server's own request_timeout; then DeadlineError.
          arrival: when they came, in seconds of time.monotonic(); by default now.

        Raises:
          ValueError, NotImplementedError: a prompt or a parameter can't be served (GrammarError: the output's form); none of the
            prompts run.
          QueueFullError: too much is waiting. UnavailableError: nothing is taken at the moment. DeadlineError: it is over already.
        """
        self.start()
        limit = self._limit_of(timeout)
        serial = next(self._serials)  # what a closed stream's engine still sends must not reach another of the same name
        names = [f"{request_id or uuid.uuid4().hex}.{serial}.{i}" for i in range(len(asks))]
        ready = {id(params): self.ready(params) for params in {id(ask.params): ask.params for ask in asks}.values()}
        stream = RequestStream(
            self,
            {name: replace(ask, params=ready[id(ask.params)]) for name, ask in zip(names, asks, strict=True)},
            time.monotonic() if arrival is None else arrival,
            limit,
        )
        self._admit(stream)
        try:
            for name, ask in stream.asks.items():
                self._engine.send(
                    Add(name, ask.prompt_token_ids, ask.params, stream.arrival, ask.prompt, ask.priority, ask.cache_salt)
                )
            await stream.accepted()
        except BaseException as error:
            stream.close(refused=isinstance(error, Exception))  # or else cancelled
            raise
        return stream

    def ready(self, params: SamplingParams) -> SamplingParams:
        """What the engine takes: it has no tokenizer. ValueError for what needs one where there is none; for too large a form."""
        form = params.structured_outputs
        if form is not None and len((form := StructuredOutputsParams.make(form)).key) > MAX_FORM:
            raise GrammarError(f"structured_outputs: {form.kind}: its JSON has {len(form.key)} bytes, the most is {MAX_FORM}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop} needs a tokenizer, and none was loaded; use stop_token_ids")
        return with_bad_words_tokenized(params, self.tokenizer)

    def check_room(self, num_samples: int) -> None:
        """Raises what `open` would for want of room: for who wants to know before reading so many prompts.

        Raises:
          ValueError: none are given, or more than one call can have. QueueFullError, UnavailableError: as `open`.
        """
        self.check_health()
        if not num_samples:
            raise ValueError("no prompt was given; give one at least")
        if num_samples > self._limit:
            raise ValueError(f"{num_samples} samples in one call can't be held; the most is {self._limit}")
        if self._num_samples + num_samples > self._limit:
            retry_after = min(60, max(1, math.ceil(self._seconds_taken)))
            message = f"{self._num_samples} samples are running or waiting, of at most {self._limit}; try again in {retry_after} s"
            raise QueueFullError(message, retry_after)

    def _admit(self, stream: RequestStream) -> None:
        """Counts a stream in, or says why not."""
        self.check_room(stream.num_samples)
        left = math.inf if stream.timeout is None else stream.arrival + stream.timeout - time.monotonic()
        if left <= 0:
            raise _too_late(stream.timeout)
        self._num_samples += stream.num_samples
        self._streams |= dict.fromkeys(stream.asks, stream)
        self._empty.clear()
        if stream.timeout is not None:
            stream.timer = asyncio.get_running_loop().call_later(left, self._expire, stream)

    def _expire(self, stream: RequestStream) -> None:
        if not stream.finished:
            stream.fail(_too_late(stream.timeout))
            self._close(stream)

    def _close(self, stream: RequestStream, refused: bool = False) -> None:
        """Ends a stream's requests that still run, and forgets it. Does nothing the second time."""
        running = [name for name in stream.asks if self._streams.get(name) is stream]
        if running:
            self._engine.send(Abort(running, refused))
            self._forget(stream, running)

    def _forget(self, stream: RequestStream, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._streams[request_id]
            self._num_samples -= stream.asks[request_id].params.n
        if stream.timer is not None and not any(self._streams.get(name) is stream for name in stream.asks):
            stream.timer.cancel()
        if not self._streams:
            self._empty.set()

    async def generate(
        self,
        prompt: str | Mapping[str, Any] | Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the output so far (the same object each time) whenever it has grown. Closing the generator aborts the request.

        prompt: a text, token ids, or a dict as `LLM.generate` takes it. timeout: as `open`'s, as are errors, and RequestStream's.
        """
        arrival = time.monotonic()
        ask = await self._ask(prompt, sampling_params or self.default_sampling_params, priority, timeout, arrival)
        async with await self.open([ask], request_id, timeout=timeout, arrival=arrival) as stream:
            output = RequestOutput(request_id or stream.request_ids[0], ask.prompt, ask.prompt_token_ids, [], False)
            with_logprobs = ask.params.logprobs is not None
            for i in range(ask.params.n):
                completion = CompletionOutput(i, "", [], 0.0 if with_logprobs else None, [] if with_logprobs else None)
                output.outputs.append(completion)
            async for delta in stream:
                _extend(output, delta)
                yield output

    async def _ask(
        self,
        prompt: str | Mapping[str, Any] | Sequence[int],
        params: SamplingParams,
        priority: int,
        timeout: float | None,
        arrival: float,
    ) -> Ask:
        fields: Mapping[str, Any]
        if isinstance(prompt, Mapping):
            fields = prompt
        else:
            fields = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        unknown = set(fields) - set(PROMPT_FIELDS)
        if unknown:
            raise ValueError(
                f"prompt has unknown fields {sorted(map(str, unknown))}; known are prompt, prompt_token_ids, cache_salt"
            )
        text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
        if ids is None and not isinstance(text, str):
            raise ValueError(f"prompt={text!r} must be a text, or give prompt_token_ids")
        if ids is None:
            encode = partial(self.encode_prompt, str(text))
            ids = await self.read(len(str(text)), encode, params.n, timeout=timeout, arrival=arrival)
        ids = list(ids)
        return Ask(ids, params, text, priority, fields.get("cache_salt"))

    # -- the engine's side

    def _from_engine(self, report: Report) -> None:
        """Called on the engine's thread: one wake-up of the event loop for all that a step brought."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_report, report)

    def _take_report(self, report: Report) -> None:
        self.stats = report.stats
        for event in report.events:
            if isinstance(event, Reply):
                self._take_reply(event)
                continue
            if isinstance(event, Aborted):
                continue
            stream = self._streams.get(event.request_id)
            if stream is None:  # closed meanwhile
                continue
            if isinstance(event, Failed) or (isinstance(event, Delta) and event.last):
                self._forget(stream, [event.request_id])
                if stream.finished:
                    self._seconds_taken += 0.1 * (time.monotonic() - stream.arrival - self._seconds_taken)
            stream.take(event)
        if self.listener is not None:
            self.listener(report)

    def _take_reply(self, reply: Reply) -> None:
        future = self._calls.pop(reply.call_id, None)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(reply.error)
        else:
            future.set_result(reply.value)

    async def _call(self, method: str, **arguments: Any) -> Any:
        self.start()
        if self._closing or self.stats.broken:
            raise UnavailableError(self._closing or str(self.stats.broken))
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._engine.send(Call(call_id, method, arguments))
        return await future

    # -- control

    async def pause(self) -> None:
        """No new steps until `resume`; requests may be added and wait, those under way keep their pages."""
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while any request holds pages."""
        return await self._call("reset_prefix_cache")

    async def update_weights_from_path(self, path: str | Path, in_flight: str = "refuse") -> None:
        """Loads another checkpoint of the same model beside the current weights, and switches to it between two steps.

        in_flight: what becomes of requests that have begun: see `Engine.update_params`, also for the errors.
        """
        await self._call("update_weights_from_path", path=str(path), in_flight=in_flight)

    async def sleep(self, level: int = 1) -> None:
        """Frees the KV pages, and the weights too at level 2, until `wake_up`; RuntimeError while requests are unfinished."""
        await self._call("sleep", level=level)

    async def wake_up(self) -> None:
        await self._call("wake_up")

    def check_health(self) -> None:
        """UnavailableError, with why, if new requests would be refused."""
        if self._closing or self.stats.broken:
            raise UnavailableError(self._closing or str(self.stats.broken))

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._streams)

    async def shutdown(self, grace: float | None = None) -> None:
        """Takes no more requests, gives those under way `grace` seconds (None: as long as they need), and ends the engine."""
        self._closing = self._closing or "the server is shutting down"
        try:
            await asyncio.wait_for(self._empty.wait(), grace)
        except TimeoutError:
            pass
        for stream in list(self._streams.values()):
            stream.fail(UnavailableError(self._closing))
            self._close(stream)
        if self._loop is not None:
            self._engine.send(Stop())
            await asyncio.to_thread(self._engine.join)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(UnavailableError(self._closing))
        self._calls.clear()
        for pool in (self._reading, self._aside):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)


def _too_late(limit: float | None) -> DeadlineError:
    return DeadlineError(f"the request took longer than {limit:g} s")


def _extend(output: RequestOutput, delta: Delta) -> None:
    completion = output.outputs[delta.index]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    if completion.logprobs is not None and delta.logprobs is not None:
        completion.logprobs += delta.logprobs
        new = sum(x[i].logprob for i, x in zip(delta.token_ids, delta.logprobs, strict=True))
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + new
    completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
    output.num_cached_tokens = delta.num_cached_tokens
    output.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
    output.finished, output.metrics = delta.last, delta.totals.metrics if delta.totals else output.metrics
