"""A plan without padding: every step runs in its own shape, as engines do that launch kernels for the tokens there are.

Owns the part of BucketPlan that a scheduler, a dynamic budget and a replay ask, for shapes that nobody compiled. What uneven shapes
cost is then the step times' business (tiles, waves).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from jaxserve.buckets.plan import Bucket


@functools.lru_cache(2**16)
def _bucket(num_tokens: int, num_seqs: int, is_mixed: bool) -> Bucket:
    return Bucket(num_tokens, num_seqs, num_tokens if is_mixed else 1)


@dataclass(frozen=True)
class UnpaddedPlan:
    """max_num_batched_tokens, max_num_seqs: the largest step. granularity: the multiples of tokens that a dynamic budget chooses
    from."""

    max_num_batched_tokens: int
    max_num_seqs: int
    granularity: int = 64

    def __post_init__(self) -> None:
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.granularity) < 1:
            raise ValueError(f"{self} must have sizes of at least 1")

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The shapes that a dynamic budget chooses from."""
        sizes = [*range(self.granularity, self.max_num_batched_tokens, self.granularity), self.max_num_batched_tokens]
        return tuple(Bucket(t, min(t, self.max_num_seqs), t) for t in sizes)

    @property
    def head_rows(self) -> tuple[int, ...]:
        return tuple(range(1, self.max_num_seqs + 1))

    def select(self, num_tokens: int, num_seqs: int, max_q_len: int) -> Bucket:
        """The step's own shape; all chunks' lengths are one bucket's."""
        return _bucket(num_tokens, num_seqs, max_q_len > 1)

    def select_head_rows(self, num_rows: int) -> int:
        return num_rows

    def check(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """ValueError unless every step that a scheduler of these limits can make is within this plan's."""
        if max_num_seqs > self.max_num_seqs or max_num_batched_tokens > self.max_num_batched_tokens:
            raise ValueError(f"{max_num_batched_tokens=} and {max_num_seqs=} exceed {self}; make the plan for them")
