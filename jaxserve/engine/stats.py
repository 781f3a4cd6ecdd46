"""What the engine counts, and a step's sampled rows read as tokens and log-probabilities."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from jaxserve.batching.layout import StepInputs
from jaxserve.buckets.padding import PaddingAccount
from jaxserve.kv_store.tier import TierStats
from jaxserve.outputs import Logprob
from jaxserve.sampling.rows import SampledRows
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.schedule import Schedule, StepResult
from jaxserve.speculative.draft_lengths import DraftOutcomes


@dataclass
class KVStoreStats:
    """Counts of a store of KV since the engine was made. Tokens are those of whole pages.

    num_queried_tokens: looked up in the store, behind what the prefix cache had. num_hit_tokens: of these, loaded.
    num_failed_loads: that brought fewer pages than were found, or came too late. num_skipped_tokens: computed, and not saved, since
    nothing that was saved is hit. save_share: of the requests, whose pages are saved now. save_seconds: that saving has cost where
    steps run: measured of the threads, estimated of `take`. hit_gain_seconds: that loads were faster than steps. tiers: nearest
    first.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_failed_loads: int = 0
    num_skipped_tokens: int = 0
    save_share: float = 1.0
    save_seconds: float = 0.0
    hit_gain_seconds: float = 0.0
    tiers: tuple[TierStats, ...] = ()


@dataclass
class EngineStats:
    """Counts since the engine was made; `padding` by bucket, times in seconds.

    Speculation's have vLLM's names: num_drafts counts sequences and steps with drafts, num_draft_tokens the tokens drafted and
    verified, num_accepted_tokens those of them that were output; _per_pos: by their place among a step's drafts.
    steps_by_num_drafts: steps that held decodes, by the most drafts that one of them verified (`padding` has them by bucket).
    """

    num_steps: int = 0
    prefill_tokens: int = 0  # of prompts, and of outputs recomputed after a preemption
    generated_tokens: int = 0
    padding: PaddingAccount = field(default_factory=PaddingAccount)
    sorted_rows: int = 0  # rows whose filters needed a sort of the whole vocabulary
    bad_rows: int = 0  # rows that ended for logits that are not numbers
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    steps_by_num_drafts: Counter[int] = field(default_factory=Counter)
    num_weight_updates: int = 0
    kv_store: KVStoreStats | None = None  # None: there is none

    @property
    def draft_summary(self) -> str:
        """One line on how many drafts were accepted and how many steps had how many; "" if there were none."""
        if not self.num_drafts:
            return ""
        per_step = f"{self.num_draft_tokens / self.num_drafts:.1f} drafts a sequence and step"
        accepted = f"{100 * self.num_accepted_tokens / self.num_draft_tokens:.0f}% of {self.num_draft_tokens} accepted"
        steps = ", ".join(f"{n} with {k}" for k, n in sorted(self.steps_by_num_drafts.items()))
        return f"{per_step}, {accepted}; steps by drafts a sequence: {steps}"

    def add_step(self, schedule: Schedule, inputs: StepInputs, *, speculates: bool) -> None:
        """Counts a step that is about to run."""
        self.num_steps += 1
        self.padding.add(inputs.bucket, inputs.num_tokens, inputs.head_rows, inputs.num_samples)
        self.prefill_tokens += schedule.num_tokens - schedule.num_decodes - schedule.num_drafts
        if speculates and schedule.num_decodes:
            self.steps_by_num_drafts[int(schedule.q_lens[: schedule.num_decodes].max()) - 1] += 1

    def add_drafts(self, schedule: Schedule, outcomes: DraftOutcomes, result: StepResult, *, any_ended: bool) -> None:
        """Counts the drafts of one step, here and with their requests. `result`: what the step brought; a draft that stood past a
        stop, or behind a bad row, is none of it and does not count as accepted.

        any_ended: whether the step ended requests, by its tokens or by bad rows. While it is False, no request is asked.
        """
        requests, accepted = [schedule.requests[i] for i in outcomes.entries.tolist()], outcomes.num_accepted
        if any_ended:
            ended = [i for i, request in enumerate(requests) if request.finished]
            accepted, num_delivered = accepted.copy(), Counter(map(id, result.requests))
            for i in ended:
                accepted[i] = min(accepted[i], num_delivered[id(requests[i])])
        per_pos = self.num_accepted_tokens_per_pos
        at_least = np.bincount(accepted)[::-1].cumsum()[-2::-1].tolist()  # requests with so many accepted tokens or more: 1, 2, ...
        per_pos += [0] * (len(at_least) - len(per_pos))
        for i, n in enumerate(at_least):
            per_pos[i] += n
        self.num_drafts += len(requests)
        self.num_draft_tokens += int(outcomes.num_drafts.sum())
        self.num_accepted_tokens += int(accepted.sum())
        for request, num_drafts, num_accepted in zip(requests, outcomes.num_drafts.tolist(), accepted.tolist()):  # noqa: B905
            metrics = request.metrics
            if metrics is not None:
                metrics.num_drafts += 1
                metrics.num_draft_tokens += num_drafts
                metrics.num_accepted_tokens += num_accepted


def logprobs_of(sampled: SampledRows, row: int, params: SamplingParams) -> dict[int, Logprob]:
    """The sampled token of a row, and its likeliest alternatives or the tokens that were asked for, which have no rank."""
    assert sampled.logprobs is not None and sampled.ranks is not None
    assert sampled.top_ids is not None and sampled.top_logprobs is not None and sampled.given is not None
    found = {int(sampled.tokens[row]): Logprob(float(sampled.logprobs[row]), int(sampled.ranks[row]))}
    if params.logprob_token_ids is not None:
        given = sampled.given[row, : len(params.logprob_token_ids)]
        for token, logprob in zip(params.logprob_token_ids, given.tolist(), strict=True):
            found.setdefault(token, Logprob(logprob))
        return found
    for i in range(params.logprobs or 0):
        if sampled.top_logprobs[row, i] == -np.inf:
            break  # a grammar allows fewer
        found.setdefault(int(sampled.top_ids[row, i]), Logprob(float(sampled.top_logprobs[row, i]), i + 1))
    return found


def tokens_of(schedule: Schedule, sampled: SampledRows | None) -> tuple[np.ndarray, np.ndarray | None]:
    """A step's rows as `Scheduler.update` takes them: i32[n] and None, or where there are drafts i32[n, 1 + K] and i32[n]."""
    if not schedule.num_drafts:
        tokens = np.zeros(schedule.num_seqs, np.int32)
        if sampled is not None:
            tokens[schedule.samples] = sampled.tokens
        return tokens, None
    assert sampled is not None and sampled.delivered is not None
    logits = schedule.logits_rows
    tokens = np.zeros((schedule.num_seqs, int(logits.counts.max())), np.int32)
    counts = np.zeros(schedule.num_seqs, np.int32)
    place = np.arange(len(logits)) - np.repeat(logits.firsts, logits.counts)
    tokens[np.repeat(logits.entries, logits.counts), place] = sampled.tokens
    counts[logits.entries] = np.add.reduceat(sampled.delivered, logits.firsts, dtype=np.int32)
    return tokens, counts
