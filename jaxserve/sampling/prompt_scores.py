"""Log-probabilities of a prompt's own tokens: which rows of a step they come from, and which requests they belong to.

Owns the spans of a step that are scored, and their packing into the score program's fixed number of rows. outputs.PromptScores
holds the values. Each position is scored once, by the step that computes the token before it. Tokens that a preemption makes the
engine recompute are not scored again. Knows nothing of devices or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.outputs import PromptScores
from jaxserve.request import Request
from jaxserve.sampling.rows import ScoredRows
from jaxserve.scheduling.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ScoreSpan:
    """Consecutive prompt positions that one step scores: `count` of them from `position` on. The hidden rows are the step's from
    `row` on."""

    scores: PromptScores
    position: int
    row: int
    count: int


def spans_of(
    schedule: Schedule,
    token_starts: np.ndarray | None = None,  # intp[n]: where the tokens of each entry begin; None: one after the other
) -> list[ScoreSpan]:
    """The prompt positions that this step's chunks score. Call it once for each schedule: it advances `PromptScores.next`."""
    spans = []
    if schedule.num_decodes == schedule.num_seqs:
        return spans
    starts = schedule.q_lens.cumsum() - schedule.q_lens if token_starts is None else token_starts
    for i in range(schedule.num_decodes, schedule.num_seqs):
        scores, q_len = schedule.requests[i].prompt_scores, int(schedule.q_lens[i])
        if scores is not None and scores.wanted:
            start, row = int(schedule.starts[i]), int(starts[i])
            position, end = max(start + 1, scores.next), min(start + q_len + 1, len(scores.token_ids))
            assert position == scores.next, "positions before it were computed without being scored"
            if position < end:
                spans.append(ScoreSpan(scores, position, row + position - 1 - start, end - position))
                scores.next = end
    return spans


def pack_spans(spans: Sequence[ScoreSpan], num_rows: int) -> list[np.ndarray]:
    """The inputs of the score program, one i32[1 + 2 * num_rows] for each run that the spans take. Each holds whether the likeliest
    tokens are asked for, then hidden rows, then the tokens to score. Padding is token 0 with row 0."""
    rows = np.concatenate([np.arange(s.row, s.row + s.count) for s in spans])
    tokens = np.concatenate([s.scores.token_ids[s.position : s.position + s.count] for s in spans])
    with_top = any(s.scores.top_ids.shape[1] for s in spans)
    batches = []
    for at in range(0, len(rows), num_rows):
        batch = np.zeros(1 + 2 * num_rows, np.int32)
        part = rows[at : at + num_rows]
        batch[0] = with_top
        batch[1 : 1 + len(part)] = part
        batch[1 + num_rows : 1 + num_rows + len(part)] = tokens[at : at + num_rows]
        batches.append(batch)
    return batches


def deliver(spans: Sequence[ScoreSpan], rows: ScoredRows) -> None:
    """Hands the scored rows of a step to their requests. rows: those of all its batches, one after the other."""
    at = 0
    for span in spans:
        part = rows[at : at + span.count]
        span.scores.take(span.position, part.logprobs, part.ranks, part.top_ids, part.top_logprobs)
        at += span.count


def scores_of(request: Request, first: int | None) -> PromptScores | None:
    """The PromptScores that a new request needs, for prompt_logprobs or for scores from position `first` on; None where it asks for
    neither. Of several samples of one prompt, only the first has them. ValueError for a position that is not of the prompt."""
    num_top, num_tokens = request.params.prompt_logprobs, len(request.prompt_token_ids)
    if first is not None and not 1 <= first <= num_tokens:
        raise ValueError(f"score_from={first} must be in [1, {num_tokens}], the prompt's length")
    if request.sample_index or (num_top is None and first is None):
        return None
    return PromptScores(request.prompt_token_ids, 1 if num_top is not None else first or 1, num_top or 0)
