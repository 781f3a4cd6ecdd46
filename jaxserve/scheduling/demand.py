"""What a step asks for, whatever bucket runs it: the numbers that padding and step time depend on.

Owns their definition, for one step and for a log of many. Knows no bucket, device or time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxserve.scheduling.schedule import Schedule


class StepDemand(NamedTuple):
    """What one step asks for.

    tokens: query tokens.
    seqs, decodes: sequences, and how many of them decode.
    max_q_len: most tokens of one sequence; 1 where the step has decodes without drafts only.
    samples: logits rows, one for each sequence that samples and one for each draft.
    kv_tokens: positions of KV that the decodes read, in whole pages.
    pairs: (query, key) pairs that the chunks of prompts attend to.
    """

    tokens: int
    seqs: int
    decodes: int
    max_q_len: int
    samples: int
    kv_tokens: int
    pairs: int


COLUMNS = StepDemand._fields


def step_demand(schedule: Schedule, page_size: int, window: int | None = None) -> StepDemand:
    """The demand of a step. window: positions that a query sees, its own included. None: all of them."""
    d = schedule.num_decodes
    lens = schedule.starts[:d] + schedule.q_lens[:d]
    pages = ((lens if window is None else np.minimum(lens, window)) + page_size - 1) // page_size
    pairs = 0
    if d < schedule.num_seqs:
        starts, q_lens = schedule.starts[d:].astype(np.int64), schedule.q_lens[d:].astype(np.int64)
        pairs = int(_num_pairs(starts, starts + q_lens, window).sum())
    samples, kv_tokens = len(schedule.logits_rows), int(pages.sum()) * page_size
    return StepDemand(schedule.num_tokens, schedule.num_seqs, d, schedule.max_q_len, samples, kv_tokens, pairs)


def _num_pairs(
    starts: np.ndarray,  # i64[n]
    ends: np.ndarray,  # i64[n]
    window: int | None,
) -> np.ndarray:
    """i64[n]: the keys that the queries at positions [start, end) see, one more each until the window is full."""
    if window is None:
        return (ends * (ends + 1) - starts * (starts + 1)) // 2
    low, high = np.minimum(starts, window), np.minimum(ends, window)
    return (high * (high + 1) - low * (low + 1)) // 2 + (ends - starts - (high - low)) * window


@dataclass(frozen=True)
class DemandLog:
    """The demands of consecutive steps, an array for each field of `StepDemand`."""

    tokens: np.ndarray  # i64[n], like all of them
    seqs: np.ndarray
    decodes: np.ndarray
    max_q_len: np.ndarray
    samples: np.ndarray
    kv_tokens: np.ndarray
    pairs: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[StepDemand]) -> DemandLog:
        """From the demand of each step."""
        return cls(*np.array(rows, np.int64).reshape(-1, len(COLUMNS)).T)

    @classmethod
    def load(cls, path: str | Path) -> DemandLog:
        """From the file that an engine wrote with its option demand_log. ValueError names a line that is not one of its records."""
        rows: list[StepDemand] = []
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            try:
                record = json.loads(line)
                rows.append(StepDemand(*(int(record[name]) for name in COLUMNS)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a record of a demand log ({error!r})") from None
        if not rows:
            raise ValueError(f"{path} is an empty demand log; serve a workload with demand_log set first")
        return cls.from_rows(rows)

    @classmethod
    def concatenate(cls, logs: Sequence[DemandLog]) -> DemandLog:
        """One after the other."""
        return cls(*(np.concatenate([getattr(log, name) for log in logs]) for name in COLUMNS))

    def __len__(self) -> int:
        return len(self.tokens)
