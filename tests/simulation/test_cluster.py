"""Replicas behind a router against a replay of one, and what the router's policies do to them."""

import numpy as np
import pytest

from jaxserve.buckets.plan import BucketPlan
from jaxserve.routing.policy import ROUTING_POLICIES, make_policy
from jaxserve.simulation.cluster import replay_cluster
from jaxserve.simulation.pipeline import PipelineReplica
from jaxserve.simulation.replay import replay
from jaxserve.simulation.replica import Replica
from jaxserve.workloads.traffic import at_rate, shared_prefix
from jaxserve.workloads.workload import Workload, WorkloadRequest
from tests.simulation.machines import LIMITS, MODEL, random_workload

PLAN = BucketPlan((8,), ((16, 8), (64, 8)), (8,))


def make(records, prefix_caching):
    return Replica(records, PLAN, MODEL, LIMITS, 64, prefix_caching=prefix_caching)


def make_staged(records, prefix_caching):
    return PipelineReplica(records, PLAN, [MODEL, MODEL], lambda *_: 1e-4, LIMITS, 64, prefix_caching=prefix_caching)


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
@pytest.mark.parametrize("prefixes", [True, False])
def test_one_replica_is_a_replay(policy, prefixes):
    """Bit for bit, idle times, preemptions and prefix hits included, whatever the router thinks."""
    work = at_rate(shared_prefix(60, 3, 24, 8, 40, 96, 0), 12.0, 1) if prefixes else random_workload(80, 6, rate=14.0)
    one, many = replay(work, PLAN, MODEL, LIMITS, 64), replay_cluster(work, make, 1, make_policy(policy))
    for name in ("arrivals", "scheduled", "first", "last", "gaps", "gap_counts"):
        assert getattr(many.times, name).tolist() == getattr(one.times, name).tolist(), name
    assert many.stats == (one.stats,) and many.busy == pytest.approx([one.seconds.sum()]) and not many.chosen.any()
    assert one.stats.num_preemptions > 0 and (one.stats.num_hit_tokens > 0) == prefixes


@pytest.mark.parametrize("replica", [make, make_staged])
def test_all_tokens_are_served(replica):
    work = random_workload(200, 2, rate=60.0)
    ended = []
    run = replay_cluster(work, replica, 3, make_policy("least_loaded"), progress=ended.append)
    assert sum(ended) == 200 and len(ended) > 50, "requests end one after another"
    assert run.times.gap_counts.sum() == work.num_output_tokens - 200 and set(run.chosen) == {0, 1, 2}
    assert (run.times.first > run.times.arrivals).all() and not any(s.num_running or s.num_waiting for s in run.stats)


def test_replicas_share_the_load():
    """Four replicas at four times the rate serve nearly as fast as one does at one, and work as long as each other."""
    one = replay(random_workload(100, 1, rate=10.0), PLAN, MODEL, LIMITS, 256).times
    run = replay_cluster(random_workload(400, 1, rate=40.0), make, 4, make_policy("least_loaded"))
    assert np.quantile(run.times.seconds("ttft"), 0.9) < 1.5 * np.quantile(one.seconds("ttft"), 0.9)
    assert run.busy.max() < 1.2 * run.busy.min()


def test_load_counts():
    """Every fourth request is long: in turn, they all go to one of four replicas, which they overload; by load they do not."""
    sizes = [(90, 24) if i % 4 == 0 else (4, 2) for i in range(200)]
    work = Workload("every fourth", tuple(WorkloadRequest(p, o, i / 40) for i, (p, o) in enumerate(sizes)))
    late = {}
    for name in ("round_robin", "least_loaded"):
        run = replay_cluster(work, make, 4, make_policy(name))
        late[name] = run.times.seconds("ttft").max()
        assert (len(set(run.chosen[::4])) == 1) == (name == "round_robin")
    assert late["least_loaded"] < 0.5 * late["round_robin"]


def test_prefixes_stay_where_they_are_cached():
    """Sixteen groups of prompts, pools that hold the prefixes of a few: by prefix most tokens are hit, by load few."""
    work = at_rate(shared_prefix(320, 16, 48, 8, 6, 96, 0), 20.0, 1)
    hits = {}
    for name in ("prefix_aware", "least_loaded"):
        run = replay_cluster(work, make, 4, make_policy(name), block_tokens=4)
        hits[name] = sum(s.num_hit_tokens for s in run.stats) / sum(s.num_queried_tokens for s in run.stats)
    assert hits["prefix_aware"] > 1.5 * hits["least_loaded"]
    assert run.num_matched.sum() == 0


def test_bad_number():
    with pytest.raises(ValueError, match="num_replicas=0 must be at least 1"):
        replay_cluster(random_workload(2, 0), make, 0, make_policy("round_robin"))
