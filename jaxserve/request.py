"""One sequence on its way through the engine: Request, where it stands (RequestStatus), and what a step brought it (EngineOutput).

Owns a request's host state. Knows nothing of scheduling, devices or text.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxserve.moved import forward

if TYPE_CHECKING:  # not at run time, when this module warns of the names that were defined here
    from jaxserve.outputs import Logprob, PromptScores, RequestMetrics
    from jaxserve.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is between `add` and its last token."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"  # not admitted until its grammar is compiled; others pass it
    WAITING_FOR_PROMPT = "waiting_for_prompt"  # not admitted until another sample of its prompt has computed it; others pass it
    WAITING_FOR_KV = "waiting_for_kv"  # not admitted until a store's pages are in the pool; others pass it
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, to recompute prompt + output
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The first pages of a prompt, which lie in a store that several engines share. What a prefill engine tells a decode engine.

    num_pages: full pages, 1 at least. last_hash: of the last of them, which covers all tokens up to its end and what names the
      weights, so that an engine of another model does not take them for its own.
    """

    num_pages: int
    last_hash: bytes

    def __str__(self) -> str:
        return f"{self.num_pages}:{self.last_hash.hex()}"

    @classmethod
    def parse(cls, text: str) -> StoredPrefix:
        """What `str` made. Raises ValueError for anything else."""
        count, _, name = text.partition(":")
        if not (count.isascii() and count.isdecimal() and len(count) < 10 and int(count)) or len(name) != 64:
            raise ValueError(f"{text!r} must be PAGES:HASH, such as 3:{'0f' * 32}")
        return cls(int(count), bytes.fromhex(name))


class RowCounters(Protocol):
    """Where the scheduler keeps, as arrays over all rows, what changes every step: `scheduling.sequence_rows.SequenceRows`."""

    num_computed: np.ndarray  # i32[S]
    prefill_end: np.ndarray  # i32[S]

    def pages(self, row: int) -> list[int]:
        """The pages of a row, head to tail."""
        ...


@dataclass(eq=False, slots=True)
class Request:
    """One sequence: its tokens and how far the engine is with it.

    The scheduler owns every field from `status` on. What changes every step lives at the request's row while it runs, as arrays
    over all rows (sequence_rows.py), and is read here through properties.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0  # seconds, any clock; ties are broken by order of adding
    priority: int = 0  # lower is served first
    cache_salt: str | None = None
    sample_index: int = 0  # which of the n samples of one prompt
    seed: int = 0  # resolved: params.seed, or the engine's choice
    num_weight_updates: int = 0  # of the engine, at the last of them that its KV is for
    parent_id: str = ""  # the id the user gave; differs from request_id where n > 1
    samples: Sequence[Request] = field(default=(), repr=False)  # all n of one prompt, where n > 1, itself included
    metrics: RequestMetrics | None = None
    prompt_scores: PromptScores | None = None  # where its prompt's own log-probabilities are gathered, if they are asked for
    keeps_prompt: bool = False  # its last output waits until the prompt's full pages lie in a store that engines share
    stored_prefix: StoredPrefix | None = None  # what another engine has stored; at the end of one that keeps its prompt, this one

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt + output that the host knows
    num_prompt_tokens: int = 0
    max_total_tokens: int = 0  # prompt + output may reach this; set when it is checked, 0 before
    stop_ids: frozenset[int] = frozenset()  # ids that finish the request: eos unless ignored, and stop_token_ids
    row: int = -1  # its place in the device-resident state while running
    rows: RowCounters | None = field(default=None, repr=False)  # where that row lives
    num_unfetched: int = 0  # tokens in flight when it was preempted that have not come back yet
    num_forced_in_flight: int = 0  # tokens in flight that the host knew before they came back: they are in token_ids already
    hash_chain: list[bytes] = field(default_factory=list, repr=False)  # the root's hash, then one a full page, as far as hashed
    num_cached_tokens: int = -1  # prefix-cache hit at the first admission; -1 before it
    kv_sought: bool = False  # whether, since it last ran, a store was asked for its pages
    saves_kv: bool | None = None  # whether its full pages are saved to a store; None: nobody has decided
    num_preemptions: int = 0
    order: int = 0  # order of arrival at the scheduler
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error" | "repetition"
    stop_reason: int | str | None = None  # the stop id or string; None for eos; the message of an error; "repetition_detected"
    weight_starts: list[tuple[str, int]] = field(default_factory=list)  # versions of the weights, each with its first output token

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.stop_ids = eos | frozenset(self.params.stop_token_ids or ())

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is written or will be by a step already scheduled; 0 while it does not run."""
        return 0 if self.rows is None else int(self.rows.num_computed[self.row])

    @property
    def num_in_flight(self) -> int:
        """Tokens that steps already scheduled sample and that have not come back; with drafts in flight, at most so many."""
        if self.rows is None:
            return self.num_unfetched
        return max(self.num_computed_tokens + 1, int(self.rows.prefill_end[self.row])) - len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt + output, those still in flight included; with drafts in flight, at most so many."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """What has been sampled so far, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def pages(self) -> list[int]:
        """The pages it holds, head to tail; none while it does not run."""
        return [] if self.rows is None else self.rows.pages(self.row)

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def begin_weights(self, version: str) -> None:
        """Output tokens from here on are sampled with weights of this version."""
        start = self.num_output_tokens
        if self.weight_starts and self.weight_starts[-1][1] == start:
            self.weight_starts.pop()  # with which nothing was sampled
        if not self.weight_starts or self.weight_starts[-1][0] != version:
            self.weight_starts.append((version, start))

    def end(self) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the last token ends the request. A stop counts only after min_tokens other tokens, and
        comes before a length reached with the same token. Repetition is not looked for here."""
        token = self.token_ids[-1]
        if token in self.stop_ids and self.num_output_tokens > self.params.min_tokens:
            eos = token in self.eos_token_ids and not self.params.ignore_eos
            return "stop", None if eos else token
        return ("length", None) if len(self.token_ids) >= self.max_total_tokens else None


@dataclass(slots=True)
class EngineOutput:
    """What one step brought for one sample of a request.

    logprobs: {token id: Logprob} for each new token, the sampled token first; None unless asked for.
    finish_reason, stop_reason: as CompletionOutput's; None while it runs.
    mistake: with finish_reason "error", where the request's own parameters are to blame.
    """

    request: Request
    new_token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    mistake: ValueError | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last output of its sample."""
        return self.finish_reason is not None


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
