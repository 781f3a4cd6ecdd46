"""Prefill and decode replicas in virtual time: nothing is lost between them, and times are those of their parts."""

import numpy as np
import pytest

from jaxserve.buckets.plan import BucketPlan
from jaxserve.routing.policy import make_policy
from jaxserve.simulation.cluster import replay_cluster
from jaxserve.simulation.failures import Failure
from jaxserve.simulation.replay import replay
from jaxserve.simulation.replica import Replica
from jaxserve.simulation.roles import DecodeReplica, KVLink, RolesReplay, replay_roles
from jaxserve.workloads.workload import Workload, WorkloadRequest
from tests.simulation.machines import LIMITS, MODEL, PAGE, random_workload

PLAN = BucketPlan((8,), ((16, 8), (64, 8)), (8,))
FAST = KVLink(0.0, 0.0)


def run(
    work, num_prefill=1, num_decode=1, link=FAST, *, save=lambda n: 0.0, num_pages=256, least=1, made=None, failures=()
) -> RolesReplay:
    def prefill(records, prefix_caching):
        return Replica(records, PLAN, MODEL, LIMITS, num_pages, prefix_caching=prefix_caching)

    def decode(records, told):
        replica = DecodeReplica(records, PLAN, MODEL, LIMITS, num_pages, told=told, link=link)
        if made is not None:
            made.append(replica)
        return replica

    policy = lambda: make_policy("least_loaded")  # noqa: E731
    return replay_roles(work, prefill, decode, num_prefill, num_decode, policy, save, min_prefill_tokens=least, failures=failures)


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [256, 36])
def test_all_tokens_are_served_and_all_pages_back(num_pages):
    """Also where decode replicas preempt, and load prompts again."""
    made, work = [], random_workload(200, 2, rate=50.0)
    found = run(work, 2, 2, KVLink(1e-3, 1e-4), num_pages=num_pages, made=made)
    assert found.times.gap_counts.sum() == work.num_output_tokens - 200
    assert found.times.num_prompt.tolist() == [r.num_prompt_tokens for r in work.requests]
    assert (found.times.first > found.times.arrivals).all() and (found.times.last >= found.times.first).all()
    assert found.prefills is not None and len(found.prefills.times.last) == 200
    assert (found.times.first > found.prefills.times.last).all(), "no token before the prompt is computed elsewhere"
    preempted = sum(stats.num_preemptions for stats in found.decodes.stats)
    assert (preempted > 0) == (num_pages == 36)
    for replica in made:
        pool = replica.scheduler.pool
        replica.scheduler.check_invariants()
        assert not replica._loads and pool.num_free_pages == pool.num_pages and not replica.scheduler.requests.by_id
    loaded = sum(replica.num_loaded_tokens for replica in made)
    full = sum((r.num_prompt_tokens - 1) // PAGE * PAGE for r in work.requests)
    assert loaded == full if not preempted else loaded > full


def test_decode_replicas_compute_the_rest_of_a_prompt_alone():
    made, work = [], Workload("one", (WorkloadRequest(90, 5), WorkloadRequest(61, 5)))
    found = run(work, made=made)
    assert made[0].steps.demands.tokens.sum() == (90 - 88) + (61 - 60) + 2 * 4, "what lies behind the last full page, and decodes"
    assert found.prefills is not None and found.prefills.busy[0] > found.decodes.busy[0] / 5


def test_times_are_those_of_their_parts():
    """A request alone: computed, saved, loaded, its last tokens computed; each second of either link is one of its first token."""
    work = Workload("one", (WorkloadRequest(90, 3),))
    prompt = replay(Workload("p", (WorkloadRequest(90, 1),)), PLAN, MODEL, LIMITS, 256).times.last[0]
    fast = run(work).times
    assert fast.first[0] > prompt
    slow = run(work, link=KVLink(0.25, 0.001), save=lambda n: n / 100).times
    assert slow.first[0] - fast.first[0] == pytest.approx(0.25 + 88 * 0.001 + 90 / 100)
    assert slow.last[0] - slow.first[0] == pytest.approx(fast.last[0] - fast.first[0])


def test_loads_pass_a_link_one_after_another():
    work = Workload("two", (WorkloadRequest(80, 2), WorkloadRequest(80, 2)))
    times = run(work, 2, 1, KVLink(1.0, 0.0)).times
    assert times.first[1] - times.first[0] == pytest.approx(1.0, rel=0.01)
    times = run(work, 2, 2, KVLink(1.0, 0.0)).times
    assert times.first[1] == pytest.approx(times.first[0])


def test_short_prompts_are_computed_where_they_are_decoded():
    work = Workload("mixed", tuple(WorkloadRequest(p, 3, i / 10) for i, p in enumerate([80, 10, 70, 12])))
    made = []
    found = run(work, least=50, link=KVLink(0.0, 1e-3), made=made)
    assert found.prefills is not None and found.prefills.times.num_prompt.tolist() == [80, 70]
    assert made[0].num_loaded_tokens == 76 + 68
    none = run(work, least=1000)
    assert none.prefills is None and none.times.gap_counts.sum() == 8
    alone = replay_cluster(
        work, lambda r, _: Replica(r, PLAN, MODEL, LIMITS, 256, prefix_caching=True), 1, make_policy("round_robin")
    )
    assert none.times.last.tolist() == alone.times.last.tolist(), "with nothing to load it is a replica"


def test_lost_replicas_of_both_kinds():
    """A prompt that was being computed is computed elsewhere; a request that decoded loads the stored KV of its prompt again."""
    work = Workload("some", tuple(WorkloadRequest(80, 20, i / 5) for i in range(20)))
    made, plain = [], run(work, 2, 2)
    assert plain.prefills is not None and plain.prefills.times.scheduled is not None
    during = [(plain.prefills.times.scheduled[3] + plain.prefills.times.last[3]) / 2, plain.decodes.times.first[8] + 1e-3]
    replicas = [int(plain.prefills.chosen[3]), 2 + int(plain.decodes.chosen[8])]
    failures = [Failure(float(at), replica, 1.0) for at, replica in zip(during, replicas, strict=True)]
    found = run(work, 2, 2, failures=failures, made=made)
    assert found.prefills is not None
    for part in (found.prefills, found.decodes):
        assert part.num_failures == 1 and part.num_sent_again >= 1
    assert found.prefills.num_lost_tokens == 0 < found.decodes.num_lost_tokens
    assert (found.times.first > found.prefills.times.last).all() and found.times.first[8] > plain.times.first[8]
    assert sum(replica.num_loaded_tokens for replica in made) == 76 * (20 + found.decodes.num_sent_again)
    for bad in (4, 9):
        with pytest.raises(ValueError, match="there are 4 replicas"):
            run(work, 2, 2, failures=[Failure(0.0, bad, 1.0)])


def test_decode_replicas_that_are_left_alone_have_the_load_they_had(monkeypatch):
    """Bit for bit what comes of asking each at each arrival, with loads of KV on their way."""
    work = random_workload(100, 3, rate=20.0)
    failures = [Failure(1.0, 0, 0.5), Failure(2.0, 3, 0.5)]
    one = run(work, 2, 3, KVLink(0.02, 1e-4), failures=failures)
    for kind in (Replica, DecodeReplica):
        monkeypatch.setattr(kind, "quiet_until", 0.0)
    other = run(work, 2, 3, KVLink(0.02, 1e-4), failures=failures)
    for name in ("scheduled", "first", "last", "gaps", "gap_counts"):
        assert getattr(one.times, name).tolist() == getattr(other.times, name).tolist(), name
    assert one.decodes.chosen.tolist() == other.decodes.chosen.tolist() and one.decodes.stats == other.decodes.stats


def test_requests_with_one_prefix_load_it_once():
    ids = tuple(range(1, 81))
    work = Workload("shared", tuple(WorkloadRequest(80, 3, 2.0 * i, ids) for i in range(4)))
    made = []
    run(work, made=made)
    assert made[0].num_loaded_tokens == 76


@pytest.mark.slow
def test_no_prompt_delays_a_token_of_another_request():
    """What the arrangement is for: at a load that both can serve, the longest gaps are those of decodes alone."""
    work = random_workload(300, 3, rate=8.0)
    together = replay_cluster(
        work, lambda r, p: Replica(r, PLAN, MODEL, LIMITS, 256, prefix_caching=p), 2, make_policy("least_loaded")
    ).times
    apart = run(work).times
    assert apart.gap_quantile(0.99) < 0.6 * together.gap_quantile(0.99)
    assert np.median(apart.seconds("ttft")) > np.median(together.seconds("ttft")), "one server for prompts, where two shared them"
