"""The words everyone else uses: what a user asks for, what the scheduler moves along, what comes back.

Owns SamplingParams (validated on construction), Request (one sequence's host state) and the outputs a user sees.
Knows nothing of scheduling, devices or text.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxserve.sampling.prompt_scores import PromptScores
    from jaxserve.scheduling.sequence_rows import SequenceRows

MAX_LOGPROBS = 20  # most alternatives a request may ask for; the head's logprobs variant is compiled for this many
MAX_SUPPRESSED_IDS = 16  # most stop ids that min_tokens can hold back
MAX_LOGIT_BIAS = 512  # most entries of logit_bias; the device keeps room for so many a row, as for the next two
MAX_BAD_WORDS = 128  # most token sequences of bad_words; a word has two where a space before it changes its tokens
MAX_BAD_WORD_TOKENS = 32  # most tokens of one of them


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _is_int(x: object) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)  # numpy's integers too


def _is_real(x: object) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, (Sequence, np.ndarray)) and all(_is_int(i) and 0 <= i < 2**31 for i in ids)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request; names, defaults and meanings as vLLM's SamplingParams.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. `logprobs=N` returns the sampled token's log-probability
    and the N likeliest alternatives', of the model's raw distribution (before temperature and filters). `max_tokens=None` means
    up to the model's length. `seed=None` draws a seed from the engine's own, by order of arrival.

    presence_penalty and frequency_penalty count the output's tokens, repetition_penalty (in [0.01, 100]) the prompt's too (Keskar
    et al., 2019).
    logit_bias: {token id: what is added to its logit}, at most MAX_LOGIT_BIAS entries. allowed_token_ids: no other is sampled.
    bad_words: texts that the output never contains as a sequence of tokens, neither with nor without a space before them; only
    `LLM` and `AsyncLLM` take them, which know a tokenizer. bad_words_token_ids: the sequences themselves, at most MAX_BAD_WORDS of
    at most MAX_BAD_WORD_TOKENS. `prompt_logprobs=N` returns the prompt's own log-probabilities, as `logprobs` the output's.
    structured_outputs: the form that the text must have (StructuredOutputsParams, or a dict of its fields); `LLM` and `AsyncLLM`
    take it, `Engine` its compiled grammar. Log-probabilities are then of what the form allows. min_tokens makes such an output go
    on where it might end; it ends all the same, with finish_reason "stop", where the form lets nothing follow.
    stop, include_stop_str_in_output, skip_special_tokens and detokenize are about text, which `LLM` and `AsyncLLM` make: an
    `Engine`, which makes token ids, refuses stop and has no use for the others.

    Numbers may be numpy's; a bool is no number. Lists become tuples, `top_k=-1` becomes 0.

    Raises:
      ValueError: a value is of the wrong type or out of range; the message names it and what it may be.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._set_real("temperature", 0.0, math.inf, "0 is greedy")
        self._set_real("top_p", 0.0, 1.0, "1 is off", low_open=True)
        self._set_real("min_p", 0.0, 1.0, "0 is off")
        self._set_int("n", 1)
        self._set_int("top_k", -1, "0 and -1 are off")
        self._set_int("seed", -(2**63), "or None", most=2**64 - 1, optional=True)
        self._set_int("max_tokens", 1, "None is up to the model's length", optional=True)
        self._set_int("min_tokens", 0)
        self._set_int("logprobs", 0, "or None", most=MAX_LOGPROBS, optional=True)
        self._set_int("prompt_logprobs", 0, "or None", most=MAX_LOGPROBS, optional=True)
        self._set_real("presence_penalty", -2.0, 2.0, "0 is off")
        self._set_real("frequency_penalty", -2.0, 2.0, "0 is off")
        self._set_real("repetition_penalty", 0.01, 100.0, "1 is off")
        least, most = self.min_tokens, self.max_tokens
        _require(most is None or least <= most, f"min_tokens={least} must not exceed max_tokens={most}")
        object.__setattr__(self, "top_k", max(0, self.top_k))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name}={value!r} must be True or False")
        self._set_stops()
        self._set_logit_bias()
        self._set_allowed_and_bad_words()
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.make(self.structured_outputs))

    def _set_real(self, name: str, low: float, high: float, hint: str, low_open: bool = False) -> None:
        x: Any = getattr(self, name)
        ok = _is_real(x) and low <= float(x) <= high
        bounds = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        if high == math.inf:
            bounds = f">= {low:g} and finite"
        _require(ok and not (low_open and x == low), f"{name}={x!r} must be a number {bounds} ({hint})")
        object.__setattr__(self, name, float(x))

    def _set_int(self, name: str, least: int, hint: str = "", *, most: int | None = None, optional: bool = False) -> None:
        if optional and getattr(self, name) is None:
            return
        x: Any = getattr(self, name)
        bounds = f">= {least}" if most is None else f"in [{least}, {most}]"
        ok = _is_int(x) and x >= least and (most is None or x <= most)
        _require(ok, f"{name}={x!r} must be an integer {bounds}" + (f" ({hint})" if hint else ""))
        object.__setattr__(self, name, int(x))

    def _set_stops(self) -> None:
        stop, ids = self.stop, self.stop_token_ids
        stop = () if stop is None else (stop,) if isinstance(stop, str) else stop
        ok = isinstance(stop, Sequence) and all(isinstance(s, str) and s for s in stop)
        _require(ok, f"stop={self.stop!r} must be a non-empty string or a list of them")
        _require(not stop or self.detokenize, f"stop={self.stop!r} needs detokenize=True: stop strings are found in the text")
        _require(ids is None or _are_ids(ids), f"stop_token_ids={ids!r} must be a list of token ids in [0, 2**31)")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in (() if ids is None else ids)))

    def _set_logit_bias(self) -> None:
        given = self.logit_bias
        ok = isinstance(given, Mapping) and _are_ids(list(given))
        ok = given is None or ok and all(_is_real(x) and -100 <= x <= 100 for x in given.values())
        _require(ok, f"logit_bias={given!r} must be a dict from token ids to numbers in [-100, 100]")
        if given is not None:
            bias = {int(i): float(x) for i, x in given.items()}
            _require(
                len(bias) <= MAX_LOGIT_BIAS, f"logit_bias of {len(bias)} entries must have at most {MAX_LOGIT_BIAS}; leave some out"
            )
            object.__setattr__(self, "logit_bias", bias or None)

    def _set_allowed_and_bad_words(self) -> None:
        allowed, words, sequences = self.allowed_token_ids, self.bad_words, self.bad_words_token_ids
        if allowed is not None:
            ok = _are_ids(allowed) and len(allowed) > 0
            _require(ok, f"allowed_token_ids={allowed!r} must be a non-empty list of token ids in [0, 2**31), or None")
            object.__setattr__(self, "allowed_token_ids", tuple(int(i) for i in allowed))
        if words is not None:
            ok = isinstance(words, Sequence) and not isinstance(words, str) and all(isinstance(w, str) and w.strip() for w in words)
            _require(ok, f"bad_words={words!r} must be a list of strings, none of them empty")
            object.__setattr__(self, "bad_words", tuple(words) or None)
        if sequences is not None:
            ok = isinstance(sequences, Sequence) and all(_are_ids(s) and len(s) > 0 for s in sequences)
            _require(ok, f"bad_words_token_ids={sequences!r} must be a list of non-empty lists of token ids in [0, 2**31)")
            ok = len(sequences) <= MAX_BAD_WORDS and all(len(s) <= MAX_BAD_WORD_TOKENS for s in sequences)
            _require(
                ok,
                f"bad_words_token_ids: {len(sequences)} token sequences, the longest of {max(map(len, sequences), default=0)} "
                f"tokens, must be at most {MAX_BAD_WORDS} of at most {MAX_BAD_WORD_TOKENS}; leave some out, or shorten them",
            )
            object.__setattr__(self, "bad_words_token_ids", tuple(tuple(int(i) for i in s) for s in sequences) or None)

    @property
    def penalises(self) -> bool:
        """Whether what was generated so far, or stands in the prompt, changes a token's logit."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest."""
        return self.temperature == 0

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)


