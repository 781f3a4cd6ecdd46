"""How to sample one request: SamplingParams, checked on construction.

Owns names, defaults, ranges and the limits that the device's tables set. Knows nothing of scheduling, devices or text.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from jaxserve.lazy_names import Late
from jaxserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")  # the commands' --help reads this module

MAX_LOGPROBS = 20  # most alternatives a request may ask for; the head's logprobs variant is compiled for this many
MAX_LOGPROB_TOKEN_IDS = 128  # most token ids whose log-probabilities a request may ask for; vLLM's bound
MAX_SUPPRESSED_IDS = 16  # most stop ids that min_tokens can hold back
MAX_LOGIT_BIAS = 512  # most entries of logit_bias; the device keeps room for so many a row, as for the next two
MAX_BAD_WORDS = 128  # most token sequences of bad_words; a word has two where a space before it changes its tokens
MAX_BAD_WORD_TOKENS = 32  # most tokens of one of them
MAX_PATTERN_SIZE = 1024  # most tokens of a pattern that repetition_detection looks for: each token is compared with so many before


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
class RepetitionDetectionParams:
    """When an output counts as repeating itself: it ends with a pattern of min_pattern_size to max_pattern_size tokens, min_count
    times in a row. Names and meanings as vLLM's: a max_pattern_size of 0 is off, a min_pattern_size of 0 is 1.

    Raises:
      ValueError: max_pattern_size is not in [0, MAX_PATTERN_SIZE], min_pattern_size is not in [0, max_pattern_size], or min_count
        is below 2 where it is not off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        least, most, count = self.min_pattern_size, self.max_pattern_size, self.min_count
        given = f"repetition_detection: max_pattern_size={most!r}, min_pattern_size={least!r}, min_count={count!r}"
        _require(all(map(_is_int, (least, most, count))), f"{given} must be integers")
        _require(0 <= most <= MAX_PATTERN_SIZE, f"{given}: max_pattern_size must be in [0, {MAX_PATTERN_SIZE}] (0 is off)")
        _require(0 <= least <= most, f"{given}: min_pattern_size must be in [0, max_pattern_size]")
        _require(count >= (2 if most else 0), f"{given}: min_count must be >= 2, of one pattern in a row")
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def least_pattern_size(self) -> int:
        """Tokens of the shortest pattern that is looked for."""
        return max(1, self.min_pattern_size)

    @staticmethod
    def make(given: object) -> RepetitionDetectionParams | None:
        """Of these, or of a dict of their fields; None where they are off."""
        if isinstance(given, Mapping):
            names = [named.name for named in fields(RepetitionDetectionParams)]
            unknown = ", ".join(str(name) for name in given if name not in names)
            _require(not unknown, f"repetition_detection: unknown fields {unknown}; there are {', '.join(names)}")
            given = RepetitionDetectionParams(**given)
        if not isinstance(given, RepetitionDetectionParams):
            raise ValueError(f"repetition_detection={given!r} must be a RepetitionDetectionParams, a dict of its fields, or None")
        return given if given.max_pattern_size else None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request; names, defaults and meanings as vLLM's SamplingParams.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. `logprobs=N` returns the sampled token's log-probability
    and the N likeliest alternatives', of the model's raw distribution (before temperature and filters). `logprob_token_ids` asks
    for those of given tokens instead, at most MAX_LOGPROB_TOKEN_IDS; `logprobs` must then be None or their number. A token that a
    form forbids has -inf. `max_tokens=None` means up to the model's length. `seed=None` draws a seed from the engine's own, by
    order of arrival.

    presence_penalty and frequency_penalty count the output's tokens, repetition_penalty (in [0.01, 100]) the prompt's too (Keskar
    et al., 2019).
    logit_bias: {token id: what is added to its logit}, at most MAX_LOGIT_BIAS entries. allowed_token_ids: no other is sampled.
    bad_words: texts that the output never contains as a sequence of tokens, neither with nor without a space before them; only
    `LLM` and `AsyncLLM` take them, which know a tokenizer. bad_words_token_ids: the sequences themselves, at most MAX_BAD_WORDS of
    at most MAX_BAD_WORD_TOKENS. `prompt_logprobs=N` returns the prompt's own log-probabilities, as `logprobs` the output's.
    structured_outputs: the form that the text must have (StructuredOutputsParams, or a dict of its fields); `LLM` and `AsyncLLM`
    take it, `Engine` its compiled grammar. Log-probabilities are then of what the form allows. min_tokens makes such an output go
    on where it might end; it ends all the same, with finish_reason "stop", where the form lets nothing follow.
    repetition_detection: where the output ends for repeating itself (RepetitionDetectionParams, or a dict of its fields), after
    min_tokens at the earliest; finish_reason is then "repetition".
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
    logprob_token_ids: Sequence[int] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    repetition_detection: RepetitionDetectionParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._set_real("temperature", 0.0, math.inf, "0 is greedy")
        self._set_real("top_p", 0.0, 1.0, "1 is off", low_open=True)
        self._set_real("min_p", 0.0, 1.0, "0 is off")
        self._set_int("n", 1)
        self._set_int("top_k", -1, "0 and -1 are off")
        self._set_int("seed", -(2**63), "or None", most=2**64 - 1, optional=True)
        self._set_int("max_tokens", 1, "None is up to the model's length", optional=True)
        self._set_int("min_tokens", 0)
        self._set_logprobs()
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
        if self.repetition_detection is not None:
            object.__setattr__(self, "repetition_detection", RepetitionDetectionParams.make(self.repetition_detection))

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

    def _set_logprobs(self) -> None:
        ids, count = self.logprob_token_ids, self.logprobs
        if ids is not None:
            _require(_are_ids(ids), f"logprob_token_ids={ids!r} must be a list of token ids in [0, 2**31), or None")
            ok = len(ids) <= MAX_LOGPROB_TOKEN_IDS
            _require(ok, f"logprob_token_ids of {len(ids)} token ids must have at most {MAX_LOGPROB_TOKEN_IDS}; leave some out")
            object.__setattr__(self, "logprob_token_ids", tuple(int(i) for i in ids) or None)
        if self.logprob_token_ids is None:
            self._set_int("logprobs", 0, "or None", most=MAX_LOGPROBS, optional=True)
            return
        asked = len(self.logprob_token_ids)
        ok = count is None or _is_int(count) and count == asked
        _require(ok, f"logprobs={count!r} must be None or {asked}, the number of logprob_token_ids, which come in its place")
        object.__setattr__(self, "logprobs", None if count is None else asked)

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
    def returns_logprobs(self) -> bool:
        """Whether the log-probability of each sampled token is asked for, with others or without."""
        return self.logprobs is not None or self.logprob_token_ids is not None

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
