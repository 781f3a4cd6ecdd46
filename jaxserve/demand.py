"""What a step asks for, whatever bucket runs it: the numbers that padding and step time depend on.

Owns their definition, for one step and for a log of many. Knows no bucket, device or time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxserve.schedule import Schedule

COLUMNS = ("tokens", "seqs", "decodes", "max_q_len", "samples", "kv_tokens", "pairs")


def step_demand(schedule: Schedule, page_size: int) -> tuple[int, int, int, int, int, int, int]:
    """One step's COLUMNS.

    tokens, seqs, decodes: query tokens, sequences, and those of them that decode. max_q_len: the longest chunk (1: decodes alone).
    samples: sequences that sample. kv_tokens: positions of KV that the decodes read, whole pages. pairs: (query, key) pairs that
    the chunks of prompts attend to.
    """
    d = schedule.num_decodes
    pages = (schedule.starts[:d] + schedule.q_lens[:d] + page_size - 1) // page_size
    pairs = 0
    if d < schedule.num_seqs:
        starts, q_lens = schedule.starts[d:].astype(np.int64), schedule.q_lens[d:].astype(np.int64)
        pairs = int((q_lens * starts + q_lens * (q_lens + 1) // 2).sum())
    samples, kv_tokens = int(schedule.samples.sum()), int(pages.sum()) * page_size
    return schedule.num_tokens, schedule.num_seqs, d, schedule.max_q_len, samples, kv_tokens, pairs


@dataclass(frozen=True)
class DemandLog:
    """The demands of consecutive steps, an array a column, as `step_demand` defines them."""

    tokens: np.ndarray  # i64[n], like all of them
    seqs: np.ndarray
    decodes: np.ndarray
    max_q_len: np.ndarray
    samples: np.ndarray
    kv_tokens: np.ndarray
    pairs: np.ndarray

    @classmethod
    def from_rows(cls, rows: list[tuple[int, ...]]) -> DemandLog:
        """From the tuples of `step_demand`."""
        return cls(*np.array(rows, np.int64).reshape(-1, len(COLUMNS)).T)

    @classmethod
    def load(cls, path: str | Path) -> DemandLog:
        """From the file that an engine wrote with its option demand_log. ValueError names a line that is not one of its records."""
        rows = []
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            try:
                record = json.loads(line)
                rows.append(tuple(int(record[name]) for name in COLUMNS))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a record of a demand log ({error!r})") from None
        if not rows:
            raise ValueError(f"{path} is an empty demand log; serve a workload with demand_log set first")
        return cls.from_rows(rows)

    def __len__(self) -> int:
        return len(self.tokens)
