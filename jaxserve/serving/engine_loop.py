"""The engine's thread: takes commands from a queue, steps the engine, and delivers a Report after each turn.

Owns the engine, the texts of its outputs, and what happens to requests when a step fails. Knows nothing of asyncio or HTTP: it
calls `deliver`, a function of a Report, on this thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxserve.execution.compilation import compile_counts
from jaxserve.hosts.pulse import HostLostError
from jaxserve.outputs import RequestOutput, WeightVersionSpan
from jaxserve.request import EngineOutput, Request
from jaxserve.sampling.nothing_allowed import NothingAllowedError
from jaxserve.scheduling.schedule import SchedulerStats
from jaxserve.serving.interfaces import ServedEngine
from jaxserve.serving.messages import (
    Abort,
    Aborted,
    Accepted,
    Add,
    Call,
    Command,
    Compiled,
    Delta,
    Event,
    Failed,
    FailedError,
    HostLost,
    Loaded,
    LoopStats,
    ProgramCompiled,
    QueueFullError,
    Reply,
    Report,
    RequestError,
    RequestTotals,
    Stop,
    UnavailableError,
)
from jaxserve.structured.constraints import check_start
from jaxserve.structured.grammars import CompilerBusyError, Grammar, GrammarCompiler, GrammarError, outcome
from jaxserve.text.text_outputs import TextOutputs
from jaxserve.text.tokenizer import Tokenizer

logger: logging.Logger = logging.getLogger("jaxserve")


Told = Command | Compiled | Loaded | ProgramCompiled | HostLost
MAX_COMPILING = 256  # forms that may wait for the compiler; most take it milliseconds, some take seconds
LAST_WORDS_SECONDS = 1.0  # after a host was lost, in which the engine's thread must hear of it
CALLS = (
    *("pause", "resume", "reset_prefix_cache", "sleep", "wake_up", "end"),
    *("update_weights_from_path", "update_weight_version"),
)


@dataclass(slots=True)
class _Sent:
    """How much of a sample's output has been delivered."""

    num_characters: int = 0
    num_tokens: int = 0
    finished: bool = False
    time: float | None = None  # of the last delivery, in seconds of time.monotonic()


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: Request  # its first sample
    max_tokens: int | None
    samples: list[_Sent]
    trace: Mapping[str, str] | None  # of the trace that it is part of
    begun: bool = False  # whether it has its first token


