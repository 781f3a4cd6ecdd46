"""Replicas behind a router against a replay of one, and what the router's policies do to them."""

import numpy as np
import pytest

from jaxserve.buckets.plan import BucketPlan
from jaxserve.routing.policy import ROUTING_POLICIES, make_policy
from jaxserve.simulation.cluster import replay_cluster
from jaxserve.simulation.failures import Failure, of_replicas, random_failures
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


class Restless(Replica):
    """A replica whose load may be another at any time, as far as the cluster knows."""

    @property
    def quiet_until(self) -> float:
        return self.now


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
@pytest.mark.parametrize("rate", [3.0, 30.0])
def test_replicas_that_are_left_alone_have_the_load_they_had(policy, rate):
    """Bit for bit what comes of asking each at each arrival, where some are idle and where all are busy; losses included."""
    work = at_rate(shared_prefix(120, 6, 24, 8, 40, 96, 0), rate, 1)
    failures = random_failures(4, 3, work.requests[-1].arrived_at, 0.5, 3)

    def play(kind, turns):
        def counted(records, prefix_caching):
            replica = kind(records, PLAN, MODEL, LIMITS, 64, prefix_caching=prefix_caching)
            turn = replica.turn
            replica.turn = lambda *until: turns.append(1) or turn(*until)
            return replica

        return replay_cluster(work, counted, 3, make_policy(policy), block_tokens=8, failures=failures)

    lazy, restless = list[int](), list[int]()
    one, other = play(Replica, lazy), play(Restless, restless)
    for name in ("arrivals", "scheduled", "first", "last", "gaps", "gap_counts"):
        assert getattr(one.times, name).tolist() == getattr(other.times, name).tolist(), name
    assert one.stats == other.stats and one.busy.tolist() == other.busy.tolist() and one.num_failures > 0
    assert one.chosen.tolist() == other.chosen.tolist() and one.num_matched.tolist() == other.num_matched.tolist()
    assert (one.num_sent_again, one.num_lost_tokens) == (other.num_sent_again, other.num_lost_tokens)
    assert len(lazy) < len(restless)


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


LONG = Workload("long", tuple(WorkloadRequest(30, 40, i / 10) for i in range(60)))  # 6 s of arrivals


@pytest.mark.parametrize("make", [make, make_staged])
def test_what_a_lost_replica_had_is_served_by_others(make):
    """None is lost, none twice, pages are back, and nothing goes to a replica while it is down."""
    made, ended, sent = [], [], []

    def noted(records, prefix_caching):
        replica = make(records, prefix_caching)
        submit, number = replica.submit, len(made)

        def note(row):
            sent.append((number, row, replica.now))
            submit(row)

        replica.submit = note
        made.append(replica)
        return replica

    failures = [Failure(4.0, 1, 1.0), Failure(2.0, 0, 1.5), Failure(2.5, 0, 1.0)]  # the last hits one that is down
    run = replay_cluster(LONG, noted, 3, make_policy("least_loaded"), failures=failures, progress=ended.append)
    assert (run.num_failures, len(made), sum(ended)) == (2, 5, 60)
    assert (run.times.last > run.times.first).all() and (run.times.first > run.times.arrivals).all()
    lost = {0: made[0].unfinished, 1: made[1].unfinished}
    again = [row for its in lost.values() for row, _ in its]
    assert again and run.num_sent_again == len(again) and run.num_lost_tokens == sum(n for its in lost.values() for _, n in its) > 0
    assert sorted(row for _, row, _ in sent) == sorted([*range(60), *again])
    for number, at in ((0, 2.0), (1, 4.0)):
        its = [row for row, _ in lost[number]]
        assert [row for n, row, now in sent if n != number and row in its and at <= now < at + 0.2 + 1.0] == its, "at once"
    spans = {0: (0, 2.0), 1: (0, 4.0), 2: (0, 99), 3: (3.5, 99), 4: (5.0, 99)}  # of the engines; the last two are replacements
    assert all(spans[number][0] <= now and LONG.requests[row].arrived_at <= spans[number][1] for number, row, now in sent)
    assert {number for number, _, _ in sent} == {0, 1, 2, 3, 4}
    num_gaps = run.times.gap_counts.sum() - (60 * 40 - 60)
    begun = sum(n > 0 for its in lost.values() for _, n in its)
    assert num_gaps == run.num_lost_tokens - begun, "gaps that clients saw before their streams broke"
    for replica in made[2:]:
        replica.scheduler.check_invariants()
        assert replica.scheduler.pool.num_free_pages == 64 and not replica.unfinished


