"""What a step's tokens are to the requests that they belong to: EngineOutputs. Changes neither requests nor scheduler."""

from __future__ import annotations

import time

from jaxserve.engine.stats import logprobs_of
from jaxserve.request import EngineOutput
from jaxserve.sampling.rows import SampledRows
from jaxserve.scheduling.schedule import Schedule, StepResult


def outputs_of(schedule: Schedule, result: StepResult, sampled: SampledRows | None) -> list[EngineOutput]:
    """An output for each request of the result, with its tokens, log-probabilities if it asked for them, and finish_reason if it
    has finished. The time of a request's first token is recorded."""
    outputs = _gather(schedule, result)
    now = time.monotonic()
    for output in outputs:
        metrics = output.request.metrics
        if metrics is not None and metrics.first_token_time is None:
            metrics.first_token_time = now
    if sampled is not None and sampled.logprobs is not None:
        _add_logprobs(outputs, schedule, sampled)
    if result.finished:
        last = {id(output.request): output for output in outputs}
        for request in result.finished:
            output = last[id(request)]
            output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
    return outputs


def _gather(schedule: Schedule, result: StepResult) -> list[EngineOutput]:
    """The tokens by request. With drafts a request may have several, one after the other."""
    outputs: list[EngineOutput] = []
    for request, token in zip(result.requests, result.tokens, strict=True):
        if schedule.num_drafts and outputs and outputs[-1].request is request:
            outputs[-1].new_token_ids.append(token)
        else:
            outputs.append(EngineOutput(request, [token]))
    return outputs


def _add_logprobs(outputs: list[EngineOutput], schedule: Schedule, sampled: SampledRows) -> None:
    first_row = {id(request): row for request, row in schedule.logits_rows.by_request(schedule)}
    for output in outputs:
        params = output.request.params
        if params.returns_logprobs:
            row = first_row[id(output.request)]
            output.logprobs = [logprobs_of(sampled, row + j, params) for j in range(len(output.new_token_ids))]
