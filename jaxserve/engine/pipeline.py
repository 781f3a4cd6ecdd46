"""Steps on their way: from a schedule over the device to the outputs of its requests.

Owns the steps in flight, in the order in which they were dispatched, and the outputs that nobody has taken yet.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.batching.layout import StepInputs
from jaxserve.batching.packer import BatchPacker
from jaxserve.engine.demand_log import DemandWriter
from jaxserve.engine.grammar_following import GrammarFollower
from jaxserve.engine.live_requests import LiveRequests
from jaxserve.engine.stats import EngineStats, tokens_of
from jaxserve.engine.step_outputs import outputs_of
from jaxserve.engine.stored_pages import IDLE_WAIT, StoredPages
from jaxserve.execution.leading_runner import AnyRunner
from jaxserve.execution.programs import RestBody, RestHead
from jaxserve.execution.runner import StepHandle
from jaxserve.execution.stage_clock import StageClock
from jaxserve.request import EngineOutput, Request
from jaxserve.sampling.prompt_scores import ScoreSpan, deliver, pack_spans, spans_of
from jaxserve.sampling.rows import SampledRows
from jaxserve.scheduling.schedule import Schedule
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.speculative.draft_lengths import DraftLengths, DraftOutcomes
from jaxserve.speculative.suffix import SuffixDrafts

logger: logging.Logger = logging.getLogger("jaxserve")

GRAMMAR_WAIT = 0.02  # seconds that an idle step waits for a grammar to be compiled


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was dispatched and has not been fetched."""

    schedule: Schedule
    score_spans: list[ScoreSpan]  # of prompts, that it scores
    dispatched_at: float  # seconds of time.monotonic
    handle: StepHandle
    proposes: bool = True  # as StepInputs'


