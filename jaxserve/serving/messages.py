"""Messages between a server's event loop and its engine loop: plain values, so that the thread could become a process.

Owns the messages and the errors. Knows neither side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.engine.stats import KVStoreStats
from jaxserve.moved import forward
from jaxserve.outputs import Logprob, RequestMetrics, WeightVersionSpan
from jaxserve.request import StoredPrefix
from jaxserve.sampling_params import SamplingParams


class RequestError(Exception):
    """A request ended, or was refused, for a reason that is not its caller's mistake."""


class QueueFullError(RequestError):
    """More samples wait than the server may hold. retry_after: seconds after which to try again."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[QueueFullError], tuple[str, int]]:
        """What pickles it: exceptions do not know of arguments that they do not pass on."""
        return type(self), (str(self), self.retry_after)


class UnavailableError(RequestError):
    """No new requests are taken: the engine is asleep, shutting down, or broken."""


class DeadlineError(RequestError):
    """The request took longer than its timeout."""


class FailedError(RequestError):
    """The engine, or the tokenizer, failed while the request ran."""


# ---- to the engine


@dataclass(frozen=True, slots=True)
class Add:
    """A request, tokenised. arrival: in seconds of time.monotonic(). prompt: its text, if it came as text. keeps_prompt,
    stored_prefix: as `Request`'s. trace: as `Ask`'s."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    keeps_prompt: bool = False
    stored_prefix: StoredPrefix | None = None
    trace: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends requests. refused: their call was refused because of another of its prompts, so they are not counted as aborted."""

    request_ids: list[str]
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Runs one of the engine loop's CALLS between two steps. A Reply with the same id answers it."""

    call_id: int
    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends all requests, and the loop."""


# ---- to a hub of several processes


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has begun to serve."""


@dataclass(frozen=True, slots=True)
class HTTPAnswered:
    """The process has answered a request. num_refused: how many calls it has refused so far, since too many samples waited."""

    path: str
    status: int
    num_refused: int


# ---- from the engine


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued, and the form of its output is compiled."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """Counts of a request that has ended. num_output_tokens: of all n samples; max_output_tokens: of the longest. max_tokens: None
    where it was not given. num_cached_tokens: of the prompt. trace: as it came."""

    num_prompt_tokens: int
    num_output_tokens: int
    n: int
    max_tokens: int | None
    metrics: RequestMetrics | None
    max_output_tokens: int = 0
    num_cached_tokens: int = 0
    trace: Mapping[str, str] | None = None


@dataclass(slots=True)
class Delta:
    """The new part of one sample's output. The texts and ids of a sample's deltas add up to its output.

    finish_reason, stop_reason: as CompletionOutput's; None while the sample runs.
    last: this is the last delta of the whole request.
    prompt_logprobs: in a sample's first delta, if asked for.
    totals: in a request's last delta.
    gap: seconds since the sample's previous delta; None in its first.
    weight_versions: in a sample's last delta, which weights sampled which of its tokens.
    stored_prefix: in the last delta of a request that keeps its prompt, how much of that is stored; None: nothing.
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
    weight_versions: list[WeightVersionSpan] | None = None
    stored_prefix: StoredPrefix | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has ended with this error."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Aborted:
    """An Abort has ended `num_samples` samples of this request."""

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
    num_held: int = 0  # of those waiting, as SchedulerStats'
    num_pages: int = 0
    num_free_pages: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0  # of prompt_tokens, those that the prefix cache had
    prefill_tokens: int = 0
    generated_tokens: int = 0
    tokens_run: int = 0
    padding_tokens: int = 0
    steps_by_bucket: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int = 0  # of these, tokens found there
    num_drafts: int = 0  # of speculation, as EngineStats'
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_compiles: int = 0
    num_programs_left: int = 0  # of the bucket plan's, not compiled yet
    compile_seconds: float = 0.0
    kv_store: KVStoreStats | None = None  # as of the last turn; None: there is none
    num_failures: int = 0  # steps that raised
    num_weight_updates: int = 0
    weight_version: str = "0"
    step_seconds: float | None = None  # of the step that this report follows
    is_paused: bool = False
    is_asleep: bool = False
    sleep_level: int = 0  # 0: awake; 1: the weights are on the host; 2: they are gone
    broken: str | None = None  # why the engine takes no more requests


Event = Accepted | Delta | Failed | Aborted | Reply


@dataclass(slots=True)
class Report:
    """Everything that one turn of the engine loop brought. It wakes the event loop once."""

    events: list[Event]
    stats: LoopStats


Command = Add | Abort | Call | Stop

# -- what the loop is told by threads beside it


@dataclass(frozen=True, slots=True)
class Compiled:
    """From the compiler's threads: the grammar of this request has been compiled, or has failed."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """From the thread that reads weights: the weights that a call named, as a module, or the error of reading them."""

    call: Call
    module: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class ProgramCompiled:
    """From the thread that compiles programs behind the steps: the counts have changed."""


@dataclass(frozen=True, slots=True)
class HostLost:
    """From the group of processes that the engine's devices belong to: why it can run no more steps."""

    why: str


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
