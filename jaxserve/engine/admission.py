"""Whether what a request brings can be served at all: the kinds of its arguments, its token ids, its place in the queue. Knows
nothing of budgets, pages or the other requests."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from jaxserve.sampling_params import MAX_SUPPRESSED_IDS, SamplingParams


def check_kinds(request_id: object, params: object, score_from: object = None) -> None:
    """TypeError for an argument of another kind, which would break the step that meets it and with it every request."""
    if not isinstance(request_id, str):
        raise TypeError(f"{request_id=} must be a string")
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{params=} must be SamplingParams")
    if score_from is not None and (not isinstance(score_from, numbers.Integral) or isinstance(score_from, bool)):
        raise TypeError(f"{score_from=} must be an integer, a position of the prompt")


def check_future(grammar: object) -> None:
    """TypeError for a grammar that nobody compiles."""
    if grammar is not None and not isinstance(grammar, Future):
        raise TypeError(f"{grammar=} must be a Future, as GrammarCompiler.submit returns it")


def check_ids(prompt_token_ids: Sequence[int], params: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
    """ValueError for token ids that are none, or more of them than the device has room for."""
    try:
        ids = np.asarray(prompt_token_ids)
    except ValueError as error:
        raise ValueError("prompt_token_ids must be a flat list of integers, got lists of unequal lengths") from error
    if ids.size and (ids.dtype.kind not in "iu" or ids.ndim != 1):
        raise ValueError(f"prompt_token_ids must be a flat list of integers, got {ids.dtype} of shape {ids.shape}")
    if params.bad_words is not None:
        raise ValueError(f"bad_words={params.bad_words!r} are texts, and the engine has no tokenizer: give bad_words_token_ids")
    named = {
        "prompt": ids,
        "stop": params.stop_token_ids or (),
        "logit_bias": list(params.logit_bias or ()),
        "allowed": params.allowed_token_ids or (),
        "logprob": params.logprob_token_ids or (),
        "bad word's": [i for sequence in params.bad_words_token_ids or () for i in sequence],
    }
    for name, values in named.items():
        values = np.asarray(values, np.int64)
        bad = values[(values < 0) | (values >= vocab_size)]
        if bad.size:
            raise ValueError(f"{name} token id {int(bad[0])} is out of vocabulary [0, {vocab_size})")
    stops = (frozenset() if params.ignore_eos else eos_token_ids) | set(params.stop_token_ids or ())
    if params.min_tokens and len(stops) > MAX_SUPPRESSED_IDS:
        raise ValueError(
            f"min_tokens={params.min_tokens} can hold back at most {MAX_SUPPRESSED_IDS} stop ids, eos included; got {len(stops)}"
        )


def check_priority(priority: object) -> None:
    """ValueError for a priority that no queue can be sorted by."""
    if not isinstance(priority, numbers.Integral) or isinstance(priority, bool):
        raise ValueError(f"{priority=} must be an integer; lower is served first")


def check_arrival(arrival: object) -> None:
    """ValueError for a time of arrival that no queue can be sorted by."""
    if not isinstance(arrival, numbers.Real) or isinstance(arrival, bool) or not math.isfinite(arrival):
        raise ValueError(f"{arrival=} must be a finite number, in seconds")
