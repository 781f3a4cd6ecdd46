"""`AsyncLLM`: requests from an event loop, each with a stream of its own, on an engine that runs beside it.

Owns admission, the calls that control the engine, and shutting down; it talks to the engine's loop in messages (messages.py).
Streams are in streams.py, threads that read long prompts in reading.py. Knows nothing of HTTP, nor of steps.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.moved import forward
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving import streams
from jaxserve.serving.engine_loop import EngineLoop
from jaxserve.serving.interfaces import ServedConfig, ServedLLM
from jaxserve.serving.messages import Abort, Aborted, Add, Call, Delta, LoopStats, Reply, Report, Stop, UnavailableError
from jaxserve.serving.reading import ReadingPools
from jaxserve.serving.streams import OpenStreams, too_late
from jaxserve.structured.grammars import GrammarError
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text.prompts import Prompt, for_engine, prompt_fields, require_tokenizer
from jaxserve.text.tokenizer import Tokenizer

MAX_COMPILING = 256  # forms that may wait for the compiler; it takes most in milliseconds, and some in seconds
MAX_FORM = 256 * 2**10  # bytes of the form of an output, as JSON: what compiles it does not stop


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
        llm: ServedLLM,
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
        self.config: ServedConfig = llm.engine.config
        self.eos_token_ids: frozenset[int] = llm.engine.eos_token_ids
        self.request_timeout = request_timeout
        self.listener = listener
        llm.grammars.prepare()  # so that no step will wait for it
        grammars = llm.grammars.beside(max_waiting=MAX_COMPILING)
        self._engine = EngineLoop(llm.engine, llm.tokenizer, grammars, self._from_engine, max_failures=max_failures)
        self.stats: LoopStats = self._engine.stats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams = OpenStreams(
            self.config.scheduler.max_num_seqs + max_waiting, lambda names, refused: self._engine.send(Abort(names, refused))
        )
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids, self._serials = itertools.count(), itertools.count()
        self._closing: str | None = None
        self._pools = ReadingPools()
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
        return require_tokenizer(self.tokenizer)

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
        with self._streams.held(num_samples):
            try:
                async with asyncio.timeout(None if limit is None else arrival + limit - time.monotonic()):
                    return await self._pools.request(size, work)
            except TimeoutError:
                raise too_late(limit) from None

    async def aside[T](self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns, as `read`, for what is no request: no request waits for it."""
        return await self._pools.aside(size, work)

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
        asks: Sequence[streams.Ask],
        request_id: str | None = None,
        *,
        timeout: float | None = None,
        arrival: float | None = None,
    ) -> streams.RequestStream:
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
        stream = streams.RequestStream(
            {name: replace(ask, params=ready[id(ask.params)]) for name, ask in zip(names, asks, strict=True)},
            time.monotonic() if arrival is None else arrival,
            limit,
            self._streams.close,
        )
        self.check_room(stream.num_samples)
        self._streams.add(stream)
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
        return for_engine(params, self.tokenizer)

    def check_room(self, num_samples: int) -> None:
        """Raises what `open` would for want of room: for who wants to know before reading so many prompts.

        Raises:
          ValueError: none are given, or more than one call can have. QueueFullError, UnavailableError: as `open`.
        """
        self.check_health()
        self._streams.check_room(num_samples)

    async def generate(
        self,
        prompt: Prompt,
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
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        timeout: float | None,
        arrival: float,
    ) -> streams.Ask:
        text, ids, salt = prompt_fields(prompt)
        if ids is None:
            encode = partial(self.encode_prompt, str(text))
            ids = await self.read(len(str(text)), encode, params.n, timeout=timeout, arrival=arrival)
        return streams.Ask(list(ids), params, text, priority, salt)

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
            elif not isinstance(event, Aborted):
                self._streams.take(event)
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
        return self._streams.num_requests

    async def shutdown(self, grace: float | None = None) -> None:
        """Takes no more requests, gives those under way `grace` seconds (None: as long as they need), and ends the engine."""
        self._closing = self._closing or "the server is shutting down"
        self._pools.close_to_new(self._closing)
        try:
            await asyncio.wait_for(self._streams.wait_until_empty(), grace)
        except TimeoutError:
            pass
        self._streams.fail_all(UnavailableError(self._closing))
        if self._loop is not None:
            self._engine.send(Stop())
            await asyncio.to_thread(self._engine.join)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(UnavailableError(self._closing))
        self._calls.clear()
        await self._pools.shutdown()


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


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
