"""Random histories of the scheduler: whatever is added, stepped, held in flight, aborted or finished, under every policy, order
and switch, each request gets the tokens that it would have got alone, invariants hold after every action, and all drains.

The device (scheduler_harness.py) samples from what it reads back from the pages, so a page used wrongly is a
wrong token.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from jaxserve.request import RequestStatus
from tests.scheduler_harness import Harness
from tests.selection import slow_unless

MAX_MODEL_LEN = 24

COMPOSITIONS = [
    {},
    {"mixed": False},
    {"chunked": False},
    {"mixed": False, "chunked": False},
    {"policy": "orca"},
    {"policy": "orca", "chunked": True},
    {"policy": "prefill_first"},
    {"policy": "prefill_first", "chunked": True},
    {"policy": "request_level"},
    {"policy": "request_level", "mixed": True},
    {"num_groups": 2},
    {"num_groups": 2, "mixed": False},
    {"num_groups": 2, "policy": "prefill_first", "chunked": True},
    {"num_groups": 2, "policy": "request_level", "chunked": True, "mixed": True},
]

requests = st.fixed_dictionaries(
    {
        "family": st.integers(0, 2),  # prompts of a family share their beginning, and repeat themselves
        "prompt": st.integers(1, 16),
        "max_tokens": st.integers(1, 20) | st.just(12) | st.none(),
        "priority": st.integers(0, 2),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.just([]) | st.lists(st.integers(0, 39), max_size=3),
        "cache_salt": st.sampled_from([None, None, "salt"]),
        "grammar": st.sampled_from([False, False, False, True]),
    }
)
actions = st.lists(
    st.one_of(
        requests.map(lambda kwargs: ("add", kwargs)),
        st.just(("schedule", None)),
        st.just(("step", None)),
        st.just(("step", None)),
        st.integers(1, 3).map(lambda n: ("update", n)),
        st.integers(0, 99).map(lambda n: ("abort", n)),
        st.integers(0, 99).map(lambda n: ("finish", n)),
        st.integers(0, 99).map(lambda n: ("ready", n)),
        st.sampled_from([(True, True), (True, False), (False, True)]).map(lambda right: ("propose", right)),
    ),
    min_size=10,
    max_size=60,
)
engines = st.fixed_dictionaries(
    {
        "order": st.sampled_from(["fcfs", "priority"]),
        "num_pages": st.sampled_from([0, 1, 3, 6, 30]),  # more than one request may need
        "page_size": st.sampled_from([4, 4, 2, 1]),
        "max_num_seqs": st.sampled_from([1, 2, 4, 6]),
        "max_num_batched_tokens": st.sampled_from([16, 20, 40]),
        "prefix_caching": st.booleans(),
        "depth": st.integers(0, 3),
        "num_drafts": st.sampled_from([0, 2]),
    }
)


class History:
    """Plays actions on a harness and remembers what was asked of it."""

    def __init__(self, harness):
        self.harness, self.scheduler = harness, harness.scheduler
        self.requests = []
        self.cut_short = set()  # aborted, or finished from outside

    def add(self, kwargs):
        kwargs = dict(kwargs)
        family, length, grammar = (kwargs.pop(name) for name in ("family", "prompt", "grammar"))
        if kwargs["max_tokens"] is not None:
            kwargs["min_tokens"] = min(kwargs["min_tokens"], kwargs["max_tokens"])
        request = self.harness.request([100 * family + i % 4 for i in range(length)], **kwargs)
        if grammar:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
        before = self.counts()
        try:
            self.scheduler.add(request)
            self.requests.append(request)
        except ValueError:
            assert before == self.counts()

    def counts(self):
        free = [pool.free_pages() for pool in self.scheduler.pools]
        return self.scheduler.num_waiting, self.scheduler.num_running, free

    def play(self, action, argument):
        harness, pick = self.harness, None
        if action in ("abort", "finish", "ready") and self.requests:
            pick = self.requests[argument % len(self.requests)]
        if action == "add":
            self.add(argument)
        elif action == "schedule" and len(harness.in_flight) <= 3:
            self.schedule()
        elif action == "step":
            self.schedule()
            if len(harness.in_flight) > harness.depth:
                harness.update()
        elif action == "update":
            for _ in range(min(argument, len(harness.in_flight))):
                harness.update()
        elif action == "propose" and harness.num_drafts:
            harness.propose(argument)
        elif action == "ready" and pick is not None:
            self.scheduler.set_ready(pick)
        elif action == "abort" and pick is not None:
            if self.scheduler.abort([pick.request_id, "nobody"]):
                self.cut_short.add(pick.request_id)
        elif action == "finish" and pick is not None and not pick.finished:
            self.scheduler.finish(pick, "stop", "###")
            self.cut_short.add(pick.request_id)
        self.scheduler.check_invariants()

    def schedule(self):
        """A step, which there must be if nothing is in flight and some request could go on; within its bounds."""
        harness, scheduler = self.harness, self.scheduler
        ready = any(r.status is not RequestStatus.WAITING_FOR_GRAMMAR for r in scheduler.running + scheduler.waiting)
        idle = not harness.in_flight
        schedule = harness.schedule_or_none()
        assert schedule is not None or not (idle and ready), "the model idles"
        if schedule is not None:
            assert schedule.num_tokens == schedule.q_lens.sum() <= harness.config.max_num_batched_tokens
            assert 0 < schedule.num_seqs <= harness.config.max_num_seqs
            groups = schedule.rows // scheduler.rows.rows_per_group
            tokens = np.bincount(groups, weights=schedule.q_lens)
            assert tokens.max() <= harness.config.max_num_batched_tokens // harness.config.num_groups
            assert schedule.max_q_len == schedule.q_lens.max() and schedule.q_lens.min() > 0
            if not scheduler.policy.mixed:
                assert schedule.num_decodes in (0, schedule.num_seqs)

    def finish(self):
        for request in self.requests:
            self.scheduler.set_ready(request)
        self.harness.drain()
        for request in self.requests:
            if request.request_id not in self.cut_short:
                self.harness.assert_solo(request)
            delivered = self.harness.delivered.get(request.request_id, [])
            assert request.output_token_ids == delivered, "lost, repeated or out of order"


def play_history(composition, engine, threshold, start, then) -> Harness:
    config = {"max_model_len": MAX_MODEL_LEN, **engine, **composition}
    config["num_pages"] += -(-MAX_MODEL_LEN // engine["page_size"])
    if config.get("num_groups", 1) > 1:  # each has an equal part of the rows, and nobody drafts
        config |= {"max_num_seqs": config["num_groups"] * engine["max_num_seqs"], "num_drafts": 0}
    if threshold and Harness(**config).scheduler.policy.chunked:
        config["long_prefill_token_threshold"] = threshold
    history = History(Harness(**config))
    for kwargs in start:
        history.play("add", kwargs)
    for action, argument in then:
        history.play(action, argument)
    history.finish()
    return history.harness


@pytest.mark.parametrize(
    "composition",
    slow_unless(lambda c: "chunked" not in c and c != COMPOSITIONS[-1], COMPOSITIONS),
    ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()) or "sarathi",
)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(engine=engines, threshold=st.sampled_from([0, 0, 5]), start=st.lists(requests, min_size=3, max_size=10), then=actions)
def test_soak(composition, engine, threshold, start, then):
    play_history(composition, engine, threshold, start, then)
