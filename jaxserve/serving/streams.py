"""Streams of requests that are open on the event loop: RequestStream, what a caller reads, and OpenStreams, which holds them all.

Owns how many samples may be held, deadlines, and which stream an event of the engine belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from jaxserve.outputs import RequestOutput
from jaxserve.request import StoredPrefix
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.messages import Accepted, DeadlineError, Delta, Failed, QueueFullError


@dataclass(frozen=True, slots=True)
class Ask:
    """A tokenised prompt and its sampling parameters. keeps_prompt, stored_prefix: as `Request`'s. trace: headers of the trace that
    it is part of."""

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    keeps_prompt: bool = False
    stored_prefix: StoredPrefix | None = None
    trace: Mapping[str, str] | None = None


class AnswerStream(Protocol):
    """What an answer reads of a `RequestStream`. `async with` ends what still runs."""

    asks: Mapping[str, Ask]
    request_ids: list[str]
    num_samples: int

    @property
    def finished(self) -> bool:
        """Whether nothing is waited for any more: what is left to read is there."""
        ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def close(self) -> None: ...


class RequestStream:
    """The outputs of one call's prompts: an asynchronous iterator of Deltas, in the order in which they come.

    `request_ids` are in the order of the prompts. Use it in an `async with`: leaving before the end aborts the requests that still
    run, and their pages are free before the next step is scheduled.
    """

    def __init__(
        self,
        asks: Mapping[str, Ask],
        arrival: float,
        timeout: float | None,
        close: Callable[[RequestStream, bool], None],
        spend: Callable[[int], None] | None = None,
    ):
        self.asks: Mapping[str, Ask] = asks  # by request id
        self.request_ids: list[str] = list(asks)
        self.num_samples: int = sum(ask.params.n for ask in asks.values())
        self.arrival: float = arrival  # in seconds of time.monotonic()
        self.timeout: float | None = timeout  # seconds after the arrival
        self._close, self._spend = close, spend
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
        """Waits until the engine has accepted all of the prompts. Raises the error with which it refuses one; then none run. An
        error that came after that, though before anybody looked, is one of the stream, behind what it has."""
        while self._unaccepted:
            if self._error is not None:
                raise self._error
            await self._wait()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Delta:
        """The next Delta. Raises RequestError if a request fails."""
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
        """Aborts the requests that still run. refused: see `messages.Abort`."""
        self._close(self, refused)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def take(self, event: Accepted | Delta | Failed) -> None:
        """An event of one of its requests."""
        if isinstance(event, Delta):
            self._deltas.append(event)
            if self._spend is not None:
                self._spend(len(event.token_ids))
            if event.last:
                self._unfinished.discard(event.request_id)
        elif isinstance(event, Accepted):
            self._unaccepted.discard(event.request_id)
            if self._spend is not None:
                self._spend(len(self.asks[event.request_id].prompt_token_ids))
        else:
            self._unfinished.discard(event.request_id)
            self._error = self._error or event.error
        self.wake()

    def fail(self, error: Exception) -> None:
        """Ends the stream with this error, unless it has one already."""
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        """Lets the reader look again, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OpenStreams:
    """Every open stream, by the ids of its requests that have not ended.

    Args:
      limit: samples that may be held at a time, of streams and of requests that are still being read.
      abort: called with the ids of requests that a closed stream leaves running, and whether its call was refused.
    """

    def __init__(self, limit: int, abort: Callable[[list[str], bool], None]):
        self._limit, self._abort = limit, abort
        self._streams: dict[str, RequestStream] = {}
        self.num_samples: int = 0
        self.num_refused: int = 0  # calls for which there was no room
        self._seconds_taken = 1.0  # a moving average over the requests that have ended
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def check_room(self, num_samples: int) -> None:
        """ValueError for no samples, or more than the limit; QueueFullError where there is no room for them now."""
        if not num_samples:
            raise ValueError("no prompt was given; give one at least")
        if num_samples > self._limit:
            raise ValueError(f"{num_samples} samples in one call can't be held; the most is {self._limit}")
        if self.num_samples + num_samples > self._limit:
            retry_after = min(60, max(1, math.ceil(self._seconds_taken)))
            self.num_refused += 1
            message = f"{self.num_samples} samples are running or waiting, of at most {self._limit}; try again in {retry_after} s"
            raise QueueFullError(message, retry_after)

    @contextlib.contextmanager
    def held(self, num_samples: int) -> Iterator[None]:
        """Counts samples whose request is still being read."""
        self.num_samples += num_samples
        try:
            yield
        finally:
            self.num_samples -= num_samples

    def add(self, stream: RequestStream) -> None:
        """Adds a stream and sets a timer for its deadline. Raises DeadlineError if the deadline has passed."""
        left = math.inf if stream.timeout is None else stream.arrival + stream.timeout - time.monotonic()
        if left <= 0:
            raise too_late(stream.timeout)
        self.num_samples += stream.num_samples
        self._streams |= dict.fromkeys(stream.asks, stream)
        self._empty.clear()
        if stream.timeout is not None:
            stream.timer = asyncio.get_running_loop().call_later(left, self._expire, stream)

    def take(self, event: Accepted | Delta | Failed) -> None:
        """Hands an event to its stream. Does nothing if the stream was closed meanwhile."""
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        if isinstance(event, Failed) or (isinstance(event, Delta) and event.last):
            self._forget(stream, [event.request_id])
            if stream.finished:
                self._seconds_taken += 0.1 * (time.monotonic() - stream.arrival - self._seconds_taken)
        stream.take(event)

    def close(self, stream: RequestStream, refused: bool = False) -> None:
        """Aborts a stream's requests that still run, and forgets it. Does nothing the second time."""
        running = [name for name in stream.asks if self._streams.get(name) is stream]
        if running:
            self._abort(running, refused)
            self._forget(stream, running)

    def named(self, request_ids: Collection[str]) -> list[str]:
        """The open requests that have one of these names; theirs is that and two numbers."""
        return [name for name in self._streams if name.rsplit(".", 2)[0] in request_ids]

    def fail_all(self, error: Exception) -> None:
        """Ends every stream with this error."""
        for stream in list(self._streams.values()):
            stream.fail(error)
            self.close(stream)

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    def _expire(self, stream: RequestStream) -> None:
        if not stream.finished:
            stream.fail(too_late(stream.timeout))
            self.close(stream)

    def _forget(self, stream: RequestStream, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._streams[request_id]
            self.num_samples -= stream.asks[request_id].params.n
        if stream.timer is not None and not any(self._streams.get(name) is stream for name in stream.asks):
            stream.timer.cancel()
        if not self._streams:
            self._empty.set()


def too_late(limit: float | None) -> DeadlineError:
    """The error of a request that took longer than `limit` seconds."""
    return DeadlineError(f"the request took longer than {limit:g} s")


def extend(output: RequestOutput, delta: Delta) -> None:
    """Adds what a delta brings to a request's output."""
    completion = output.outputs[delta.index]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    if completion.logprobs is not None and delta.logprobs is not None:
        completion.logprobs += delta.logprobs
        new = sum(x[i].logprob for i, x in zip(delta.token_ids, delta.logprobs, strict=True))
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + new
    completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
    completion.weight_versions = delta.weight_versions
    output.num_cached_tokens = delta.num_cached_tokens
    output.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
    output.finished, output.metrics = delta.last, delta.totals.metrics if delta.totals else output.metrics
