"""`AsyncLLM`: requests from an event loop, each with its own stream, on an engine that runs on a thread beside it.

Owns admission, the calls that control the engine, and shutting down. It talks to the engine's loop in messages (messages.py).
Streams are in streams.py, threads that read long prompts in reading.py. Knows nothing of HTTP or steps.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxserve.moved import forward
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving import streams
from jaxserve.serving.engine_loop import MAX_COMPILING, EngineLoop
from jaxserve.serving.interfaces import DescribedLLM, EngineSide, ServedConfig, ServedLLM
from jaxserve.serving.messages import (
    Abort,
    Aborted,
    Add,
    Call,
    HTTPAnswered,
    LoopStats,
    QueueFullError,
    Ready,
    Reply,
    Report,
    Stop,
    UnavailableError,
)
from jaxserve.serving.options import MAX_FAILURES, MAX_WAITING, check_limits
from jaxserve.serving.reading import ReadingPools
from jaxserve.serving.streams import OpenStreams, too_late
from jaxserve.structured.grammars import GrammarError
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text.prompts import Prompt, for_engine, prompt_fields, require_tokenizer
from jaxserve.text.tokenizer import Tokenizer

PAUSE_MODES = ("abort", "wait", "keep")
MAX_FORM = 256 * 2**10  # bytes of the form of an output, as JSON: compiling a larger one could take very long


class AsyncLLM:
    """An `LLM` for asyncio: `generate` streams, and requests of many tasks share the engine's steps.

    Args:
      llm: the model, loaded; from here on nothing else may use it. If its vocabulary was not read for forms yet, it is read here.
        With `connect`, what that model is like.
      max_waiting: samples that may wait beyond the engine's max_num_seqs. More are refused with QueueFullError.
      request_timeout: seconds that a request may take in all, waiting included. None: any time.
      max_failures: as `EngineLoop`'s.
      listener: called with every Report, on the event loop; for metrics.
      default_sampling_params: what requests change; None: what the model recommends.
      max_new_tokens: the most tokens of a sample, whatever a request asks for; None: as many as it asks for.
      connect: returns the loop of an engine that is elsewhere, which delivers its Reports to the function that it is given. None:
        the engine is llm's, on a thread of this process.
      tag: part of the names that the engine knows requests by: other processes that use it have others.

    Call all methods on one event loop, the one that runs at the first call. Use it in an `async with`, or call `shutdown`.

    Raises:
      ValueError: an argument out of its range.
    """

    def __init__(
        self,
        llm: ServedLLM | DescribedLLM,
        *,
        max_waiting: int = MAX_WAITING,
        request_timeout: float | None = None,
        max_failures: int = MAX_FAILURES,
        listener: Callable[[Report], None] | None = None,
        default_sampling_params: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        connect: Callable[[Callable[[Report], None]], EngineSide] | None = None,
        tag: str = "",
    ):
        check_limits(max_waiting, request_timeout, max_failures)
        self.tokenizer: Tokenizer | None = llm.tokenizer
        self.default_sampling_params: SamplingParams = default_sampling_params or llm.get_default_sampling_params()
        # max_new_tokens of generation_config.json, unless other defaults were given in its place.
        recommended = getattr(getattr(llm, "generation_defaults", None), "max_new_tokens", None)
        is_default = recommended == self.default_sampling_params.max_tokens
        self.recommended_max_tokens: int | None = recommended if is_default else None
        self.max_new_tokens = max_new_tokens
        self.config: ServedConfig = llm.engine.config
        self.eos_token_ids: frozenset[int] = llm.engine.eos_token_ids
        self.qualification: str | None = llm.engine.qualification
        self.request_timeout = request_timeout
        self.listener = listener
        own = partial(_own_loop, cast("ServedLLM", llm), max_failures)
        self._engine: EngineSide = (connect or own)(self._from_engine)
        self._tag = tag
        self.stats: LoopStats = self._engine.stats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams = OpenStreams(
            self.config.scheduler.max_num_seqs + max_waiting, lambda names, refused: self._engine.send(Abort(names, refused))
        )
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids, self._serials = itertools.count(), itertools.count()
        self._closing: str | None = None
        self._open_to_new = asyncio.Event()  # cleared while a pause waits for the requests under way
        self._open_to_new.set()
        self._pools = ReadingPools()
        self.max_prompt_characters: int | None = None  # that max_model_len tokens can have; None: no bound is known
        if llm.tokenizer is not None and (longest := llm.tokenizer.max_token_bytes) is not None:
            self.max_prompt_characters = self.config.scheduler.max_model_len * longest

    def start(self) -> None:
        """Starts the engine's thread, if it has not been started. Methods that need the engine do so too."""
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
        """Runs `work`, which reads the prompts for `open`, and returns its result. Long work runs on a thread.

        Meanwhile the request's samples count as waiting, and its deadline applies.

        Args:
          size: characters or bytes that `work` reads.
          work: a function that any thread may run.
          num_samples: samples of the request.
          timeout, arrival: as `open`'s.

        Raises:
          What `check_room`, `open` and `work` raise.
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
        """Runs `work` like `read`, for calls that are no requests, such as /tokenize. No request waits for it."""
        return await self._pools.aside(size, work)

    async def read_body[T](self, work: Callable[[], T]) -> T:
        """Runs `work`, which reads the long body of a request of any kind, on a thread."""
        return await self._pools.body(work)

    def _limit_of(self, timeout: float | None) -> float | None:
        """Seconds that a request with this timeout may take; None: any time."""
        if timeout is not None and not timeout > 0:
            raise ValueError(f"{timeout=} must be a number of seconds > 0, or None")
        return min((t for t in (timeout, self.request_timeout) if t is not None), default=None)

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Raises:
          ValueError: no tokenizer was loaded, or the text has more characters than max_model_len tokens can have. Such a text is
            refused before it is tokenised.
        """
        tokenizer = self.get_tokenizer()
        if self.max_prompt_characters is not None and len(text) > self.max_prompt_characters:
            longest = self.config.scheduler.max_model_len
            most = f"max_model_len={longest} tokens have {self.max_prompt_characters} at most"
            raise ValueError(
                f"the prompt has {len(text)} characters; the model's maximum context length is {longest} tokens; {most}"
            )
        return tokenizer.encode(text, add_special_tokens)

    async def open(
        self,
        asks: Sequence[streams.Ask],
        request_id: str | None = None,
        *,
        timeout: float | None = None,
        arrival: float | None = None,
        spend: Callable[[int], None] | None = None,
    ) -> streams.RequestStream:
        """Queues prompts. Returns their stream once the engine has accepted them all and compiled the forms of their outputs.

        Args:
          asks: one or more.
          request_id: the name of their requests in logs; a new one by default. It need not be unique.
          timeout: seconds from their arrival that they may take, within the server's own request_timeout. DeadlineError follows.
          arrival: when they came, in seconds of time.monotonic(); by default now.
          spend: called with numbers of tokens: each prompt's when it is accepted, those of outputs as they come.

        Raises:
          ValueError, NotImplementedError: a prompt or a parameter can't be served. Then none of the prompts run.
          GrammarError: the form of an output can't be compiled. Then none of the prompts run.
          QueueFullError: too many samples wait.
          UnavailableError: no request is taken at present.
          DeadlineError: the deadline has passed already.
        """
        self.start()
        limit = self._limit_of(timeout)
        serial = next(self._serials)  # events of a closed stream must not reach a later one of the same name
        names = [f"{request_id or uuid.uuid4().hex}.{self._tag}{serial}.{i}" for i in range(len(asks))]
        ready = {id(params): self.ready(params) for params in {id(ask.params): ask.params for ask in asks}.values()}
        stream = streams.RequestStream(
            {name: replace(ask, params=ready[id(ask.params)]) for name, ask in zip(names, asks, strict=True)},
            time.monotonic() if arrival is None else arrival,
            limit,
            self._streams.close,
            spend,
        )
        self.check_room(stream.num_samples)
        if not self._open_to_new.is_set():
            await self._wait_for_a_pause(stream)
        self._streams.add(stream)
        try:
            for name, ask in stream.asks.items():
                fields = ask.prompt, ask.priority, ask.cache_salt, ask.keeps_prompt, ask.stored_prefix, ask.trace
                self._engine.send(Add(name, ask.prompt_token_ids, ask.params, stream.arrival, *fields))
            await stream.accepted()
        except BaseException as error:
            self._streams.num_refused += isinstance(error, QueueFullError)  # from a hub, whose engine others fill too
            stream.close(refused=isinstance(error, Exception))  # or else cancelled
            raise
        return stream

    async def _wait_for_a_pause(self, stream: streams.RequestStream) -> None:
        """Waits until the requests under way have ended, while a pause waits for them too. Raises what `open` raises."""
        left = None if stream.timeout is None else stream.arrival + stream.timeout - time.monotonic()
        with self._streams.held(stream.num_samples):
            try:
                await asyncio.wait_for(self._open_to_new.wait(), left)
            except TimeoutError:
                raise too_late(stream.timeout) from None
        self.check_health()

    def ready(self, params: SamplingParams) -> SamplingParams:
        """The parameters as the engine takes them, which has no tokenizer, with max_new_tokens at most.

        Raises:
          ValueError: they need a tokenizer, and there is none.
          GrammarError: the form is too large.
        """
        form = params.structured_outputs
        if form is not None and len((form := StructuredOutputsParams.make(form)).key) > MAX_FORM:
            raise GrammarError(f"structured_outputs: {form.kind}: its JSON has {len(form.key)} bytes, the most is {MAX_FORM}")
        if (most := self.max_new_tokens) is not None:
            params = params.with_(max_tokens=min(params.max_tokens or most, most), min_tokens=min(params.min_tokens, most))
        return for_engine(params, self.tokenizer)

    def check_room(self, num_samples: int) -> None:
        """Raises what `open` would raise for lack of room, so that a caller can check before it reads the prompts.

        Raises:
          ValueError: num_samples is 0, or more than one call may have.
          QueueFullError, UnavailableError: as `open`.
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

        Args:
          prompt: a text, token ids, or a dict as `LLM.generate` takes it.
          sampling_params: None: the model's defaults.
          request_id, timeout: as `open`'s.
          priority: lower is served first, if the engine was made with scheduling_policy="priority".

        Raises:
          What `open` raises, and RequestError if the request fails later.
        """
        arrival = time.monotonic()
        ask = await self._ask(prompt, sampling_params or self.default_sampling_params, priority, timeout, arrival)
        async with await self.open([ask], request_id, timeout=timeout, arrival=arrival) as stream:
            output = RequestOutput(request_id or stream.request_ids[0], ask.prompt, ask.prompt_token_ids, [], False)
            with_logprobs = ask.params.returns_logprobs
            for i in range(ask.params.n):
                completion = CompletionOutput(i, "", [], 0.0 if with_logprobs else None, [] if with_logprobs else None)
                output.outputs.append(completion)
            async for delta in stream:
                streams.extend(output, delta)
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
        """Called on the engine's thread. Wakes the event loop once for everything that a step brought."""
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

    async def ask(self, method: str) -> Any:
        """What a hub answers: `metrics` or `num_requests` of all processes that use the engine. UnavailableError if it is gone."""
        self.start()
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._engine.send(Call(call_id, method, {}))
        return await future

    def tell(self, news: HTTPAnswered | Ready) -> None:
        """Tells a hub what only this process knows."""
        self._engine.send(news)

    # -- control

    async def pause(self, mode: str = "keep") -> None:
        """No new steps run until `resume`. Requests may be added and wait.

        Args:
          mode: what becomes of requests under way. "keep": they keep their pages and go on after `resume`. "abort": they end with
            what they have and finish_reason "abort". "wait": they run to their end first, while requests that come wait.

        Raises:
          ValueError: another mode.
          RuntimeError: mode "wait", and the engine is paused already, or `resume` came first.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"{mode=} must be one of {', '.join(PAUSE_MODES)}")
        if mode == "wait":
            await self._until_idle()
        await self._call("pause", **({"abort": True} if mode == "abort" else {}))
        self._open_to_new.set()

    async def end(self, request_ids: Collection[str]) -> int:
        """Ends requests of these names, as `open` was given them, with what they have and finish_reason "abort". Returns how many
        there were, prompts counted one by one."""
        names = self._streams.named(request_ids)
        return await self._call("end", request_ids=names) if names else 0

    async def _until_idle(self) -> None:
        """Takes no request until all others have ended. Raises RuntimeError if `resume` comes first."""
        if self.stats.is_paused and self.num_requests:
            raise RuntimeError("the engine is paused, so that the requests under way would never end: resume first")
        self._open_to_new.clear()
        waits = [asyncio.ensure_future(w) for w in (self._streams.wait_until_empty(), self._open_to_new.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._open_to_new.is_set():
                raise RuntimeError("resumed before the requests under way had ended")
        except BaseException:
            self._open_to_new.set()
            raise
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def is_paused(self) -> bool:
        """Whether steps have stopped, or will stop when the requests under way have ended."""
        return self.stats.is_paused or not self._open_to_new.is_set()

    async def resume(self) -> None:
        self._open_to_new.set()
        await self._call("resume")

    async def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        """As `Engine.reset_prefix_cache`."""
        return await self._call("reset_prefix_cache", reset_external=reset_external)

    async def update_weights_from_path(self, path: str | Path, in_flight: str = "refuse", weight_version: str | None = None) -> str:
        """Loads another checkpoint of the same model beside the current weights, and switches to it between two steps. Returns
        their name. in_flight, weight_version and errors: as `Engine.update_params`'s."""
        arguments = {"path": str(path), "in_flight": in_flight, "weight_version": weight_version}
        return await self._call("update_weights_from_path", **arguments)

    async def update_weight_version(self, new_version: str) -> None:
        """As `Engine.update_weight_version`. The name is in `stats`."""
        await self._call("update_weight_version", new_version=new_version)

    async def sleep(self, level: int = 1) -> None:
        """Frees the KV pages until `wake_up`, and at level 2 the weights too. Raises RuntimeError while requests are unfinished."""
        await self._call("sleep", level=level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """As `Engine.wake_up`. Returns whether all is awake."""
        return await self._call("wake_up", tags=tags)

    def check_health(self) -> None:
        """Raises UnavailableError, with the reason, if new requests would be refused."""
        if self._closing or self.stats.broken:
            raise UnavailableError(self._closing or str(self.stats.broken))

    @property
    def num_refused(self) -> int:
        """Calls that were refused with QueueFullError, since too many samples waited."""
        return self._streams.num_refused

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return self._streams.num_requests

    async def shutdown(self, grace: float | None = None) -> None:
        """Takes no more requests, waits `grace` seconds for those under way (None: until they end), and ends the engine."""
        self._closing = self._closing or "the server is shutting down"
        self._pools.close_to_new(self._closing)
        self._open_to_new.set()
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


def _own_loop(llm: ServedLLM, max_failures: int, deliver: Callable[[Report], None]) -> EngineLoop:
    """The loop of an engine of this process."""
    llm.grammars.prepare()  # now, so that no step will wait for it
    grammars = llm.grammars.beside(max_waiting=MAX_COMPILING)
    return EngineLoop(llm.engine, llm.tokenizer, grammars, deliver, max_failures=max_failures)


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
