"""Engine outputs -> texts: incremental detokenisation, stop strings, and RequestOutputs as users see them.

Owns the text of every sample in flight. Knows nothing of scheduling or devices; it asks the engine to end a sample whose text
holds a stop string.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, WeightVersionSpan
from jaxserve.request import Request
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.request import EngineOutput

Finish = Callable[[Request, str, str], None]  # (request, reason, stop string)


@dataclass(slots=True)
class _SampleText:
    """One sample's text so far."""

    request: Request
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    num_held: int  # characters at the end of an unfinished text that may yet become part of a stop string
    text: str = ""  # all that was detokenised; completion.text leaves out the characters held


@dataclass(slots=True)
class _Group:
    output: RequestOutput
    samples: list[_SampleText] = field(default_factory=list)  # by sample index


class TextOutputs:
    """Collects what the engine's steps bring into RequestOutputs.

    tokenizer: None leaves every text empty. finish: called for a sample whose text holds one of its stop strings.
    """

    def __init__(self, tokenizer: Tokenizer | None, finish: Finish):
        self._tokenizer, self._finish = tokenizer, finish
        self._groups: dict[str, _Group] = {}
        self._text_of: Callable[[int], str] | None = None  # of a token; log-probabilities tell the same ones again and again
        if tokenizer is not None:
            self._text_of = functools.lru_cache(16_384)(lambda i: tokenizer.decode([i], skip_special_tokens=False))

    def add(self, requests: list[Request], prompt: str | None) -> None:
        """The samples of one request, as `Engine.add_request` returned them."""
        first = requests[0]
        group = _Group(RequestOutput(first.parent_id, prompt, list(first.prompt_token_ids), [], False, metrics=first.metrics))
        group.output.prompt_scores = first.prompt_scores
        for request in requests:
            params = request.params
            completion = CompletionOutput(request.sample_index, "", [])
            if params.returns_logprobs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            detokenizer = None
            if self._tokenizer is not None and params.detokenize:
                detokenizer = IncrementalDetokenizer(self._tokenizer, request.prompt_token_ids, params.skip_special_tokens)
            num_held = 0 if params.include_stop_str_in_output else max((len(s) for s in params.stop or ()), default=1) - 1
            group.samples.append(_SampleText(request, completion, detokenizer, num_held))
            group.output.outputs.append(completion)
        self._groups[first.parent_id] = group

    def discard(self, request_ids: Iterable[str]) -> None:
        """Forgets requests that were aborted."""
        for request_id in request_ids:
            self._groups.pop(request_id, None)

    def process(self, outputs: Iterable[EngineOutput]) -> list[RequestOutput]:
        """The requests that these outputs touched, brought up to date (the same objects each time), in order of first touch."""
        touched: dict[str, RequestOutput] = {}
        for output in outputs:
            request = output.request
            group = self._groups.get(request.parent_id)
            if group is None:
                continue
            sample = group.samples[request.sample_index]
            if sample.completion.finish_reason is not None:
                continue  # a stop string ended it, and this came from a step already under way
            self._extend(sample, output)
            if sample.completion.finish_reason is not None:
                sample.completion.weight_versions = WeightVersionSpan.of(request.weight_starts, len(sample.completion.token_ids))
            if request.params.prompt_logprobs is not None and request.prompt_scores is not None:
                group.output.prompt_logprobs = group.output.prompt_logprobs or self._prompt_logprobs(request)
            touched[request.parent_id] = group.output
            group.output.num_cached_tokens = max(0, group.samples[0].request.num_cached_tokens)
            if all(s.completion.finish_reason is not None for s in group.samples):
                group.output.finished = True
                group.output.metrics = _metrics_of([s.request for s in group.samples])
                del self._groups[request.parent_id]
        return list(touched.values())

    def _extend(self, sample: _SampleText, output: EngineOutput) -> None:
        """Adds an output's tokens, one by one, since a stop string may end the sample after any of them."""
        completion, include_stop = sample.completion, sample.request.params.include_stop_str_in_output
        for i, token_id in enumerate(output.new_token_ids):
            completion.token_ids.append(token_id)
            if output.logprobs is not None:
                self._add_logprobs(sample, token_id, output.logprobs[i])
            last = i == len(output.new_token_ids) - 1 and output.finish_reason == "stop"
            is_stop_token = last and token_id in sample.request.stop_ids  # a grammar may end with a token of the text
            if sample.detokenizer is None or (is_stop_token and not include_stop):
                continue  # a stop token's own text is left out, as a stop string's is
            if self._add_text(sample, sample.detokenizer.step(token_id)):
                return
        if output.finish_reason is None:
            completion.text = sample.text[: max(0, len(sample.text) - sample.num_held)]
            return
        if sample.detokenizer is not None and self._add_text(sample, sample.detokenizer.flush()):
            return
        completion.text = sample.text
        completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason

    def _add_text(self, sample: _SampleText, new: str) -> bool:
        """Adds to the sample's text. True if that completed a stop string, which ended it.

        Of several, the first to be complete counts, and of those the longest: what comes out is the same however the text was cut
        into tokens. As for stop tokens, min_tokens other tokens come first.
        """
        params, completion, before = sample.request.params, sample.completion, len(sample.text)
        sample.text += new
        if not params.stop or not new or len(completion.token_ids) <= params.min_tokens:
            return False
        hits = [(sample.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in params.stop]
        hits = [(at + len(stop), at, stop) for at, stop in hits if at >= 0]
        if not hits:
            return False
        end, at, stop = min(hits)
        completion.text = sample.text[: end if params.include_stop_str_in_output else at]
        completion.finish_reason, completion.stop_reason = "stop", stop
        self._finish(sample.request, "stop", stop)
        return True

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None]:
        assert request.prompt_scores is not None
        return request.prompt_scores.to_dicts(self._text_of if request.params.detokenize else None)

    def _add_logprobs(self, sample: _SampleText, token_id: int, found: dict[int, Logprob]) -> None:
        completion = sample.completion
        assert completion.logprobs is not None and completion.cumulative_logprob is not None
        if (text_of := self._text_of) is not None and sample.detokenizer is not None:
            found = {i: Logprob(x.logprob, x.rank, text_of(i)) for i, x in found.items()}
        completion.logprobs.append(found)
        completion.cumulative_logprob += found[token_id].logprob


def _metrics_of(requests: list[Request]) -> RequestMetrics | None:
    """Those of a whole request: its samples' first times, last end, and preemptions in all."""
    all_metrics = [r.metrics for r in requests if r.metrics is not None]
    if len(all_metrics) < 2:
        return all_metrics[0] if all_metrics else None
    return RequestMetrics(
        arrival_time=all_metrics[0].arrival_time,
        first_scheduled_time=min((m.first_scheduled_time for m in all_metrics if m.first_scheduled_time is not None), default=None),
        first_token_time=min((m.first_token_time for m in all_metrics if m.first_token_time is not None), default=None),
        kv_load_time=min((m.kv_load_time for m in all_metrics if m.kv_load_time is not None), default=None),
        kv_loaded_time=max((m.kv_loaded_time for m in all_metrics if m.kv_loaded_time is not None), default=None),
        finished_time=max((m.finished_time for m in all_metrics if m.finished_time is not None), default=None),
        num_preemptions=sum(m.num_preemptions for m in all_metrics),
        num_drafts=sum(m.num_drafts for m in all_metrics),
        num_draft_tokens=sum(m.num_draft_tokens for m in all_metrics),
        num_accepted_tokens=sum(m.num_accepted_tokens for m in all_metrics),
    )
