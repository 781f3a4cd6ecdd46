"""What the simulator makes of two servers that do both, and of one for prompts and one for output; what servers say of their KV.

Owns the simulated half of scripts.bench_roles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from jaxserve.buckets.plan import BucketPlan
from jaxserve.routing.policy import make_policy
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.simulation.cluster import replay_cluster
from jaxserve.simulation.replica import Replica
from jaxserve.simulation.roles import DecodeReplica, KVLink, replay_roles
from jaxserve.step_times.fitted import StepTimes
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import Workload


@dataclass(frozen=True)
class KVSeconds:
    """What a token's KV takes. latency: seconds of a load beside its tokens'."""

    save: float
    load: float
    latency: float


def expected(
    step_times: StepTimes, limits: SchedulerConfig, num_pages: int, workload: Workload, kv: KVSeconds
) -> dict[str, ServedTimes]:
    """Of "together" and "apart". step_times: of one server. limits, num_pages: of every server."""
    most = limits.max_num_batched_tokens
    plan = BucketPlan.default(limits.max_num_seqs, most, min_tokens=2, max_draft_tokens=64)  # an engine's on a CPU
    engine, policy = (plan, step_times, limits, num_pages), partial(make_policy, "least_loaded")
    together = replay_cluster(workload, lambda r, p: Replica(r, *engine, prefix_caching=p), 2, policy())
    apart = replay_roles(
        workload,
        lambda r, p: Replica(r, *engine, prefix_caching=p),
        lambda r, told: DecodeReplica(r, *engine, told=told, link=KVLink(kv.latency, kv.load)),
        1,
        1,
        policy,
        lambda num_tokens: min(num_tokens, most) * kv.save,  # the pages of its last step: the others are saved behind later steps
        min_prefill_tokens=0,
    )
    return {"together": together.times, "apart": apart.times}


def sum_of(metrics: str, name: str) -> float:
    """The sum over its labels of a metric of ours in Prometheus' text."""
    lines = [line for line in metrics.splitlines() if re.match(rf"jaxserve:{name}(_total)?({{| )", line)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def seconds_a_token(metrics: Mapping[str, str], page_size: int) -> tuple[float, float]:
    """What a token's KV took the stores: (to be saved, to be loaded). metrics: of the servers "prefill" and "decode"; 0 where no
    page passed."""
    found = []
    for server, pages, seconds in (("prefill", "pages_written", "write_seconds"), ("decode", "pages_read", "read_seconds")):
        num_tokens = page_size * sum_of(metrics[server], f"kv_store_{pages}")
        found.append(sum_of(metrics[server], f"kv_store_{seconds}") / num_tokens if num_tokens else 0.0)
    return found[0], found[1]
