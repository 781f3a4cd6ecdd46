"""How many drafts each sequence verifies in the next step, and the books on how drafts fared.

Owns the host's mirror of what the device proposed, and what is learnt from it: how often drafts stand, row by row, verified or not,
and how long steps of each bucket take. The scheduler asks while it composes a step. Knows nothing of tokens' values but whether a
draft was right.
"""

from __future__ import annotations

import numpy as np

from jaxserve.buckets import BucketPlan


class DraftLengths:
    """Always `num_drafts`.

    max_rows: logits rows that a step may have.
    """

    def __init__(self, plan: BucketPlan, max_num_seqs: int, num_drafts: int):
        self.plan, self.max_rows, self.num_drafts = plan, plan.max_head_rows, num_drafts
        self.proposed = np.full((max_num_seqs, num_drafts), -1, np.int32)  # what follows each row's last token, by the device

    def choose(
        self,
        rows: np.ndarray,  # intp[n]: those that decode
    ) -> np.ndarray:  # i32[n]
        return np.full(len(rows), self.num_drafts, np.int32)