@dataclass
class StepPipeline:
    """Runs the steps of one scheduler on one runner, `max_in_flight` at a time between two calls of `step`.

    On a pipeline, where the scheduler hides what is in flight, a step is a micro-batch. `max_in_flight` is one less than there are
    stages then: as many as stages are in flight while `step` waits for the oldest.
    """

    runner: AnyRunner
    scheduler: Scheduler
    packer: BatchPacker
    grammars: GrammarFollower
    requests: LiveRequests
    stats: EngineStats
    draft_lengths: DraftLengths | None
    demand_log: DemandWriter | None
    max_in_flight: int
    clock: StageClock | None = None  # of a pipeline
    stored: StoredPages | None = None  # None: there is no store of KV
    host_drafts: SuffixDrafts | None = None  # None: the device drafts, or nobody. Steps must not overlap with it

    def __post_init__(self) -> None:
        self.in_flight: deque[StepInFlight] = deque()
        self.undelivered: list[EngineOutput] = []
        self._last_done = 0.0  # of time.monotonic

    def step(self, *, paused: bool) -> list[EngineOutput]:
        """Dispatches the next step, if there is one, and returns what has come back."""
        self._poll_grammars(0.0)
        if self.stored is not None:
            self.stored.poll()
        schedule = None if paused else self.scheduler.schedule()
        if schedule is None:
            return self._finish_all()
        inputs, spans = self._pack(schedule)
        dispatched_at = time.monotonic()
        body = self.runner.dispatch_body(inputs)
        masks = None
        if inputs.head_rows and self.grammars.constrains(schedule):
            if not self.scheduler.hides_in_flight:  # else the tokens before are here, of those whom this step holds
                self.collect(in_hand=schedule)  # masks follow from all tokens before; this delays the head alone
            masks = self.grammars.masks(schedule, None if self.draft_lengths is None else self.draft_lengths.proposed)
        handle = self.runner.dispatch_head(body, masks)
        if self.clock is not None:
            self.clock.watch(handle.stages, dispatched_at, schedule.num_tokens > schedule.num_decodes)
        if self.stored is not None:
            self.stored.save()
        self.in_flight.append(StepInFlight(schedule, spans, dispatched_at, handle, inputs.proposes))
        self.collect(keep=self.max_in_flight)
        return self._deliver()

    def _finish_all(self) -> list[EngineOutput]:
        """A step without a schedule: nothing new starts. On a pipeline the requests of the oldest micro-batch can be scheduled
        again when it is back, so that no other is waited for."""
        if not self.in_flight:
            self._poll_grammars(GRAMMAR_WAIT)
            if self.stored is not None and self.stored.is_awaited:
                self.stored.poll(IDLE_WAIT)
        self.collect(keep=max(0, len(self.in_flight) - 1))
        if self.stored is not None:
            self.stored.save(rest=True)
        return self._deliver()

    def collect(self, *, keep: int = 0, in_hand: Schedule | None = None) -> None:
        """Waits for steps in flight, the oldest first, until `keep` of them are left. in_hand: as `GrammarFollower.follow`."""
        while len(self.in_flight) > keep:
            self.undelivered += self._finish(self.in_flight.popleft(), in_hand)

    def _deliver(self) -> list[EngineOutput]:
        outputs, self.undelivered = self.undelivered, []
        if self.stored is not None and self.stored.is_keeping:
            outputs, self.undelivered = self.stored.hold_back(outputs)
        return outputs

    def drop_outputs(self, unwanted: Callable[[Request], bool]) -> None:
        """Outputs of these requests that nobody has taken are not delivered."""
        self.undelivered = [o for o in self.undelivered if not unwanted(o.request)]

    def _poll_grammars(self, timeout: float) -> None:
        if self.grammars:
            self.undelivered += self.grammars.poll(timeout)

    # -- before the device

    def _pack(self, schedule: Schedule) -> tuple[StepInputs, list[ScoreSpan]]:
        for request in self.packer.newcomers(schedule):
            if request.metrics is not None and request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = time.monotonic()
        inputs = self.packer.pack(schedule)
        spans = spans_of(schedule, inputs.token_starts)
        if spans:
            inputs.score_spans.extend(pack_spans(spans, self.runner.score_rows))
        if self.draft_lengths is not None and not self.draft_lengths.proposes:
            can_rest = not (inputs.with_logprobs or schedule.num_drafts) and self.runner.programs.has(RestHead(inputs.head_rows))
            is_read = self.draft_lengths.follows or not can_rest or not self.runner.programs.has(RestBody(inputs.bucket))
            inputs = replace(inputs, proposes=not can_rest, is_read=is_read)
        self.stats.add_step(schedule, inputs, speculates=self.draft_lengths is not None)
        if self.demand_log is not None:
            self.demand_log.write(self.stats.num_steps, schedule, inputs, self.scheduler.num_waiting)
        return inputs, spans

    # -- behind it

    def _finish(self, step: StepInFlight, in_hand: Schedule | None) -> list[EngineOutput]:
        """Waits for a step and takes in what it brought."""
        schedule = step.schedule
        if step.score_spans:
            deliver(step.score_spans, self.runner.fetch_scores(step.handle))
        sampled = self.runner.fetch(step.handle)
        if self.stored is not None:
            self._take_pace(step, self.stored)
        tokens, counts = tokens_of(schedule, sampled)
        draft_outcomes = self._learn_drafts(step, sampled, tokens, counts)
        outputs: list[EngineOutput] = []
        if sampled is not None:
            self.stats.sorted_rows += int(sampled.by_sort.sum())
            if sampled.bad_logits.any():
                outputs += self._fail_bad_rows(schedule, sampled)
        result = self.scheduler.update(schedule, tokens, counts)
        self.stats.generated_tokens += len(result.requests)
        if self.host_drafts is not None and self.draft_lengths is not None:
            self.host_drafts.propose(schedule, self.scheduler.rows, tokens, counts, self.draft_lengths.proposed)
        if draft_outcomes is not None:
            any_ended = bool(result.finished or outputs)  # these by bad rows
            self.stats.add_drafts(schedule, draft_outcomes, result, any_ended=any_ended)
        brought = outputs_of(schedule, result, sampled)
        if result.finished:
            self._end_finished(brought)
        outputs += brought
        return outputs + self.grammars.follow(outputs, in_hand) if self.grammars else outputs

    def _take_pace(self, step: StepInFlight, stored: StoredPages) -> None:
        """What a prompt's tokens cost to compute, from steps that held more of those than decodes. A step runs from when it was
        dispatched, or from when the one before it was done."""
        begun, now = max(step.dispatched_at, self._last_done), time.monotonic()
        self._last_done = now
        num_tokens = step.schedule.num_tokens
        stored.ran(num_tokens, now - begun, of_prompts=num_tokens > 2 * step.schedule.num_decodes)

    def _learn_drafts(
        self, step: StepInFlight, sampled: SampledRows | None, tokens: np.ndarray, counts: np.ndarray | None
    ) -> DraftOutcomes | None:
        """Which drafts of the step stood; none where speculation is off."""
        if self.draft_lengths is None:
            return None
        self.draft_lengths.take_time(step.schedule, step.dispatched_at, time.monotonic(), step.proposes)
        if sampled is None:
            return None
        undisturbed = self.scheduler.is_undisturbed(step.schedule)
        return self.draft_lengths.take_tokens(step.schedule, tokens, counts, sampled.drafts, undisturbed)

    def _end_finished(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if output.finished:
                self.grammars.settle_reason(output)
                self.requests.end(output.request)
                if self.stored is not None:
                    self.stored.end(output.request)

    def _fail_bad_rows(self, schedule: Schedule, sampled: SampledRows) -> list[EngineOutput]:
        """Requests whose logits are not numbers, or whose parameters forbid every token, end with finish_reason "error"; the others
        go on."""
        outputs = []
        for request, row in schedule.logits_rows.by_request(schedule):  # a bad row behind a draft only refused it
            if request.finished or not sampled.bad_logits[row]:
                continue
            mistake = self.grammars.why_nothing(request)
            message = str(mistake) if mistake is not None else self._bad_logits(request)
            self.scheduler.finish(request, "error", message)
            outputs.append(EngineOutput(request, [], finish_reason="error", stop_reason=message, mistake=mistake))
            self.requests.end(request)
        return outputs

    def _bad_logits(self, request: Request) -> str:
        """What is said of a request whose logits are not numbers. Its pages are nobody else's."""
        self.stats.bad_rows += 1
        message = (
            f"the model's logits are NaN or infinite after {len(request.token_ids)} tokens; check the weights, or use a wider dtype"
        )
        logger.error("request %s: %s", request.request_id, message)
        if self.stored is not None:
            self.stored.forget(request.hash_chain[1:])
        return message
