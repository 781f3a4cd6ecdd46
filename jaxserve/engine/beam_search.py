"""Beam search over an engine that samples one token at a time: BeamSearchParams, its outputs, and the search itself.

Owns which beams go on and how they are ranked. Every step asks for the likeliest next tokens of all beams of all prompts as
requests of one token, whose prompts the prefix cache shortens to their last page. Knows nothing of tokenizers or devices: what asks
the engine is passed in.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field

from jaxserve.outputs import Logprob
from jaxserve.sampling_params import MAX_LOGPROBS

Beam = tuple[int, list[int]]  # (index of the prompt, token ids)
Expand = Callable[[list[Beam]], list[dict[int, Logprob]]]  # beams -> each one's likeliest next tokens, likeliest first


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search; names and meanings as vLLM's BeamSearchParams.

    beam_width: beams that are kept a prompt, and sequences returned. max_tokens: most output tokens. ignore_eos: eos is a token
    like any other. length_penalty: sequences are ranked by log-probability / length ** length_penalty, the length counting the
    prompt and leaving eos out. include_stop_str_in_output: eos stays at the end of a finished sequence's tokens. temperature: 0 and
    nothing else, for beams are ranked by the model's own log-probabilities.

    Raises:
      NotImplementedError: another temperature.
      ValueError: a value is out of range, or a beam_width whose 2 * beam_width candidates a step exceed MAX_LOGPROBS.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_LOGPROBS // 2), ("max_tokens", None)):
            x = getattr(self, name)
            ok = isinstance(x, numbers.Integral) and not isinstance(x, bool) and 1 <= int(x) <= (most or math.inf)
            if not ok:
                raise ValueError(f"{name}={x!r} must be an integer {'>= 1' if most is None else f'in [1, {most}]'}")
        if self.temperature != 0:
            raise NotImplementedError(f"temperature={self.temperature!r} is not supported in beam search; leave it at 0.0")
        x = self.length_penalty
        if not isinstance(x, numbers.Real) or isinstance(x, bool) or not math.isfinite(x):
            raise ValueError(f"length_penalty={x!r} must be a finite number")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. tokens: the prompt's, then the output's. logprobs: an entry an output token, the token first of all candidates.
    cum_logprob: their sum over the output. text: of all tokens. finish_reason: "length", or "stop" with
    the eos id as stop_reason."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What `LLM.beam_search` returns for one prompt: `beam_width` sequences, best first (fewer where there are no more)."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    """One prompt's beams under way and those that ended."""

    live: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


def score_of(beam: BeamSearchSequence, eos_token_ids: Collection[int], length_penalty: float) -> float:
    """What beams are ranked by: log-probability over a power of the length (prompt and output without eos; Wu et al., 2016, in the
    form of Hugging Face's and vLLM's searches)."""
    length = len(beam.tokens) - (beam.tokens[-1] in eos_token_ids)
    return beam.cum_logprob / max(length, 1) ** length_penalty


def search(
    prompts: Sequence[Sequence[int]], params: BeamSearchParams, eos_token_ids: Collection[int], expand: Expand
) -> list[list[BeamSearchSequence]]:
    """The best beams of each prompt, best first; `steps` with its questions answered by `expand`."""
    under_way = steps(prompts, params, eos_token_ids)
    try:
        beams = next(under_way)
        while True:
            beams = under_way.send(expand(beams))
    except StopIteration as end:
        return end.value


def steps(
    prompts: Sequence[Sequence[int]], params: BeamSearchParams, eos_token_ids: Collection[int]
) -> Generator[list[Beam], list[dict[int, Logprob]], list[list[BeamSearchSequence]]]:
    """The search as a generator: it yields the beams of a step, is sent the likeliest next tokens of each, as `Expand` returns
    them, and returns the best beams of each prompt, best first.

    A step extends each beam by its 2 * beam_width likeliest tokens. One that eos extends has ended; of the others the best
    beam_width go on. At the end those still under way compete with those that ended.
    """
    eos_token_ids = () if params.ignore_eos else eos_token_ids
    searches = [_Search([BeamSearchSequence(list(prompt))]) for prompt in prompts]

    def best(beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        ranked = sorted(beams, key=lambda beam: score_of(beam, eos_token_ids, params.length_penalty), reverse=True)
        return ranked[: params.beam_width]

    for _ in range(params.max_tokens):
        live = [(i, beam.tokens) for i, one in enumerate(searches) for beam in one.live]
        if not live:
            break
        candidates = iter((yield live))
        for one in searches:
            extended = [_extend(beam, token, found) for beam in one.live for found in [next(candidates)] for token in found]
            one.ended += [beam for beam in extended if beam.tokens[-1] in eos_token_ids]
            one.live = best([beam for beam in extended if beam.tokens[-1] not in eos_token_ids])
    return [[_finish(beam, eos_token_ids, params) for beam in best(one.ended + one.live)] for one in searches]


def _extend(beam: BeamSearchSequence, token: int, found: dict[int, Logprob]) -> BeamSearchSequence:
    entry = {token: found[token]} | found
    return BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, entry], beam.cum_logprob + found[token].logprob)


def _finish(beam: BeamSearchSequence, eos_token_ids: Collection[int], params: BeamSearchParams) -> BeamSearchSequence:
    beam.finish_reason = "length"
    if beam.tokens[-1] in eos_token_ids:
        beam.finish_reason, beam.stop_reason = "stop", beam.tokens[-1]
        if not params.include_stop_str_in_output:
            beam.tokens = beam.tokens[:-1]
    return beam
