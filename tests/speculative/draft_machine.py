"""A simulated machine, on which it is known how often each row's drafts are right and how long steps take."""

from collections.abc import Callable

import numpy as np

from jaxserve.buckets.plan import BucketPlan
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.schedule import Schedule
from jaxserve.speculative.draft_lengths import DraftLengths
from jaxserve.speculative.proposer import NO_DRAFT

PLAN = BucketPlan(decode=(1, 2, 4, 8), mixed=((64, 8),), head_rows=(8, 64), draft=((1, 2), (1, 4), (4, 2), (4, 4), (8, 2), (8, 4)))
K = 4


def schedule(rows: np.ndarray, num_drafts: np.ndarray, generation: int | np.ndarray = 0) -> Schedule:
    n, q_lens = len(rows), (1 + num_drafts).astype(np.int32)
    zeros, nobody = np.zeros(n, np.int32), [Request(str(i), [1], SamplingParams()) for i in range(n)]
    return Schedule(
        0, nobody, rows, q_lens, zeros, zeros, np.ones(n, bool), np.full(n, generation), np.zeros((0, 3), np.int32),
        n, int(q_lens.sum()), int(q_lens.max()), int(num_drafts.sum()),
    )  # fmt: skip


class Machine:
    """Sequences whose next draft is right at a rate of their own, on a device whose step takes a base and a time a token."""

    def __init__(
        self,
        rates: list[float],
        per_token: float,
        max_num_batched_tokens: int = 64,
        queued: bool = True,
        drafting: float = 0.0,
        slowed: Callable[[int, int, bool], float] = lambda step, num_drafts, proposes: 1.0,
        plan: BucketPlan = PLAN,
        **options,
    ):
        self.queued, self.drafting, self.slowed = queued, drafting, slowed  # drafting: what it adds to a step
        self.alone = True  # no prompts beside the decodes
        self.lengths = DraftLengths(plan, 8, max_num_batched_tokens, K, **options)
        self.rates, self.per_token, self.rng = np.array(rates), per_token, np.random.default_rng(0)
        self.rows: np.ndarray = np.arange(len(rates))
        self.generation: int | np.ndarray = 0  # of each row, or of all
        self.num_tokens, self.seconds, self.clock = 0, 0.0, 0.0
        self.lengths_seen: list[int] = []
        self.proposed: list[bool] = []
        self._row_tokens: list[np.ndarray] = []
        self.row_seconds: list[float] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            chosen = self.lengths.choose(self.rows, explore=self.alone, queued=self.queued)
            step = schedule(self.rows, chosen, self.generation)
            counts = np.array([1 + self._accepted(i, k) for i, k in enumerate(chosen)], np.int32)
            first_right = np.where(chosen > 0, counts > 1, self.rng.random(len(counts)) < self.rates)
            self.lengths.proposed[self.rows] = np.where(first_right, 7, 8)[:, None]
            tokens = np.full((len(counts), 1 + K), 7, np.int32)
            proposes = self.lengths.proposes
            if self.proposed and not self.proposed[-1]:
                assert not chosen.any(), "there are no drafts to verify"
                self.lengths.proposed[self.rows] = NO_DRAFT
            drafts = np.full((step.num_tokens, K), 0 if proposes else NO_DRAFT, np.int32)
            self.lengths.take_tokens(step, tokens, counts, drafts)
            bucket, _ = self.lengths.shape(step.num_tokens, step.num_seqs, step.max_q_len)
            seconds = 1 + self.per_token * bucket.tokens + self.drafting * proposes
            noisy = (
                seconds
                * self.slowed(len(self.proposed), int(chosen.max()), proposes)
                * (1 + (self.rng.random() < 0.1) * self.rng.random())
            )  # the machine does other things too
            self.clock += noisy
            if self.alone:
                self.lengths.take_time(step, self.clock - noisy - 0.5, self.clock, proposes)  # dispatched while the one before ran
            self.proposed.append(proposes)
            self.num_tokens, self.seconds = self.num_tokens + int(counts.sum()), self.seconds + seconds
            self.lengths_seen.append(int(chosen.max()))
            self._row_tokens.append(counts)
            self.row_seconds.append(seconds)

    @property
    def row_tokens(self) -> np.ndarray:  # [steps, rows]
        return np.stack(self._row_tokens)

    def _accepted(self, i: int, k: int) -> int:
        wrong = np.flatnonzero(self.rng.random(k) >= self.rates[i])
        return int(wrong[0]) if len(wrong) else int(k)

    @property
    def gain(self) -> float:
        """Tokens a second over those of plain steps."""
        n = len(self.rows)
        plain = 1 + self.per_token * PLAN.select(n, n, 1).tokens
        return self.num_tokens / self.seconds / (n / plain)
