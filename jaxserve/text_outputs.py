"""Engine outputs -> texts: incremental detokenisation, stop strings, and RequestOutputs as users see them.

Owns the text of every sample in flight. Knows nothing of scheduling or devices; it asks the engine to end a sample whose text holds a
stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.request import CompletionOutput, Logprob, Request, RequestOutput
from jaxserve.tokenizer import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from jaxserve.engine import EngineOutput

Finish = Callable[[Request, str, str], None]  # (request, reason, stop string)


@dataclass(slots=True)
class _Sample:
    """One sample's text so far."""

    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    text: str = ""  # all that was detokenised; completion.text leaves out what might become a stop string


@dataclass(slots=True)
class _Group:
    output: RequestOutput
    samples: dict[int, _Sample] = field(default_factory=dict)


class TextOutputs:
    """Collects what the engine's steps bring into RequestOutputs.

    tokenizer: None leaves every text empty. finish: called for a sample whose text holds one of its stop strings.
    """

    def __init__(self, tokenizer: Tokenizer | None, finish: Finish):
        self._tokenizer, self._finish = tokenizer, finish
        self._groups: dict[str, _Group] = {}

    def add(self, requests: list[Request], prompt: str | None) -> None:
        """The samples of one request, as `Engine.add_request` returned them."""
        first = requests[0]
        output = RequestOutput(first.parent_id, prompt, list(first.prompt_token_ids), [], False, metrics=first.metrics)
        group = _Group(output)
        for request in requests:
            params = request.params
            completion = CompletionOutput(request.sample_index, "", [])
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            detokenizer = None
            if self._tokenizer is not None and params.detokenize:
                detokenizer = IncrementalDetokenizer(self._tokenizer, request.prompt_token_ids, params.skip_special_tokens)
            group.samples[request.sample_index] = _Sample(completion, detokenizer)
            output.outputs.append(completion)
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
            group.output.num_cached_tokens = max(0, request.num_cached_tokens)
            touched[request.parent_id] = group.output
            if all(s.completion.finish_reason is not None for s in group.samples.values()):
                group.output.finished = True
                del self._groups[request.parent_id]
        return list(touched.values())

    def _extend(self, sample: _Sample, output: EngineOutput) -> None:
        """Adds an output's tokens, one by one where a stop string may end the sample in the middle."""
        request, completion = output.request, sample.completion
        new = output.new_token_ids
        for i, token_id in enumerate(new):
            completion.token_ids.append(token_id)
            if output.logprobs is not None:
                self._add_logprobs(completion, token_id, output.logprobs[i])
            if sample.detokenizer is None:
                continue
            ends_on_it = i == len(new) - 1 and output.finish_reason == "stop"
            if ends_on_it and not request.params.include_stop_str_in_output:
                continue  # a stop token's own text is left out, as a stop string's is
            before = len(sample.text)
            sample.text += sample.detokenizer.step(token_id)
            if self._stopped_by_text(sample, request, before):
                return
        if output.finish_reason is not None:
            if sample.detokenizer is not None:
                before = len(sample.text)
                sample.text += sample.detokenizer.flush()
                if self._stopped_by_text(sample, request, before):
                    return
            completion.text = sample.text
            completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
        else:
            held = max((len(s) for s in request.params.stop or ()), default=1) - 1
            if request.params.include_stop_str_in_output:
                held = 0
            completion.text = sample.text[: len(sample.text) - held] if held else sample.text

    def _stopped_by_text(self, sample: _Sample, request: Request, before: int) -> bool:
        """Ends the sample if its text, grown from `before` characters, now holds a stop string; the earliest one counts."""
        params, completion = request.params, sample.completion
        if not params.stop or len(completion.token_ids) < params.min_tokens:
            return False
        hits = []
        for stop in params.stop:
            at = sample.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                hits.append((at, stop))
        if not hits:
            return False
        at, stop = min(hits)
        sample.text = sample.text[: at + len(stop) if params.include_stop_str_in_output else at]
        completion.text = sample.text
        completion.finish_reason, completion.stop_reason = "stop", stop
        self._finish(request, "stop", stop)
        return True

    def _add_logprobs(self, completion: CompletionOutput, token_id: int, found: dict[int, Logprob]) -> None:
        assert completion.logprobs is not None and completion.cumulative_logprob is not None
        if self._tokenizer is not None:
            found = {i: Logprob(x.logprob, x.rank, self._tokenizer.decode([i], False)) for i, x in found.items()}
        completion.logprobs.append(found)
        completion.cumulative_logprob += found[token_id].logprob
