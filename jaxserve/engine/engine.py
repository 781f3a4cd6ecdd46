"""Token ids in, token ids out: the loop of schedule, pack, dispatch, fetch, update.

Owns the requests' lives from add_request to the last EngineOutput, and the pipeline of steps in flight. Knows nothing of text.
Not thread-safe: one thread calls it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxserve.batching.layout import StepInputs
from jaxserve.batching.packer import BatchPacker
from jaxserve.config import EngineConfig
from jaxserve.engine.admission import check_ids, check_kinds, check_order
from jaxserve.engine.resolution import resolve, step_budget
from jaxserve.engine.stats import EngineStats, logprobs_of, tokens_of
from jaxserve.execution.compilation import compile_counts, use_persistent_cache
from jaxserve.execution.programs import Programs
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.execution.runner import Runner, StepHandle
from jaxserve.execution.step import ModelFunctions
from jaxserve.models import Decoder
from jaxserve.models.adoption import fit, placed
from jaxserve.outputs import Logprob, RequestMetrics
from jaxserve.request import EngineOutput, Request, RequestStatus
from jaxserve.sampling.edit_rows import kinds_of
from jaxserve.sampling.prompt_scores import ScoreSpan, deliver, pack_spans, scores_of, spans_of
from jaxserve.sampling.rows import SampledRows
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.demand import COLUMNS, step_demand
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.schedule import Schedule, StepResult
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.speculative.draft_lengths import DraftLengths, DraftOutcome
from jaxserve.structured.constraints import Constraints
from jaxserve.structured.grammars import Grammar

logger: logging.Logger = logging.getLogger("jaxserve")

IN_FLIGHT = ("refuse", "recompute", "keep")  # what becomes of requests that have begun when the weights change
GRAMMAR_WAIT = 0.02  # seconds that an idle step waits for a grammar to be compiled


class Engine:
    """vLLM's engine interface on a JAX model: add_request, step, abort, has_unfinished_requests.

    Args:
      model: a `jaxserve.models.Decoder` with its weights in place; its arrays are used as they are, not copied.
      config: what to build; None fields are decided from the model and the device.
      eos_token_ids: ids that end a request unless it says ignore_eos.

    Raises:
      ValueError: a limit that can't be met (pool too small for a request of max_model_len, a bucket plan too small, ...).
    """

    def __init__(self, model: Decoder, config: EngineConfig | None = None, *, eos_token_ids: Iterable[int] | None = None):
        config = config or EngineConfig()
        use_persistent_cache(config.compilation_cache_dir)
        compile_counts()  # from here on they are counted
        functions = ModelFunctions(model, config.moe_backend)
        self.config: ResolvedConfig = resolve(functions, config)
        programs = Programs(functions, self.config)
        if config.warm_up == "all":  # from shapes, before the pool takes the memory that compiling may need
            for key in programs.keys:
                programs.get(key)
        self.runner: Runner = Runner(programs)
        self.is_paused: bool = False
        self.is_asleep: bool = False
        self.eos_token_ids: frozenset[int] = frozenset(self.config.model.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._step_budget = step_budget(self.config)
        self._make_host_state()
        self.stats: EngineStats = EngineStats()
        self._groups: dict[str, list[Request]] = {}  # request id -> its samples
        self._in_flight: deque[tuple[Schedule, list[ScoreSpan], float, StepHandle]] = deque()  # the third: when it was dispatched
        self._in_hand: Schedule | None = None  # a step whose head waits for masks
        self._undelivered: list[EngineOutput] = []
        self._constraints = Constraints(self.config.model.vocab_size, self.config.plan.max_head_rows)
        self._numbers = itertools.count()
        self._demand_log = open(config.demand_log, "a", buffering=1) if config.demand_log else None
        logger.info("%s", self.describe())
        if config.warm_up == "all":
            self.runner.warm_up()

    def _make_host_state(self) -> None:
        cache, limits = self.config.cache, self.config.scheduler
        self.pool: PagePool = PagePool(cache.num_pages, cache.page_size, cache.enable_prefix_caching)
        plan, speculative, programs = self.config.plan, self.config.speculative, self.runner.programs
        self._draft_lengths: DraftLengths | None = None
        if speculative is not None:
            self._draft_lengths = DraftLengths(
                plan,
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                speculative.num_speculative_tokens,
                speculative.adaptive,
            )
        self.scheduler: Scheduler = Scheduler(limits, self.pool, self._step_budget, self._draft_lengths)
        self.packer: BatchPacker = BatchPacker(
            plan, programs.layouts, limits.max_num_seqs, programs.edit_layout, keeps_history=speculative is not None
        )

    # -- requests in

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival: float | None = None,
        grammar: Future[Grammar] | None = None,
        score_from: int | None = None,
        stops_at_text: bool = False,
    ) -> list[Request]:
        """Queues a request: one `Request` for each of its `params.n` samples, with ids `request_id`, or `request_id/i` for n > 1.

        score_from: gathers the log-probabilities of the prompt's tokens from this position on, 1 at least, in the first sample's
          `prompt_scores`; those before it may come from the prefix cache.
        grammar: what the output must be, as `GrammarCompiler.submit` returns it. While it compiles the request waits, and nobody
          with it; if it can't be, the request ends with finish_reason "error".
        stops_at_text: whoever calls makes texts of the output, and calls `finish` where one holds a string of `params.stop`.

        Raises:
          ValueError: an empty or too long prompt, an id out of the vocabulary, a duplicate request id, a priority that is no
            integer or that nobody asks for, an `arrival` that is no finite number, `params.stop` where nobody stops at it, or more
            KV than the pool can ever hold. Nothing is queued then and no other request is touched.
          TypeError: a request id, params, score_from or grammar of another kind.
          RuntimeError: the engine is asleep or has no weights.
        """
        self._check_awake()
        params = SamplingParams() if params is None else params
        check_kinds(request_id, params, score_from, grammar)
        arrival = time.monotonic() if arrival is None else arrival
        requests = self._samples(request_id, prompt_token_ids, params, arrival, priority, cache_salt, stops_at_text)
        if params.structured_outputs is not None and grammar is None:
            raise ValueError(f"structured_outputs={params.structured_outputs} needs a tokenizer: use LLM, or give its grammar")
        if score_from is not None and not 1 <= score_from <= len(prompt_token_ids):
            raise ValueError(f"{score_from=} must be in [1, {len(prompt_token_ids)}], the prompt's length")
        seed = self._seed_of(next(self._numbers)) if params.seed is None else params.seed
        self._groups[request_id] = requests  # first, so that `abort` finds what an interrupt leaves half added
        for request in requests:
            request.seed = seed
            request.prompt_scores = scores_of(request, score_from)
            if grammar is not None:
                request.status = RequestStatus.WAITING_FOR_GRAMMAR
                self._constraints.add(request, grammar)
            self.scheduler.add(request)
        return requests

    def _samples(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        arrival: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        stops_at_text: bool = False,
    ) -> list[Request]:
        """The samples of a request, checked. ValueError as `add_request`; nothing is changed."""
        if request_id in self._groups:
            raise ValueError(f"request id {request_id!r} is already in use; give each request its own")
        check_ids(prompt_token_ids, params, self.config.model.vocab_size, self.eos_token_ids)
        check_order(priority, arrival)
        if params.stop and not stops_at_text:
            raise ValueError(f"stop={params.stop!r} is text: use LLM or AsyncLLM, which stop at it, or stop_token_ids")
        if priority and self.config.scheduler.order != "priority":
            raise ValueError(f"priority={priority} means nothing here: make the engine with scheduling_policy='priority'")
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{i}",
                prompt_token_ids=[int(t) for t in prompt_token_ids],
                params=params,
                eos_token_ids=self.eos_token_ids,
                arrival=arrival,
                priority=int(priority),  # the queue negates it, which an unsigned integer would not survive
                cache_salt=cache_salt,
                sample_index=i,
                weights_version=self.runner.weights_version,
                parent_id=request_id,
                metrics=RequestMetrics(arrival_time=arrival),
            )
            for i in range(params.n)
        ]
        for request in requests:
            self.scheduler.check(request)
            request.samples = requests if params.n > 1 else ()
        return requests

    def check_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        stops_at_text: bool = False,
    ) -> None:
        """ValueError, or TypeError, if `add_request` would refuse this; changes nothing."""
        check_kinds(request_id, params)
        self._samples(request_id, prompt_token_ids, params, priority=priority, stops_at_text=stops_at_text)

    def _seed_of(self, number: int) -> int:
        return int(np.random.SeedSequence((self.config.engine.seed % 2**64, number)).generate_state(1, np.uint64)[0])

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends these requests at once and frees their pages; unknown or finished ids do no harm. No output follows."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            group = self._groups.pop(request_id, ())
            self.scheduler.abort([r.request_id for r in group])
            for request in group:
                self._record_finish(request)
        gone = set(ids)
        self._undelivered = [o for o in self._undelivered if o.request.parent_id not in gone]

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends one sample for a reason the engine can't see, such as a stop string in its text. No output follows."""
        if not request.finished:
            self.scheduler.finish(request, reason, stop_reason)
            self._forget(request)
            self._undelivered = [o for o in self._undelivered if o.request is not request]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to run or to deliver."""
        return bool(self._groups) or bool(self._in_flight) or bool(self._undelivered)

    def describe(self) -> str:
        """What was decided, for the log: the attention's backend, pool, limits, plan."""
        c = self.config
        return (
            f"attention: {c.attention_backend}; "
            f"KV pool: {c.cache.num_pages} pages of {c.cache.page_size} tokens ({c.pool_bytes / 2**20:.0f} MiB); "
            f"steps of up to {c.scheduler.max_num_batched_tokens} tokens and {c.scheduler.max_num_seqs} sequences, "
            f"requests of up to {c.scheduler.max_model_len} tokens; buckets: {c.plan}"
        )

    # -- the step

    def step(self) -> list[EngineOutput]:
        """Schedules and dispatches a step, and returns what an earlier one brought (one step late, so that the device never waits
        for the host; the first call of a busy spell may return nothing).

        While the engine is paused nothing new starts: what was in flight is delivered, then nothing. An exception on the way,
        Ctrl-C too, ends every request as aborted and passes on; the engine stays usable. One such is the RuntimeError where the
        weights' buffers are gone, because the trainer that shares them donated them.
        """
        with self._whole_or_nothing():
            return self._step()

    def drain(self) -> None:
        """Waits for the steps in flight; what they bring is delivered by the next `step`. Exceptions as in `step`."""
        with self._whole_or_nothing():
            while self._in_flight:
                self._undelivered += self._finish_step(*self._in_flight.popleft())

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """A step that breaks off leaves pages hashed that were never written, page-table entries that were never sent, and donated
        buffers gone. Nothing of that is worth mending: host and device begin anew, the cached prefixes forgotten."""
        try:
            yield
        except BaseException as error:
            for request in (r for group in self._groups.values() for r in group if not r.finished):
                request.status, request.finish_reason, request.rows, request.row = RequestStatus.FINISHED, "abort", None, -1
                self._record_finish(request)
            self._groups.clear()
            self._in_flight.clear()
            self._in_hand = None
            self._undelivered.clear()
            self._constraints.clear()
            self._make_host_state()
            self.runner.reset()
            num_deleted = self.runner.num_deleted_weights()
            if num_deleted and isinstance(error, Exception):
                raise RuntimeError(
                    f"{num_deleted} of the weights were deleted since they were given, donated by the trainer that shares them: "
                    "call update_params with the current ones before the next step"
                ) from error
            raise

    def _step(self) -> list[EngineOutput]:
        if self._constraints:
            self._poll_grammars(0.0)
        schedule = None if self.is_paused else self.scheduler.schedule()
        if schedule is not None:
            inputs, spans = self._pack(schedule)
            constrained = bool(self._constraints) and self._constraints.constrains(schedule)
            begun = time.monotonic()
            handle = self.runner.dispatch(inputs, functools.partial(self._masks, schedule) if constrained else None)
            self._in_flight.append((schedule, spans, begun, handle))
        elif self._constraints and not self._in_flight:
            self._poll_grammars(GRAMMAR_WAIT)
        depth = 1 if schedule is not None and self.config.engine.async_scheduling else 0
        outputs, self._undelivered = self._undelivered, []
        while len(self._in_flight) > depth:
            outputs += self._finish_step(*self._in_flight.popleft())
        return outputs

    def _masks(self, schedule: Schedule) -> np.ndarray:
        """Called between body and head of `schedule`: a mask follows from the tokens sampled before."""
        self._in_hand = schedule
        while self._in_flight:
            self._undelivered += self._finish_step(*self._in_flight.popleft())
        self._in_hand = None
        return self._constraints.masks(schedule, None if self._draft_lengths is None else self._draft_lengths.proposed)

    def _poll_grammars(self, timeout: float) -> None:
        ready, failed = self._constraints.poll(timeout)
        for request in ready:
            self.scheduler.set_ready(request)
        for request, message in failed:
            self.scheduler.finish(request, "error", message)
            self._forget(request)
            self._undelivered.append(EngineOutput(request, [], finish_reason="error", stop_reason=message))

    def _follow_grammars(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Takes what was sampled into the grammars. A request whose grammar has ended ends too; tokens that must follow are output
        at once, to be computed together."""
        forced = []
        drafts = {} if self._in_hand is None else {request: q_len - 1 for request, _, q_len in self._in_hand.decodes()}
        for output in outputs:
            request = output.request
            if request not in self._constraints:
                continue  # it has none, or has finished
            last, state = output, self._constraints.advance(request, output.new_token_ids)
            if len(state.forced) > 1:
                taken = self.scheduler.append_forced(request, state.forced, num_cut=drafts.get(request, 0))
                if taken.tokens:
                    self.packer.resend_edits(request)
                    certain = None if request.params.logprobs is None else [{token: Logprob(0.0, 1)} for token in taken.tokens]
                    last = EngineOutput(request, taken.tokens, certain, request.finish_reason, request.stop_reason)
                    forced.append(last)
                    self.stats.generated_tokens += len(taken.tokens)
                    if request.finished:
                        self._settle_reason(last)
                        self._forget(request)
                        continue
                    state = self._constraints.advance(request, taken.tokens)
            if state.error:
                message = f"structured_outputs: the grammar broke off after {request.num_output_tokens} tokens: {state.error}"
                self.scheduler.finish(request, "error", message)
                last.finish_reason, last.stop_reason = "error", message
                self._forget(request)
            elif state.ended:
                self.scheduler.finish(request, "stop")
                last.finish_reason = "stop"
                self._forget(request)
        return forced

    def _settle_reason(self, output: EngineOutput) -> None:
        """An output that reaches its length with the token that ends its grammar is whole: it has stopped."""
        request = output.request
        if output.finish_reason == "length" and request in self._constraints:
            if self._constraints.advance(request, output.new_token_ids).ended:
                request.finish_reason = output.finish_reason = "stop"

    def _pack(self, schedule: Schedule) -> tuple[StepInputs, list[ScoreSpan]]:
        for request in self.packer.newcomers(schedule):
            if request.metrics is not None and request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = time.monotonic()
        inputs = self.packer.pack(schedule)
        spans = spans_of(schedule)
        if spans:
            inputs.score_rows.extend(pack_spans(spans, self.runner.score_rows))
        self.stats.num_steps += 1
        self.stats.padding.add(inputs.bucket, inputs.num_tokens, inputs.head_rows, inputs.num_samples)
        self.stats.prefill_tokens += schedule.num_tokens - schedule.num_decodes - schedule.num_drafts
        if self._draft_lengths is not None and schedule.num_decodes:
            self.stats.steps_by_num_drafts[int(schedule.q_lens[: schedule.num_decodes].max()) - 1] += 1
        if self._demand_log is not None:
            self._log_demand(schedule, inputs)
        return inputs, spans

    def _finish_step(self, schedule: Schedule, spans: list[ScoreSpan], begun: float, handle: StepHandle) -> list[EngineOutput]:
        if spans:
            deliver(spans, self.runner.fetch_scores(handle))
        sampled = self.runner.fetch(handle)
        outputs: list[EngineOutput] = []
        tokens, counts = tokens_of(schedule, sampled)
        outcomes: list[DraftOutcome] = []
        if self._draft_lengths is not None:
            self._draft_lengths.take_time(schedule, begun, time.monotonic())
            if sampled is not None:
                outcomes = self._draft_lengths.take_tokens(schedule, tokens, counts, sampled.drafts, schedule.logits_rows.firsts)
        if sampled is not None:
            self.stats.sorted_rows += int(sampled.by_sort.sum())
            if sampled.bad_logits.any():
                outputs += self._fail_bad_rows(schedule, sampled)
        result = self.scheduler.update(schedule, tokens, counts)
        self.stats.generated_tokens += len(result.requests)
        if outcomes:
            self.stats.add_drafts(schedule, outcomes, result)
        outputs += self._outputs(schedule, result, sampled)
        return outputs + self._follow_grammars(outputs) if self._constraints else outputs

    def _outputs(self, schedule: Schedule, result: StepResult, sampled: SampledRows | None) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        for request, token in zip(result.requests, result.tokens, strict=True):
            if schedule.num_drafts and outputs and outputs[-1].request is request:
                outputs[-1].new_token_ids.append(token)
            else:
                outputs.append(EngineOutput(request, [token]))
        now = time.monotonic()
        for output in outputs:
            request = output.request
            if request.metrics is not None and request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
        if sampled is not None and sampled.logprobs is not None:
            first_row = {id(request): row for request, row in schedule.logits_rows.by_request(schedule)}
            for output in outputs:
                n = output.request.params.logprobs
                if n is not None:
                    row = first_row[id(output.request)]
                    output.logprobs = [logprobs_of(sampled, row + j, n) for j in range(len(output.new_token_ids))]
        if result.finished:
            last = {id(output.request): output for output in outputs}
            for request in result.finished:
                last[id(request)].finish_reason, last[id(request)].stop_reason = request.finish_reason, request.stop_reason
                self._settle_reason(last[id(request)])
                self._forget(request)
        return outputs

    def _fail_bad_rows(self, schedule: Schedule, sampled: SampledRows) -> list[EngineOutput]:
        """Requests whose logits are not numbers end with finish_reason "error"; the others go on."""
        outputs = []
        for request, row in schedule.logits_rows.by_request(schedule):  # a bad row behind a draft only refused it
            if request.finished or not sampled.bad_logits[row]:
                continue
            self.stats.bad_rows += 1
            message = (
                f"the model's logits are NaN or infinite after {len(request.token_ids)} tokens; "
                "check the weights, or use a wider dtype"
            )
            if kinds_of(request.params) or request.params.min_tokens or request in self._constraints:
                message += ", or allowed_token_ids, bad words, min_tokens and structured_outputs together forbid every token"
            logger.error("request %s: %s", request.request_id, message)
            self.scheduler.finish(request, "error", message)
            outputs.append(EngineOutput(request, [], finish_reason="error", stop_reason=message))
            self._forget(request)
        return outputs

    # -- weights and memory

    def update_params(self, params: Any, in_flight: str = "refuse") -> None:
        """From the next step on the engine runs with these weights; no cached prefix of the old ones is used again.

        Args:
          params: anything that `LLM.from_params` takes, for the model at hand. Arrays of the engine's dtype, in the layout of its
            own `Decoder`, on its device, are used as they are; others are cast, fused, transposed (as an LLM that read its model
            from files on a CPU holds it: `models.transpose_kernels`) or moved, one weight at a time.
          in_flight: what becomes of requests that have begun (those that wait just run with the new weights). "refuse": a
            RuntimeError. "recompute": their tokens so far stand, their KV is made anew. "keep": they go on with the KV they have.

        Nothing is compiled where no conversion is needed, nor for a conversion that was made before. A shared array must stay as it
        is until the next update: a trainer that donates it makes `step` fail with a RuntimeError that says so. May be called while
        the engine is paused or asleep.

        Raises:
          ValueError: leaves are missing, unknown, mis-shaped, of a wrong dtype or deleted; all are listed, and nothing has changed.
          RuntimeError: see in_flight; nothing has changed.
        """
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"{in_flight=} must be one of {', '.join(IN_FLIGHT)}")
        functions = self.runner.programs.functions
        fitted = fit(params, functions.model_config, dict(zip(functions.paths, functions.abstract, strict=True)))
        self.drain()
        num_begun = self.scheduler.num_begun
        if num_begun and in_flight == "refuse":
            raise RuntimeError(
                f"{num_begun} requests are in flight: finish or abort them first, or call update_params with "
                "in_flight='recompute' or 'keep'"
            )
        try:
            self.runner.set_weights(placed(fitted, jax.devices()[0]))
        finally:  # whatever came of it, the old weights' KV is not to be hit
            self.scheduler.change_weights(self.runner.weights_version, recompute=in_flight == "recompute")

    def pause(self) -> None:
        """No new steps until `resume`. Requests may be added and wait; those in flight keep their pages."""
        self.is_paused = True

    def resume(self) -> None:
        """Ends `pause`."""
        self.is_paused = False

    def sleep(self, level: int = 1) -> None:
        """Frees the KV pages until `wake_up`, and the cached prefixes with them; compiled programs stay. As vLLM's:

        level 1: the weights move to the host's memory, and come back with `wake_up`.
        level 2: the engine lets go of its weights; before or after `wake_up`, `update_params` must bring others.

        Where weights are shared with a trainer, level 1 gives the engine a copy of its own: prefer level 2.

        Raises:
          RuntimeError: requests are unfinished.
        """
        if level not in (1, 2):
            raise ValueError(f"{level=} must be 1 (the weights move to the host) or 2 (they are let go)")
        if self.has_unfinished_requests():
            raise RuntimeError(f"{len(self._groups)} requests are unfinished: finish or abort them before sleep()")
        if not self.is_asleep:
            self.pool.reset()
            self.runner.sleep(keep_weights=level == 1)
            self.is_asleep = True

    def wake_up(self) -> None:
        """Ends `sleep`: KV pages as new and, after level 1, the weights on the device."""
        if self.is_asleep:
            self.runner.wake_up()
            self.is_asleep = False

    def check_can_step(self) -> None:
        """RuntimeError, with what to do, where requests could not run now: asleep, without weights, or paused."""
        self._check_awake()
        if self.is_paused:
            raise RuntimeError("the engine is paused: call resume() first")

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise RuntimeError("the engine is asleep: call wake_up() first")
        if not self.runner.has_weights:
            raise RuntimeError("the engine has no weights (sleep(level=2), or a failed update): call update_params() first")

    # -- counts

    def _record_finish(self, request: Request) -> None:
        self._constraints.discard(request)
        metrics = request.metrics
        if metrics is not None and metrics.finished_time is None:
            metrics.finished_time = time.monotonic()
            metrics.num_preemptions = request.num_preemptions

    def _forget(self, request: Request) -> None:
        self._record_finish(request)
        group = self._groups.get(request.parent_id)
        if group is not None and all(r.finished for r in group):
            del self._groups[request.parent_id]

    def _log_demand(self, schedule: Schedule, inputs: StepInputs) -> None:
        assert self._demand_log is not None
        demand = zip(COLUMNS, step_demand(schedule, self.config.cache.page_size), strict=True)
        record = {"step": self.stats.num_steps, **{name: int(value) for name, value in demand}}
        record |= {"bucket": [inputs.bucket.tokens, inputs.bucket.seqs], "waiting": self.scheduler.num_waiting}
        self._demand_log.write(json.dumps(record) + "\n")

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while any request holds pages."""
        return self.pool.reset()

    def close(self) -> None:
        """Ends every request and closes the demand log."""
        self.abort(list(self._groups))
        self.drain()
        self._undelivered.clear()
        if self._demand_log is not None:
            self._demand_log.close()
            self._demand_log = None
