"""What passes between a server's event loop and its engine loop: plain values, so that a thread could become a process.

Owns the words and the errors. Knows neither side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.outputs import Logprob, RequestMetrics
from jaxserve.sampling_params import SamplingParams


class RequestError(Exception):
    """A request ended, or never began, for a reason that is not its caller's mistake."""


class QueueFullError(RequestError):
    """More is waiting than the server was told to hold. retry_after: seconds after which to try again."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(RequestError):
    """Nothing new is taken: the engine is asleep, shutting down, or broken."""


class DeadlineError(RequestError):
    """The request took longer than it was given."""


class FailedError(RequestError):
    """The engine, or the tokenizer, failed while the request ran."""


# ---- to the engine


@dataclass(frozen=True, slots=True)
class Add:
    """A request, tokenised. arrival: in seconds of time.monotonic(). prompt: its text, if it came as text."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """refused: their call was refused for another of its prompts; they count as never asked for."""

    request_ids: list[str]
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Run a method that the engine loop knows (its CALLS) between two steps; answered by a Reply with the same id."""

    call_id: int
    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """End what runs, and the loop."""


# ---- from the engine


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued, and the form of its output compiled."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """A request that has ended: num_output_tokens of all n samples. max_tokens: None where it was not said."""

    num_prompt_tokens: int
    num_output_tokens: int
    n: int
    max_tokens: int | None
    metrics: RequestMetrics | None


@dataclass(slots=True)
class Delta:
    """What is new of one sample. The texts and ids of a sample's deltas add up to its output.

    finish_reason, stop_reason: as CompletionOutput's; None while the sample runs. last: no more comes for the whole request.
    prompt_logprobs: with a sample's first delta, if asked for. totals: with a request's last. gap: seconds since the sample's
    tokens before these.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Any = None
    last: bool = False
    totals: RequestTotals | None = None
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """No more comes for this request."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Aborted:
    """An Abort has ended so many samples of this request."""

    request_id: str
    num_samples: int


@dataclass(frozen=True, slots=True)
class Reply:
    call_id: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """The engine as it is now, and counts since it was made. Times in seconds; `steps_by_bucket`: "tokens x seqs" -> steps."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    tokens_run: int = 0
    padding_tokens: int = 0
    steps_by_bucket: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up in the prefix cache, and found there
    num_prefix_hits: int = 0
    num_drafts: int = 0  # of speculation, as EngineStats'
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_compiles: int = 0
    num_programs_left: int = 0  # of the bucket plan's, not compiled yet
    compile_seconds: float = 0.0
    num_failures: int = 0  # steps that raised
    step_seconds: float | None = None  # of the step that this report follows
    is_paused: bool = False
    is_asleep: bool = False
    broken: str | None = None  # why the engine takes no more requests


Event = Accepted | Delta | Failed | Aborted | Reply


@dataclass(slots=True)
class Report:
    """Everything that one turn of the engine loop brought: one wake-up of the event loop."""

    events: list[Event]
    stats: LoopStats