def test_a_loss_costs_what_was_lost():
    """One replica of one: what runs begins anew on the next, and what comes meanwhile waits for it."""
    work = Workload("two", (WorkloadRequest(8, 30), WorkloadRequest(8, 2, 0.5)))
    plain = replay_cluster(work, make, 1, make_policy("round_robin")).times
    at = float(plain.first[0]) + 0.01
    assert at < 0.5 and at < plain.last[0]
    run = replay_cluster(work, make, 1, make_policy("round_robin"), failures=[Failure(at, 0, 10.0)])
    fresh = replay(Workload("both", (WorkloadRequest(8, 30), WorkloadRequest(8, 2))), PLAN, MODEL, LIMITS, 64).times
    assert run.times.first - (at + 10.0) == pytest.approx(fresh.first) and run.times.last - (at + 10.0) == pytest.approx(fresh.last)
    assert len(run.stats) == 2 and run.busy.shape == (1,)


def test_failures_that_come_when_all_is_done_change_nothing():
    policy = "prefix_aware"
    plain = replay_cluster(LONG, make, 2, make_policy(policy)).times
    run = replay_cluster(LONG, make, 2, make_policy(policy), failures=[Failure(1e4, 0, 1.0), Failure(1e4, 1, 1.0)])
    assert run.times.last.tolist() == plain.last.tolist() and run.num_failures == 2 and run.num_sent_again == 0


def test_a_lost_prefix_is_not_looked_for():
    """The router forgets what was cached on a replica that is lost."""
    work = at_rate(shared_prefix(40, 1, 48, 8, 2, 96, 0), 2.0, 1)
    at = work.requests[20].arrived_at - 1e-3
    failures = [Failure(at, i, 1e-3) for i in range(2)]
    matched = replay_cluster(work, make, 2, make_policy("prefix_aware"), block_tokens=4, failures=failures).num_matched
    assert matched[19] >= 12 and matched[20] == 0 and matched[22] >= 12


def test_random_failures():
    failures = random_failures(200, 4, 100.0, 5.0, 1)
    assert failures == sorted(failures) == random_failures(200, 4, 100.0, 5.0, 1) != random_failures(200, 4, 100.0, 5.0, 2)
    assert {f.replica for f in failures} == {0, 1, 2, 3} and {f.seconds for f in failures} == {5.0}
    assert all(0 <= f.time < 100 for f in failures) and np.mean([f.time for f in failures]) == pytest.approx(50, abs=6)
    assert of_replicas([Failure(1, 0, 2), Failure(2, 2, 3), Failure(3, 3, 4)], 1, 2) == [Failure(2, 1, 3)]


def test_bad_failures():
    for wrong in ((-1.0, 0, 1.0), (0.0, -1, 1.0), (0.0, 0, 0.0)):
        with pytest.raises(ValueError, match="time and replica must be at least 0, and seconds above 0"):
            Failure(*wrong)
    with pytest.raises(ValueError, match="replica=2.*there are 2 replicas, numbered from 0"):
        replay_cluster(LONG, make, 2, make_policy("round_robin"), failures=[Failure(1.0, 2, 1.0)])


def test_bad_number():
    with pytest.raises(ValueError, match="num_replicas=0 must be at least 1"):
        replay_cluster(random_workload(2, 0), make, 0, make_policy("round_robin"))
