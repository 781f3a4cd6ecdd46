"""What a user gets: outputs of requests and their samples, log-probabilities, times.

Owns the shapes of answers. Knows nothing of how they come about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (natural log), its rank in the distribution (1 is the likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


MAX_WEIGHT_VERSION = 128  # characters


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Output tokens [start, end) were sampled with weights of this version (`LLM.update_params` names them). As vLLM's."""

    version: str
    start: int
    end: int

    @classmethod
    def of(cls, starts: Sequence[tuple[str, int]], num_tokens: int) -> list[WeightVersionSpan]:
        """The spans of num_tokens output tokens. starts: (version, its first token), in order; none: nothing was sampled."""
        if not starts:
            return []
        ends = [*(start for _, start in starts[1:]), num_tokens]
        spans = [cls(version, start, min(end, num_tokens)) for (version, start), end in zip(starts, ends, strict=True)]
        return [span for span in spans if span.start < span.end or span is spans[0]]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request. Fields as vLLM's: `text` and `token_ids` are all of the output so far, a stop string not included
    unless asked for. finish_reason: None while running, then "stop", "length", "abort", "error" or "repetition"; stop_reason:
    the stop token id or stop string that ended it, None for eos, the message of an error, "repetition_detected". weight_versions:
    when it has ended, which weights sampled which of its tokens; None before."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic(), and its share of EngineStats' counts of drafts.

    kv_load_time, kv_loaded_time: between which it waited for a store's pages the first time; None: it never did.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    kv_load_time: float | None = None
    kv_loaded_time: float | None = None

    @property
    def ttft(self) -> float | None:
        """Time to the first token, in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


class PromptScores:
    """What the prompt's tokens from position `first` on are worth: natural logs of the model's raw distribution.

    logprobs: f32[n]; ranks: i32[n], 1 is the likeliest; top_ids, top_logprobs: [n, num_top], likeliest first. All count from
    `first`, which is 1 at least: nothing comes before a prompt's first token.
    """

    def __init__(self, token_ids: Sequence[int], first: int, num_top: int):
        self.token_ids = token_ids
        self.first = first
        self.next = first  # the first position that no step has been asked for
        n = len(token_ids) - first
        self.logprobs: np.ndarray = np.full(n, np.nan, np.float32)
        self.ranks: np.ndarray = np.zeros(n, np.int32)
        self.top_ids: np.ndarray = np.zeros((n, num_top), np.int32)
        self.top_logprobs: np.ndarray = np.zeros((n, num_top), np.float32)

    @property
    def wanted(self) -> bool:
        """Whether any position is still to be asked for."""
        return self.next < len(self.token_ids)

    def take(
        self,
        position: int,
        logprobs: np.ndarray,  # f32[c]
        ranks: np.ndarray,  # i32[c]
        top_ids: np.ndarray,  # i32[c, N], N >= num_top
        top_logprobs: np.ndarray,  # f32[c, N]
    ) -> None:
        """Values of c consecutive positions from `position` on."""
        n = self.top_ids.shape[1]
        to = slice(position - self.first, position - self.first + len(logprobs))
        self.logprobs[to], self.ranks[to] = logprobs, ranks
        self.top_ids[to], self.top_logprobs[to] = top_ids[:, :n], top_logprobs[:, :n]

    def to_dicts(self, decode: Callable[[int], str] | None = None) -> list[dict[int, Logprob] | None]:
        """vLLM's form: one entry a prompt token, the token itself first, then the likeliest; None where nothing was scored."""
        text = decode or (lambda _: None)
        entries: list[dict[int, Logprob] | None] = [None] * self.first
        columns = (self.logprobs.tolist(), self.ranks.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist())
        for token, logprob, rank, top_ids, top in zip(self.token_ids[self.first :], *columns, strict=True):
            entry = {token: Logprob(logprob, rank, text(token))}
            for i, other in enumerate(top_ids):
                if other != token:
                    entry[other] = Logprob(top[i], i + 1, text(other))
            entries.append(entry)
        return entries


@dataclass(slots=True)
class RequestOutput:
    """What `generate` returns for one prompt: the n samples and what the engine knows of the prompt.

    prompt_logprobs: one entry a prompt token, as CompletionOutput's logprobs; None for the first token. There from the first
    output on. num_cached_tokens: prompt tokens whose KV came from the prefix cache (of the first sample; the others find at least
    its pages).
    metrics: of the first sample until all have finished, then of all together.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_scores: PromptScores | None = field(default=None, repr=False)  # the same as arrays
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class ScoreOutput:
    """What `LLM.score` returns for one text.

    token_ids: the tokens that were scored: the completion's, or all of the text's but its first. logprobs: f32[len(token_ids)], the
    log-probability (natural log) of each, given all tokens before it. num_context_tokens: how many tokens came before the first.
    """

    text: str | None
    token_ids: list[int]
    logprobs: np.ndarray
    num_context_tokens: int

    @property
    def cumulative_logprob(self) -> float:
        """The sum: the log-probability of the whole."""
        return float(self.logprobs.sum(dtype=np.float64))