class EngineLoop:
    """Runs an engine on a thread of its own.

    Args:
      engine: from `start` on, only this thread touches it.
      tokenizer: None leaves texts empty.
      grammars: compiles forms; closed with the engine.
      deliver: called with a Report after each turn that brought one.
      max_failures: how many steps in a row may raise, with no token between them. After that the engine counts as broken, and
        refuses every request with the reason.
    """

    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler,
        deliver: Callable[[Report], None],
        *,
        max_failures: int,
    ):
        self.engine: ServedEngine = engine
        self._texts = TextOutputs(tokenizer, engine.finish)
        self._grammars = grammars
        self._deliver, self._max_failures = deliver, max_failures
        self._inbox: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}  # by request id
        self._compiling: dict[str, Future[Grammar]] = {}  # by request id; the request is accepted or refused when it is done
        self._events: list[Event] = []
        self._paused = False
        self._broken: str | None = None
        self._failures_in_a_row = self._num_failures = 0
        self._num_prompt_tokens = self._num_cached_tokens = 0  # of requests that have begun
        self._sleep_level = 0
        self._lost = (0, 0, 0)  # the scheduler's counts from before a failed step, which replaces the scheduler
        self._step_seconds: float | None = None
        self._has_news = False  # whether stats changed without a step
        self._loading: threading.Thread | None = None  # reads weights; None once the engine has them
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)

    def start(self) -> None:
        self.engine.on_compiled(lambda: self.send(ProgramCompiled()))
        self.engine.on_lost(lambda error: self._hear_of_loss(str(error)))
        self._thread.start()

    def send(self, command: Told) -> None:
        """Queues a command, which the engine's thread takes between two steps. Any thread may call this."""
        self._inbox.put(command)

    def _hear_of_loss(self, why: str) -> None:
        """On a thread of the group's. The engine's thread may stand in a step that never comes back."""
        self.send(HostLost(why))
        last_words = threading.Timer(LAST_WORDS_SECONDS, self._speak_for_the_thread, (why,))
        last_words.daemon = True
        last_words.start()

    def _speak_for_the_thread(self, why: str) -> None:
        """Fails all requests, where the engine's thread has not heard of the loss: the group ends the process soon."""
        if self._broken is not None:
            return
        self._broken, waiting = why, []
        while not self._inbox.empty():
            waiting.append(self._inbox.get())
        for command in waiting:
            self._inbox.put(command)
        request_ids = [*self._open, *(command.request_id for command in waiting if isinstance(command, Add))]
        self._deliver(Report([Failed(request_id, FailedError(why)) for request_id in request_ids], self.stats()))

    def join(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds for the thread to end after a Stop. Returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._can_step():
                    self._step()
                self._hand_over()
        except BaseException as error:  # a bug in this loop: every request that waits must still end
            logger.exception("the engine's thread ends")
            self._broken = f"the engine's thread ended: {error!r}"
            self._fail_all(FailedError, self._broken)
        finally:
            self._fail_all(UnavailableError, "the server is shutting down")
            self._broken = self._broken or "the server has shut down"
            self._hand_over()
            if self._loading is not None:
                self._loading.join()
            try:
                self.engine.close()
            finally:
                self._grammars.close()

    def _can_step(self) -> bool:
        return not self._paused and self.engine.has_unfinished_requests()

    def _take_commands(self) -> bool:
        """Carries out the queued commands. Waits for one if no step can run. Returns False after a Stop."""
        wait = not self._can_step()
        while wait or not self._inbox.empty():
            command = self._inbox.get()
            wait = False
            if isinstance(command, Stop):
                return False
            if isinstance(command, Add):
                self._add(command)
            elif isinstance(command, Abort):
                for name in () if command.refused else self._open.keys() & set(command.request_ids):
                    self._events.append(Aborted(name, sum(not sent.finished for sent in self._open[name].samples)))
                self._abort(command.request_ids)
            elif isinstance(command, ProgramCompiled):
                self._has_news = True
            elif isinstance(command, HostLost):
                self._break(command.why)
            elif isinstance(command, Compiled):
                self._settle(command.request_id)
            elif isinstance(command, Loaded):
                self._loading = None
                self._events.append(self._reply(command.call, partial(self._update_weights, command)))
            else:
                self._answer(command)
        return True

    def _add(self, add: Add) -> None:
        grammar = None
        try:
            if self._broken is not None:
                raise UnavailableError(self._broken)
            form = add.params.structured_outputs
            grammar = None if form is None else self._grammars.submit(form)
            requests = self.engine.add_request(
                add.request_id,
                add.prompt_token_ids,
                add.params,
                priority=add.priority,
                cache_salt=add.cache_salt,
                arrival=add.arrival,
                grammar=grammar,
                stops_at_text=True,
            )
            for request in requests:
                request.keeps_prompt, request.stored_prefix = add.keeps_prompt, add.stored_prefix
            self._texts.add(requests, add.prompt)
        except (ValueError, RuntimeError, UnavailableError) as error:
            if grammar is not None:
                self._grammars.give_up(grammar)
            self._events.append(Failed(add.request_id, _as_refusal(error)))
            return
        samples = [_Sent() for _ in requests]
        self._open[add.request_id] = _Open(requests[0], add.params.max_tokens, samples, add.trace)
        if grammar is None:
            self._events.append(Accepted(add.request_id))
        else:
            self._compiling[add.request_id] = grammar
            compiled = Compiled(add.request_id)
            grammar.add_done_callback(lambda _: self.send(compiled))  # lives as long as the grammar, so it holds no prompt

    def _settle(self, request_id: str) -> None:
        """Accepts a request whose grammar is done, or refuses it if that failed or can't begin. Does nothing the second time."""
        grammar = self._compiling.pop(request_id, None)
        if grammar is None:
            return
        try:
            check_start(self._open[request_id].request, outcome(grammar), self.engine.config.model.vocab_size)
        except Exception as error:
            known = isinstance(error, GrammarError | NothingAllowedError)
            self._fail(request_id, error.with_traceback(None) if known else FailedError(f"the grammar was not compiled: {error!r}"))
        else:
            self._events.append(Accepted(request_id))

    def _fail(self, request_id: str, error: Exception) -> None:
        self._abort([request_id])
        self._events.append(Failed(request_id, error))

    def _abort(self, request_ids: list[str]) -> None:
        self.engine.abort(request_ids)
        self._texts.discard(request_ids)
        for request_id in request_ids:
            self._open.pop(request_id, None)
            grammar = self._compiling.pop(request_id, None)
            if grammar is not None:
                self._grammars.give_up(grammar)

    def _step(self) -> None:
        started = time.monotonic()
        before = self.engine.scheduler.stats()
        try:
            outputs = self.engine.step()
        except Exception as error:  # the engine has reset itself, and holds no request any more
            self._on_failed_step(error, before)
            return
        self._step_seconds = time.monotonic() - started
        if outputs:
            self._failures_in_a_row = 0
        by_request: dict[str, list[EngineOutput]] = {}
        for output in outputs:
            by_request.setdefault(output.request.parent_id, []).append(output)
        for request_id, its_outputs in by_request.items():
            self._settle(request_id)  # the engine may learn that a grammar is compiled before this loop does
            if request_id not in self._open:
                continue
            mistakes = [output.mistake for output in its_outputs if output.mistake is not None]
            if mistakes:
                self._fail(request_id, mistakes[0])
                continue
            try:
                for output in self._texts.process(its_outputs):
                    self._add_deltas(output)
            except Exception as error:  # fails this request alone
                logger.exception("request %s: its output could not be processed", request_id)
                self._fail(request_id, FailedError(f"the output could not be processed: {error!r}"))

    def _on_failed_step(self, error: Exception, before: SchedulerStats) -> None:
        logger.exception("a step failed; %d requests end with it", len(self._open), exc_info=error)
        counts = (before.num_preemptions, before.num_queried_tokens, before.num_hit_tokens)
        a, b, c = (old + new for old, new in zip(self._lost, counts, strict=True))
        self._lost = (a, b, c)
        self._num_failures += 1
        self._failures_in_a_row += 1
        self._fail_all(FailedError, f"a step of the engine failed: {error!r}")
        if isinstance(error, HostLostError):
            self._break(str(error))
        elif self._failures_in_a_row >= self._max_failures:
            self._break(f"{self._failures_in_a_row} steps in a row failed, the last with {error!r}")

    def _break(self, why: str) -> None:
        """The engine runs no more steps."""
        if self._broken is None:
            self._broken, self._has_news = why, True
            logger.error("%s: no more requests are taken", why)
            self._fail_all(FailedError, why)

    def _fail_all(self, kind: type[RequestError], message: str) -> None:
        for request_id in list(self._open):
            self._fail(request_id, kind(message))

    def _add_deltas(self, output: RequestOutput) -> None:
        """Adds a Delta for each sample of a request that has new tokens or has ended."""
        request_id, request = output.request_id, self._open.get(output.request_id)
        if request is None:
            return
        if not request.begun:
            request.begun = True
            self._num_prompt_tokens += request.request.num_prompt_tokens
            self._num_cached_tokens += output.num_cached_tokens or 0
        now = time.monotonic()
        for completion, sent in zip(output.outputs, request.samples, strict=True):
            ended = completion.finish_reason is not None
            if sent.finished or not (ended or len(completion.token_ids) > sent.num_tokens):
                continue
            delta = Delta(
                request_id,
                completion.index,
                completion.text[sent.num_characters :],
                completion.token_ids[sent.num_tokens :],
                None if completion.logprobs is None else completion.logprobs[sent.num_tokens :],
                completion.finish_reason,
                completion.stop_reason,
                output.num_cached_tokens or 0,
                None if sent.num_tokens else output.prompt_logprobs,
            )
            delta.gap = None if sent.time is None else now - sent.time
            delta.weight_versions = completion.weight_versions
            sent.num_characters, sent.num_tokens, sent.finished = len(completion.text), len(completion.token_ids), ended
            sent.time = now
            self._events.append(delta)
            if output.finished and all(s.finished for s in request.samples):
                lengths = [s.num_tokens for s in request.samples]
                delta.last = True
                prompt, cached = request.request.num_prompt_tokens, output.num_cached_tokens or 0
                delta.totals = RequestTotals(
                    prompt, sum(lengths), len(lengths), request.max_tokens, output.metrics, max(lengths), cached, request.trace
                )
                delta.stored_prefix = request.request.stored_prefix if request.request.keeps_prompt else None
                del self._open[request_id]

    def _hand_over(self) -> None:
        if self._events or self._step_seconds is not None or self._has_news:
            self._deliver(Report(self._events, self.stats()))
            self._events, self._step_seconds, self._has_news = [], None, False

    # -- calls

    def _answer(self, call: Call) -> None:
        """Carries out a call and replies. New weights are read on another thread first, and the reply comes after that."""
        if call.method == "update_weights_from_path" and self._loading is None:
            self._loading = threading.Thread(target=self._load, args=(call,), name="jaxserve-loader", daemon=True)
            self._loading.start()
        else:
            self._events.append(self._reply(call, partial(self._call, call)))

    def _call(self, call: Call) -> Any:
        if call.method not in CALLS:
            raise ValueError(f"method={call.method!r} must be one of {', '.join(CALLS)}")
        return getattr(self, f"_{call.method}")(**call.arguments)

    def _reply(self, call: Call, work: Callable[[], Any]) -> Reply:
        try:
            return Reply(call.call_id, work())
        except Exception as error:
            if self._open and not self.engine.has_unfinished_requests():  # the failed call has ended every request
                self._fail_all(FailedError, f"{call.method} failed: {error!r}")
            return Reply(call.call_id, error=error)

    def _pause(self, abort: bool = False) -> None:
        """abort: the requests under way end as in `_end`."""
        self._paused = True
        self._end(list(self._open) if abort else [])
        while abort and self.engine.has_unfinished_requests():  # steps in flight, whose outputs nobody waits for
            self._step()

    def _end(self, request_ids: list[str]) -> int:
        """Ends those of the requests that are open with what they have, as if each had reached its end. Returns how many."""
        found = [request_id for request_id in request_ids if request_id in self._open]
        for request_id in found:
            self._events += [Accepted(request_id)] if request_id in self._compiling else []
            samples = self._open[request_id].samples
            running = [i for i, sent in enumerate(samples) if not sent.finished]
            requests = self._open[request_id].request.samples or [self._open[request_id].request]
            for i in running:
                spans = WeightVersionSpan.of(requests[i].weight_starts, samples[i].num_tokens)
                end = Delta(request_id, i, "", [], finish_reason="abort", last=i == running[-1], weight_versions=spans)
                self._events.append(end)
            self._abort([request_id])
        return len(found)

    def _resume(self) -> None:
        self._paused = False

    def _reset_prefix_cache(self, reset_external: bool = False) -> bool:
        return self.engine.reset_prefix_cache(reset_external)

    def _update_weights_from_path(self, path: str, **_: Any) -> None:
        raise RuntimeError(f"{path} is not read: other weights are being loaded; wait until that has ended")

    def _load(self, call: Call) -> None:
        """Reads the weights that a call names, on a thread of its own while steps run."""
        try:
            loaded = Loaded(call, self.engine.read_weights(call.arguments["path"]))
        except Exception as error:
            loaded = Loaded(call, error=error)
        self.send(loaded)

    def _update_weights(self, loaded: Loaded) -> str:
        if loaded.error is not None:
            raise loaded.error
        self.engine.update_params(loaded.module, loaded.call.arguments["in_flight"], loaded.call.arguments["weight_version"])
        return self.engine.weight_version

    def _update_weight_version(self, new_version: str) -> None:
        self.engine.update_weight_version(new_version)

    def _sleep(self, level: int) -> None:
        self.engine.sleep(level)
        self._sleep_level = max(self._sleep_level, level)  # weights that are gone do not come back by a lower one

    def _wake_up(self, tags: Sequence[str] | None) -> bool:
        self.engine.wake_up(tags)
        if not self.engine.is_asleep:
            self._sleep_level = 0
        return not self.engine.is_asleep

    def stats(self) -> LoopStats:
        """The present counts. Call it on the engine's thread, or before that starts."""
        engine, scheduler, compiles = self.engine, self.engine.scheduler.stats(), compile_counts()
        stats, pools, (preemptions, queries, hits) = engine.stats, engine.pools, self._lost
        return LoopStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_held=scheduler.num_held,
            num_pages=sum(pool.num_pages for pool in pools),
            num_free_pages=sum(pool.num_free_pages for pool in pools),
            num_steps=stats.num_steps,
            prompt_tokens=self._num_prompt_tokens,
            prompt_tokens_cached=self._num_cached_tokens,
            prefill_tokens=stats.prefill_tokens,
            generated_tokens=stats.generated_tokens,
            tokens_run=stats.padding.tokens,
            padding_tokens=stats.padding.padded_tokens,
            steps_by_bucket={str(bucket): n for bucket, n in stats.padding.steps.items()},
            num_preemptions=preemptions + scheduler.num_preemptions,
            num_prefix_queries=queries + scheduler.num_queried_tokens,
            num_prefix_hits=hits + scheduler.num_hit_tokens,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(stats.num_accepted_tokens_per_pos),
            num_compiles=compiles.programs,
            num_programs_left=engine.num_programs_left,
            compile_seconds=compiles.seconds,
            kv_store=deepcopy(stats.kv_store),  # its store's thread goes on counting
            num_failures=self._num_failures,
            num_weight_updates=stats.num_weight_updates,
            weight_version=engine.weight_version,
            step_seconds=self._step_seconds,
            is_paused=self._paused,
            is_asleep=engine.is_asleep,
            sleep_level=self._sleep_level,
            broken=self._broken,
        )


def _as_refusal(error: Exception) -> Exception:
    """The error to refuse a request with, for an `error` that adding it raised."""
    if isinstance(error, CompilerBusyError):
        return QueueFullError(str(error), retry_after=1)
    if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):  # asleep, or without weights
        return UnavailableError(str(error))
    return error
