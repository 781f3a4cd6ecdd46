"""Beam search over HTTP, as vLLM has it: `use_beam_search` of completions and chats.

Owns which fields go with it. The search itself is jaxserve.engine.beam_search's; its steps are requests of one token each, on the
engine that everybody shares.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from starlette.requests import Request

from jaxserve.engine.beam_search import Beam, BeamSearchParams, BeamSearchSequence, steps
from jaxserve.outputs import Logprob
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.errors import RefusedError, checking
from jaxserve.serving.generation import Served, open_stream, read_asks
from jaxserve.serving.messages import Delta, FailedError
from jaxserve.serving.middleware import key_use
from jaxserve.serving.protocol import GenerationRequest
from jaxserve.serving.streams import AnswerStream, Ask

_FIELDS = frozenset(  # of a request, that beam search reads or that say nothing about sampling
    {
        *("model", "prompt", "messages", "use_beam_search", "n", "max_tokens", "max_completion_tokens", "length_penalty"),
        *("temperature", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
        *("stream", "stream_options", "stream_interval", "echo", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
        *("return_token_ids", "return_prompt_text", "priority", "cache_salt", "timeout", "user", "request_id", "store", "best_of"),
        *("service_tier", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "add_generation_prompt"),
        *("continue_final_message", "include_reasoning", "tools", "tool_choice", "parallel_tool_calls", "modalities"),
    }
)


def check_fields(body: GenerationRequest) -> None:
    """RefusedError for a field that beam search has no use for. Values that mean nothing (null, [], false) pass."""
    for name in sorted(body.model_fields_set - _FIELDS):
        if getattr(body, name) not in (None, False, [], {}):
            raise RefusedError(f"{name}: beam search, which use_beam_search asks for, does not read it", param=name)


class Beams:
    """The sequences of a call's prompts, as Deltas in the order of prompts: one for each sequence, which has it whole.

    asks: the prompts; their params' n is the width of the search. It has what the answers read of a `RequestStream`.
    """

    def __init__(self, served: Served, body: GenerationRequest, request: Request, asks: Sequence[Ask]):
        self._engine, self._body, self._request_id = served.engine, body, request.state.request_id
        self.asks: Mapping[str, Ask] = {f"{request.state.request_id}.{i}": ask for i, ask in enumerate(asks)}
        self.request_ids: list[str] = list(self.asks)
        self.num_samples: int = sum(ask.params.n for ask in asks)
        self.arrival: float = time.monotonic()
        self._use = key_use(request)
        self._params = _search_params(served, body, asks)

    @property
    def finished(self) -> bool:
        return False  # a search tells nothing before its end

    def __aiter__(self) -> AsyncGenerator[Delta]:
        return self._deltas()

    async def __aenter__(self) -> Beams:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass  # a step that is under way when its caller goes is aborted by the stream that it reads

    def close(self) -> None:
        """Nothing is held between two steps."""

    async def _deltas(self) -> AsyncGenerator[Delta]:
        asks = list(self.asks.values())
        self._spend(sum(len(ask.prompt_token_ids) for ask in asks))
        search = steps([ask.prompt_token_ids for ask in asks], self._params, self._engine.eos_token_ids)
        try:
            beams = next(search)
            while True:
                beams = search.send(await self._expand(beams, asks))
        except StopIteration as end:
            found: list[list[BeamSearchSequence]] = end.value
        tokenizer = self._engine.get_tokenizer()
        for name, ask, sequences in zip(self.request_ids, asks, found, strict=True):
            for i, sequence in enumerate(sequences):
                ids = sequence.tokens[len(ask.prompt_token_ids) :]
                text = tokenizer.decode(ids, skip_special_tokens=ask.params.skip_special_tokens)
                yield Delta(name, i, text, ids, finish_reason=sequence.finish_reason, stop_reason=sequence.stop_reason)

    def _spend(self, num_tokens: int) -> None:
        if self._use is not None:
            self._use.spend(num_tokens)

    async def _expand(self, beams: Sequence[Beam], asks: Sequence[Ask]) -> list[dict[int, Logprob]]:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * self._params.beam_width, detokenize=False)
        one_token = [Ask(tokens, params, None, asks[i].priority, asks[i].cache_salt) for i, tokens in beams]
        timeout = self._body.timeout
        self._spend(len(one_token))  # their prompts are cached, all but the last token
        async with await self._engine.open(one_token, self._request_id, timeout=timeout, arrival=self.arrival) as stream:
            found = {delta.request_id: delta.logprobs async for delta in stream if delta.logprobs}
            try:
                return [found[name][0] for name in stream.request_ids]
            except KeyError:
                raise FailedError("beam search: a step brought no log-probabilities") from None


async def open_deltas(
    served: Served,
    request: Request,
    body: GenerationRequest,
    num_prompts: int,
    read: Callable[[], list[Ask]],
    form_field: str,
) -> AnswerStream:
    """As `open_stream`, or the sequences of a beam search where the request asks for one."""
    if not body.use_beam_search:
        return await open_stream(served, request, body, num_prompts, read, form_field)
    check_fields(body)
    with checking():
        asks = await read_asks(served, request, body, num_prompts, read, time.monotonic())
        return Beams(served, body, request, asks)


def _search_params(served: Served, body: GenerationRequest, asks: Sequence[Ask]) -> BeamSearchParams:
    longest = served.engine.config.scheduler.max_model_len
    with checking():
        if asks[0].params.structured_outputs is not None:
            raise ValueError("tool_choice: beam search holds no output to a form")
        most = min(longest - len(ask.prompt_token_ids) for ask in asks)
        max_tokens = min(asks[0].params.max_tokens or most, most)
        if max_tokens < 1:
            raise ValueError(f"a prompt has max_model_len={longest} tokens or more; that leaves no room for output")
        try:
            return BeamSearchParams(
                beam_width=asks[0].params.n,
                max_tokens=max_tokens,
                ignore_eos=bool(body.ignore_eos),
                length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
                include_stop_str_in_output=bool(body.include_stop_str_in_output),
            )
        except ValueError as error:
            raise ValueError(str(error).replace("beam_width", "n")) from None
