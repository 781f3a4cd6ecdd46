"""What padding to buckets costs: the account of the steps that ran.

Owns the counts. Which bucket a step runs in is the plan's choice (plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxserve.buckets.plan import Bucket


@dataclass
class PaddingAccount:
    """What the steps asked for and what the buckets ran, step by step.

    tokens, samples: what they asked for: query tokens, and logits rows. padded_tokens, padded_samples: what ran beside that.
    """

    steps: dict[Bucket, int] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0
    samples: int = 0
    padded_samples: int = 0

    def add(self, bucket: Bucket, num_tokens: int, head_rows: int, num_samples: int, num_steps: int = 1) -> None:
        """Counts a step, or several of one bucket together: their demand, and the bucket and head that ran them.

        num_tokens, num_samples: what they asked for, all together. head_rows: logits rows of the heads that ran, all together.
        """
        self.steps[bucket] = self.steps.get(bucket, 0) + num_steps
        self.tokens += num_tokens
        self.padded_tokens += num_steps * bucket.tokens - num_tokens
        self.samples += num_samples
        self.padded_samples += head_rows - num_samples

    @property
    def num_steps(self) -> int:
        return sum(self.steps.values())

    @property
    def padding_share(self) -> float:
        """Padding tokens over all tokens that were run; 0 before the first step."""
        total = self.tokens + self.padded_tokens
        return self.padded_tokens / total if total else 0.0

    def by_bucket(self) -> Iterable[tuple[Bucket, int]]:
        return sorted(self.steps.items())
