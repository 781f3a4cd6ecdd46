"""Work lists that serve several steps, against a walk of each step's batch by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.batching.layout import StepLayout
from jaxserve.batching.work_lists import AHEAD, WorkLists
from jaxserve.buckets.plan import Bucket
from kernels.ragged_paged_attention.work_list import WorkShape, loads, plan
from tests.kernels.test_work_list import check

S, MAX_KV_LEN = 8, 2048


class Planner:
    """The host's side of a planner, which counts."""

    def __init__(self, window: int | None, tokens: int, max_q_len: int):
        self.shape = WorkShape(tokens, S, max_q_len, 2, MAX_KV_LEN, 5, max_q_len, max_q_len, 128, window)
        self.size, self.num_planned = self.shape.size, 0

    def plan(self, q_lens, kv_lens, *, least_kv_lens, out):
        self.num_planned += 1
        return plan(self.shape, q_lens, kv_lens, least_kv_lens=least_kv_lens, out=out)


class Steps:
    """Steps of one bucket: `run` fills a step's lists, checks them, and says whether they were planned for it."""

    def __init__(self, max_q_len: int = 1):
        planners = {window: Planner(window, S * max_q_len, max_q_len) for window in (None, 300)}
        self.layout = StepLayout(Bucket(S * max_q_len, S, max_q_len), S, 16, S, planners)
        self.lists = WorkLists()

    def run(self, starts, q_lens=None, least=None, true=None, num_decodes=None) -> bool:
        """starts: as the host knows them; true: as the device does, from `least` on."""
        starts = np.array(starts, np.int32)
        q_lens = np.ones_like(starts) if q_lens is None else np.array(q_lens, np.int32)
        least = starts if least is None else np.array(least, np.int32)
        n = len(starts)
        schedule: Any = SimpleNamespace(q_lens=q_lens, starts=starts, least_starts=least, num_seqs=n)
        schedule.num_decodes = n if num_decodes is None else num_decodes
        view = self.layout.unpack(self.layout.padding.copy())
        before = self.lists.num_planned
        self.lists.fill(self.layout, view, schedule)
        kv_lens = (least if true is None else np.array(true)) + q_lens
        for name, planner in self.layout.work.values():
            check(planner.shape, q_lens, kv_lens, view[name])
            fresh = plan(planner.shape, q_lens, kv_lens)
            most, at_best = (loads(planner.shape, packed, q_lens, kv_lens).max() for packed in (view[name], fresh))
            assert most <= 1.1 * at_best + 2, "the load is as even as that of a list of the step's own"
        q_lens[:], starts[:] = 9, 9  # whoever made the schedule may use its arrays again
        return self.lists.num_planned > before


def test_decodes_that_go_on_are_planned_once_in_a_while():
    """Over the boundaries of blocks and chunks, and up to the longest sequence there may be."""
    steps, starts = Steps(), np.array([1, 50, 110, 120, 127, 500, 1000, MAX_KV_LEN - 101])
    planned = [steps.run(starts + i) for i in range(100)]
    assert planned == [i % (AHEAD + 1) == 0 for i in range(100)]
    assert [p.num_planned for p in steps.layout.planners.values()] == [sum(planned)] * 2
    assert steps.run(starts + 100) is False, "the longest has as many tokens as it may"


def test_another_batch_is_planned_anew():
    steps, starts = Steps(), np.array([100, 400, 900, 1500])
    assert steps.run(starts) and not steps.run(starts + 1)
    assert steps.run(starts[:3] + 2), "one has ended"
    assert steps.run(starts[[0, 1, 3]] + 3), "another has its place, and is longer"
    assert steps.run(starts[[0, 1, 2]] + 4), "or much shorter"
    assert steps.run(starts[:2]) and not steps.run([101, 401])
    assert steps.run([102, 402], [1, 0]), "one has nothing to do"


def test_chunks_are_planned_for_what_they_are():
    steps = Steps(max_q_len=8)
    for _ in range(2):
        assert steps.run([700, 64], [1, 8], num_decodes=1)
    assert steps.run([700, 64]) and not steps.run([701, 65])


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_are_given_back(seed):
    """The host knows bounds only, and what it knows of where a sequence stands may fall."""
    rng, steps, planned = np.random.default_rng(seed), Steps(max_q_len=4), 0
    true = rng.integers(1, MAX_KV_LEN - 600, 6)
    in_flight = np.zeros(6, int)  # drafts of the step before of which the host has not heard
    for _ in range(120):
        q_lens = np.full(6, 1 + int(rng.random() < 0.8) * 3)
        accepted = rng.integers(0, in_flight + 1)
        planned += steps.run(true + in_flight, q_lens, least=true, true=true + accepted)
        true, in_flight = true + accepted + 1, q_lens - 1
    assert 10 < planned < 110


def test_each_group_of_devices_has_lists_of_its_own():
    """Two groups of 4 sequences: entries 0, 2 and 3 are the second's, entry 1 the first's. Then the first has none."""
    planners = {window: Planner(window, S // 2, 1) for window in (None, 300)}
    layout, lists = StepLayout(Bucket(S, S, 1), S, 16, S, planners, num_groups=2), WorkLists()
    starts, groups = np.array([100, 400, 900, 1500], np.int32), np.array([1, 0, 1, 1])
    for step, owners in enumerate((groups, groups, np.ones(4, int))):
        q_lens = np.ones(4, np.int32)
        schedule: Any = SimpleNamespace(q_lens=q_lens, starts=starts + step, least_starts=starts + step, num_seqs=4, num_decodes=4)
        view = layout.unpack(layout.padding.copy())
        lists.fill(layout, view, schedule, owners)
        assert lists.num_planned == (2, 2, 3)[step]
        for name, planner in layout.work.values():
            for group in range(2):
                own = owners == group
                if own.any():
                    check(planner.shape, q_lens[own], (starts + step + 1)[own], view[name][group])
                else:
                    assert not view[name][group].any()
