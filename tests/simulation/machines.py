"""Step-time models and workloads that tests of the simulation plan with: round numbers, no device."""

import numpy as np

from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.demand import DemandLog, StepDemand
from jaxserve.simulation.tuning import Machine
from jaxserve.step_times.fitted import BucketTimes, StepTimeModel
from jaxserve.workloads.workload import Workload, WorkloadRequest

PAGE, SEQS, TOKENS = 4, 8, 64
MODEL = StepTimeModel(
    times=(
        BucketTimes(1, 1, 1, 1e-3, 1e-6, 0.0, 1.0, 100),
        BucketTimes(8, 8, 1, 3e-3, 1e-6, 0.0, 1.0, 100),
        BucketTimes(4, 4, 4, 4e-3, 2e-6, 1e-6, 2.0, 200),
        BucketTimes(8, 8, 8, 5e-3, 2e-6, 1e-6, 2.0, 200),
        BucketTimes(64, 4, 64, 60e-3, 2e-6, 1e-6, 2.0, 1600),
        BucketTimes(64, 8, 64, 70e-3, 3e-6, 1e-6, 2.0, 1600),
    ),
    heads=((2, 1e-3), (8, 2e-3)),
    levels=(4, 8),
    page_size=PAGE,
)
LIMITS = SchedulerConfig(max_model_len=128, max_num_batched_tokens=TOKENS, max_num_seqs=SEQS)
MACHINE = Machine(MODEL, LIMITS, num_pages=256, multiple=2)


def random_workload(n: int, seed: int, rate: float | None = None) -> Workload:
    rng = np.random.default_rng(seed)
    lengths = np.stack([np.minimum(90, rng.lognormal(3, 0.8, n).astype(int) + 1), rng.integers(1, 25, n)], axis=1).tolist()
    times = np.cumsum(rng.exponential(1 / rate, n)).tolist() if rate else [0.0] * n
    return Workload("random", tuple(WorkloadRequest(p, o, t) for (p, o), t in zip(lengths, times, strict=True)))


def random_demands(n: int, seed: int) -> DemandLog:
    """Steps within LIMITS, decodes alone or chunks beside decodes."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        decodes = int(rng.integers(0, SEQS))
        chunk = int(rng.integers(1, TOKENS - decodes + 1)) if not decodes or rng.random() < 0.6 else 0
        seqs = decodes + (chunk > 0)
        kv, pairs = decodes * int(rng.integers(1, 20)) * PAGE, chunk * (chunk + 1) // 2
        # One chunk of one token is a decode to the buckets.
        rows.append(StepDemand(decodes + chunk, seqs, decodes, max(1, chunk), seqs, kv, pairs))
    return DemandLog.from_rows(rows)
