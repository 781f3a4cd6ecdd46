"""What a step brings, and what the engine counts: EngineOutput, EngineStats. Knows nothing of how either comes about."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxserve.buckets import PaddingAccount
from jaxserve.request import Logprob, Request
from jaxserve.sampling_rows import SampledRows


@dataclass(slots=True)
class EngineOutput:
    """What one step brought for one sample of a request.

    logprobs: {token id: Logprob} for each new token, the sampled token first; None unless asked for.
    finish_reason, stop_reason: as CompletionOutput's; None while it runs.
    """

    request: Request
    new_token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class EngineStats:
    """Counts since the engine was made; `padding` by bucket, times in seconds."""

    num_steps: int = 0
    prefill_tokens: int = 0  # of prompts, and of outputs recomputed after a preemption
    generated_tokens: int = 0
    padding: PaddingAccount = field(default_factory=PaddingAccount)
    sorted_rows: int = 0  # rows whose filters needed a sort of the whole vocabulary
    bad_rows: int = 0  # rows that ended for logits that are not numbers


def logprobs_of(sampled: SampledRows, row: int, n: int) -> dict[int, Logprob]:
    """The sampled token of a row and its n likeliest alternatives."""
    assert sampled.logprobs is not None and sampled.ranks is not None
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    found = {int(sampled.tokens[row]): Logprob(float(sampled.logprobs[row]), int(sampled.ranks[row]))}
    for i in range(n):
        if sampled.top_logprobs[row, i] == -np.inf:
            break  # a grammar allows fewer
        found.setdefault(int(sampled.top_ids[row, i]), Logprob(float(sampled.top_logprobs[row, i]), i + 1))
    return found