class RequestStatus(enum.Enum):
    """Where a request is between `add` and its last token."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"  # not admitted until its grammar is compiled; others pass it
    WAITING_FOR_PROMPT = "waiting_for_prompt"  # not admitted until another sample of its prompt has computed it; others pass it
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, to recompute prompt + output
    FINISHED = "finished"


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
    adapter_id: str | None = None
    sample_index: int = 0  # which of the n samples of one prompt
    seed: int = 0  # resolved: params.seed, or the engine's choice
    weights_version: int = 0
    parent_id: str = ""  # the id the user gave; differs from request_id where n > 1
    samples: Sequence[Request] = field(default=(), repr=False)  # all n of one prompt, where n > 1, itself included
    metrics: RequestMetrics | None = None
    prompt_scores: PromptScores | None = None  # where its prompt's own log-probabilities are gathered, if they are asked for

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt + output that the host knows
    num_prompt_tokens: int = 0
    max_total_tokens: int = 0  # prompt + output may reach this; set when added
    stop_ids: frozenset[int] = frozenset()  # ids that finish the request: eos unless ignored, and stop_token_ids
    row: int = -1  # its place in the device-resident state while running
    rows: SequenceRows | None = field(default=None, repr=False)  # where that row lives
    num_unfetched: int = 0  # tokens in flight when it was preempted that have not come back yet
    num_foretold: int = 0  # tokens in flight that the host knew before they came back: they are in token_ids already
    hash_chain: list[bytes] = field(default_factory=list, repr=False)  # the root's hash, then one a full page, as far as hashed
    num_cached_tokens: int = -1  # prefix-cache hit at the first admission; -1 before it
    num_preemptions: int = 0
    order: int = 0  # order of arrival at the scheduler
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop id or string; None for eos; the message of an error

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

    def end(self) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the last token ends the request. A stop counts only after min_tokens other tokens, and
        comes before a length reached with the same token."""
        token = self.token_ids[-1]
        if token in self.stop_ids and self.num_output_tokens > self.params.min_tokens:
            eos = token in self.eos_token_ids and not self.params.ignore_eos
            return "stop", None if eos else token
        return ("length", None) if len(self.token_ids) >= self.max_total_tokens else None


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (natural log), its rank in the distribution (1 is the likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request. Fields as vLLM's: `text` and `token_ids` are all of the output so far, a stop string not included
    unless asked for. finish_reason: None while running, then "stop", "length", "abort" or "error"; stop_reason: the stop token id
    or stop string that ended it, None for eos, the message of an error."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic(), and its share of EngineStats' counts of drafts."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to the first token, in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


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
