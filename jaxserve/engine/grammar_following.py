"""Keeps constrained requests in step with their grammars: what was sampled goes in, masks and forced tokens come out.

Owns what an engine does about `Constraints`: which requests end by their grammar, and which tokens are output without being
sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from jaxserve.batching.packer import BatchPacker
from jaxserve.engine.live_requests import LiveRequests
from jaxserve.engine.stats import EngineStats
from jaxserve.outputs import Logprob
from jaxserve.request import EngineOutput, Request
from jaxserve.sampling.nothing_allowed import NothingAllowedError
from jaxserve.scheduling.schedule import Schedule
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.structured.constraints import Constraints


class GrammarFollower:
    """Follows the grammars of one engine's requests. False while no request has one."""

    def __init__(
        self, constraints: Constraints, requests: LiveRequests, scheduler: Scheduler, packer: BatchPacker, stats: EngineStats
    ):
        self._constraints = constraints
        self._requests = requests
        self._scheduler = scheduler
        self._packer = packer
        self._stats = stats

    def __bool__(self) -> bool:
        return bool(self._constraints)

    def __contains__(self, request: Request) -> bool:
        return request in self._constraints

    def poll(self, timeout: float) -> list[EngineOutput]:
        """Lets requests whose grammar is compiled by now wait for a row, and ends those whose grammar failed; returns the latter's
        outputs. timeout: seconds to wait for the first of them, if none is done."""
        outputs = []
        ready, failed = self._constraints.poll(timeout)
        for request in ready:
            self._scheduler.set_ready(request)
        for request, message in failed:
            self._scheduler.finish(request, "error", message)
            self._requests.end(request)
            outputs.append(EngineOutput(request, [], finish_reason="error", stop_reason=message))
        return outputs

    def constrains(self, schedule: Schedule) -> bool:
        """Whether a sample of this step needs a mask."""
        return self._constraints.constrains(schedule)

    def masks(self, schedule: Schedule, proposed: np.ndarray | None) -> np.ndarray:
        """As `Constraints.masks`; the outputs of all steps before must have been given to `follow`."""
        return self._constraints.masks(schedule, proposed)

    def why_nothing(self, request: Request) -> NothingAllowedError | None:
        """The error of a request whose parameters and grammar let no token follow its output; None where they do."""
        return self._constraints.why_nothing(request)

    def follow(self, outputs: list[EngineOutput], in_hand: Schedule | None) -> list[EngineOutput]:
        """Takes what a step sampled into the grammars. A request whose grammar has ended ends too, and its output says so. Tokens
        that must follow are output at once, to be computed together: returns these outputs.

        in_hand: the step whose body is dispatched and whose head waits for its masks; its drafts can still be cut.
        """
        forced = []
        num_drafts = {} if in_hand is None else {request: q_len - 1 for request, _, q_len in in_hand.decodes()}
        for output in outputs:
            if output.request in self._constraints:  # else it has no grammar, or has finished
                more = self._follow_one(output, num_drafts)
                if more is not None:
                    forced.append(more)
        return forced

    def _follow_one(self, output: EngineOutput, num_drafts: Mapping[Request, int]) -> EngineOutput | None:
        """Takes one output in; returns that of its forced tokens, if there are any."""
        request, forced = output.request, None
        state = self._constraints.advance(request, output.new_token_ids)
        if len(state.forced) > 1:
            forced = self._output_forced(request, state.forced, num_drafts.get(request, 0))
            if forced is not None:
                if request.finished:
                    self.settle_reason(forced)
                    self._requests.end(request)
                    return forced
                state = self._constraints.advance(request, forced.new_token_ids)
        last = forced or output
        if state.error:
            message = f"structured_outputs: the grammar broke off after {request.num_output_tokens} tokens: {state.error}"
            self._end(last, "error", message)
        elif state.ended:
            self._end(last, "stop")
        return forced

    def _output_forced(self, request: Request, token_ids: list[int], num_cut: int) -> EngineOutput | None:
        """The output of tokens that must follow; None where the scheduler takes none of them."""
        taken = self._scheduler.append_forced(request, token_ids, num_cut=num_cut)
        if not taken.tokens:
            return None
        self._packer.resend_edits(request)
        self._stats.generated_tokens += len(taken.tokens)
        others = {token: Logprob(-math.inf) for token in request.params.logprob_token_ids or ()}  # the form forbids them
        certain = [{token: Logprob(0.0, 1)} | {i: x for i, x in others.items() if i != token} for token in taken.tokens]
        logprobs = certain if request.params.returns_logprobs else None
        return EngineOutput(request, taken.tokens, logprobs, request.finish_reason, request.stop_reason)

    def _end(self, output: EngineOutput, reason: str, message: str | None = None) -> None:
        self._scheduler.finish(output.request, reason, message)
        output.finish_reason, output.stop_reason = reason, message
        self._requests.end(output.request)

    def settle_reason(self, output: EngineOutput) -> None:
        """An output that reaches its length with the token that ends its grammar is whole: it has stopped."""
        request = output.request
        if output.finish_reason == "length" and request in self._constraints:
            if self._constraints.advance(request, output.new_token_ids).ended:
                request.finish_reason = output.finish_reason = "stop"
