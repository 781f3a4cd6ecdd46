"""What passes between the scheduler and the rest in one step: Schedule going out, StepResult coming back, SchedulerStats.

Owns the two parts of which a Schedule is made, decodes and chunks, and no behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxserve.request import Request


@dataclass(slots=True)
class Schedule:
    """One step's work, with an entry for each scheduled sequence: decodes first, in running order, then chunks of prompts. n is the
    number of entries. Don't change it: lists and arrays may be shared between steps.

    requests: the owner of each entry. It may lose its row, or finish, while the step is in flight.
    rows: the row of each.
    q_lens: tokens of each in this step: 1 + drafts for a decode, or the tokens of a chunk.
    starts: the position of each entry's first token. With drafts in flight it is an upper bound, otherwise exact.
    least_starts: a lower bound of that position.
    samples: whether the sequence samples in this step (False for a chunk that does not end its prompt).
    generations: which owner of the row this is (SequenceRows.generation).
    page_updates: (row, column, page) of each page-table entry that changed since the last schedule.
    num_decodes: how many entries decode. Their first token is the one that the device sampled last, and their drafts are what the
        device proposed after it. The tokens of the other entries are request.token_ids[start : start + q_len], to be read before
        `update` is called again.
    num_drafts: drafts of all entries.
    """

    step_id: int
    requests: list[Request]
    rows: np.ndarray  # intp[n]
    q_lens: np.ndarray  # i32[n]
    starts: np.ndarray  # i32[n]
    least_starts: np.ndarray  # i32[n]
    samples: np.ndarray  # bool[n]
    generations: np.ndarray  # i64[n]
    page_updates: np.ndarray  # i32[m, 3]
    num_decodes: int
    num_tokens: int
    max_q_len: int
    num_drafts: int = 0
    _logits_rows: LogitsRows | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def logits_rows(self) -> LogitsRows:
        """The rows that get logits; computed once."""
        if self._logits_rows is None:
            self._logits_rows = LogitsRows.of(self)
        return self._logits_rows

    @property
    def num_seqs(self) -> int:
        return len(self.requests)

    def decodes(self) -> Iterator[tuple[Request, int, int]]:
        """(request, row, 1 + drafts) of each entry that decodes."""
        d = self.num_decodes
        return zip(self.requests[:d], self.rows[:d].tolist(), self.q_lens[:d].tolist(), strict=True)


@dataclass(slots=True)
class LogitsRows:
    """The logits rows of a step: R rows of the E entries that sample. An entry has one row, after its last token. A decode with
    drafts has one row after each of its 1 + drafts tokens, in order.

    tokens: for each row, the index of the token that it follows, among the step's tokens.
    rows: the sequence row of each.
    entries: the entries of the schedule that sample.
    counts, firsts: how many rows each of these entries has, and the index of its first.
    """

    tokens: np.ndarray  # intp[R]
    rows: np.ndarray  # intp[R]
    entries: np.ndarray  # intp[E]
    _counts: np.ndarray | None = None  # None: one row an entry; the arrays are made when first read, which is seldom
    _firsts: np.ndarray | None = None

    @property
    def counts(self) -> np.ndarray:  # intp[E]
        """How many rows each entry has."""
        if self._counts is None:
            self._counts = np.ones(len(self.entries), np.intp)
        return self._counts

    @property
    def firsts(self) -> np.ndarray:  # intp[E]
        """The index of each entry's first row."""
        if self._firsts is None:
            self._firsts = np.arange(len(self.entries))
        return self._firsts

    @classmethod
    def of(cls, schedule: Schedule) -> LogitsRows:
        """Of one schedule."""
        entries = schedule.samples.nonzero()[0]
        if schedule.num_tokens == len(entries):  # every entry is one token, and samples
            return cls(entries, schedule.rows, entries)
        ends, rows = np.cumsum(schedule.q_lens) - 1, schedule.rows
        if len(entries) < schedule.num_seqs:
            ends, rows = ends[entries], rows[entries]
        if not schedule.num_drafts:
            return cls(ends, rows, entries)
        counts = schedule.q_lens.astype(np.intp)
        if schedule.num_decodes < schedule.num_seqs:
            counts[schedule.num_decodes :] = 1
            counts = counts[entries]
        past = np.cumsum(counts)
        firsts = past - counts
        tokens = np.arange(past[-1])
        if len(tokens) < schedule.num_tokens:  # beside chunks
            tokens += np.repeat(ends + 1 - past, counts)
        return cls(tokens, np.repeat(rows, counts), entries, counts, firsts)

    def __len__(self) -> int:
        return len(self.rows)

    def by_request(self, schedule: Schedule) -> list[tuple[Request, int]]:
        """The requests that sample, each with its first row."""
        return [(schedule.requests[i], first) for i, first in zip(self.entries.tolist(), self.firsts.tolist(), strict=True)]


@dataclass(slots=True)
class Decodes:
    """The decodes of a step that is being composed. preempted: whether a running request gave up its pages for them."""

    rows: np.ndarray  # intp[n]
    starts: np.ndarray  # i32[n]
    q_lens: np.ndarray  # i32[n]: 1 + drafts
    num_tokens: int = 0
    preempted: bool = False


NO_DECODES = Decodes(np.zeros(0, np.intp), np.zeros(0, np.int32), np.zeros(0, np.int32))


@dataclass(slots=True)
class Chunks:
    """The chunks of prompts of a step that is being composed, as parallel lists."""

    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_tokens: int = 0


def join(
    decodes: Decodes,
    chunks: Chunks,
    requests: list[Request],  # of the decodes
    true: np.ndarray,  # bool[>= n], all True
) -> tuple[list[Request], np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(requests, rows, starts, q_lens, samples) of a Schedule: the decodes' entries, then the chunks'."""
    rows, starts, q_lens, samples = decodes.rows, decodes.starts, decodes.q_lens, true[: len(requests)]
    if chunks.requests:
        requests = requests + chunks.requests
        rows = np.concatenate([rows, np.array(chunks.rows, np.intp)])
        starts = np.concatenate([starts, np.array(chunks.starts, np.int32)])
        q_lens = np.concatenate([q_lens, np.array(chunks.q_lens, np.int32)])
        samples = np.concatenate([samples, np.array(chunks.samples, bool)])
    return requests, rows, starts, q_lens, samples


@dataclass(slots=True)
class StepResult:
    """The output tokens that a step brought: `tokens[i]` is a new token of `requests[i]`, in order for each request.

    A request is listed once for each of its tokens: several times where drafts were accepted, and not at all if it had finished
    before. Tokens after a stop are left out. `finished`: the requests that these tokens finished, with finish_reason and
    stop_reason set.
    """

    requests: list[Request]
    tokens: list[int]
    finished: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts since the scheduler was made, and how many requests run and wait now.

    num_discarded_rows: entries that sampled for a request which had finished by the time their tokens came back.
    num_queried_tokens: tokens of admitted requests that were looked up in the prefix cache. A request counts once an admission,
    however often admission was tried.
    num_hit_tokens: how many of them were found there.
    num_held: of those waiting, requests that wait for a grammar, for another sample's prompt or for a store's pages.
    """

    num_steps: int
    num_scheduled_tokens: int
    num_preemptions: int
    num_discarded_rows: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_running: int
    num_waiting: int
    num_held: int = 0
