"""Which mutations are caught, why others survive, how long one may take, and that a run goes on where it was interrupted."""

import dataclasses
import json
import re
import time
from typing import Any

import numpy as np
import pytest

from scripts.ptx import survivors
from scripts.ptx.compiled import Kernel
from scripts.ptx.log import Log
from scripts.ptx.machine import run
from scripts.ptx.mutations import Mutation
from scripts.ptx.suite import Run, Workload
from scripts.ptx.survivors import PASSED, TOGETHER, UNREACHED, UNUSED, of_suite
from scripts.ptx.trial import Trial, broken
from tests.scripts.ptx.snippets import launch, only, program, zeros

WRITE = only(0, "st.shared.b32 [%rd2], %r0;")
READ = only(1, "ld.shared.b32 %r5, [%rd2+-128]; add.s64 %rd3, %a1, %rd0; st.global.b32 [%rd3+-128], %r5;")
RACE = "(reads, unordered with a write|writes, unordered with a read) by warp #"  # who comes first is the schedule's
ENDLESS = "setp.eq.b32 %p1, 0, 0;\n$L:\n@%p1 bra $L;\n"


def suite(body, want=32, calls=None, blind=()):
    """A program of two warps and one array that it writes, as ptx_check has them. calls: gets a seed each time it runs. blind:
    seeds whose schedules order everything."""
    kernel = program(body, warps=2)

    def with_kernels(kernels):
        def once(seed):
            if calls is not None:
                calls.append(seed)
            result = run(kernel if seed in blind else kernels["k"].program, kernels["k"].launch, [zeros(1), zeros(32)], seed=seed)
            return result.arrays[1], {"k": result.covered}

        return Workload("snippet", kernels, (Run("batch", once, np.arange(want), 1e-9),), with_kernels, frozenset())

    return with_kernels({"k": Kernel("k", kernel, launch(kernel))})


def found(body, **options):
    return [(o.kind, o.caught, o.reason) for o in of_suite(suite(body, **options), "k")]


def test_what_orders_two_accesses_is_missed():
    ((_, caught, reason),) = [o for o in found(WRITE + "bar.sync 0;" + READ) if o[0] == "bar.sync removed"]
    assert caught and re.fullmatch(RACE, caught) and reason is None


def test_of_two_that_do_the_same_one_is_redundant_and_the_other_says_so():
    outcomes = [o for o in found(WRITE + "bar.sync 0;\nadd.s32 %r7, %r0, 1;\nbar.sync 0;" + READ) if o[0] == "bar.sync removed"]
    (_, *first), (_, *second) = outcomes
    assert first == [None, TOGETHER]
    caught, reason = second
    assert caught is None and reason and re.search(f"bar.sync 0 does the same; without both: {RACE}", reason)


class Kept:
    """A trial in which, in few batches, either of two changes can go and not both; in all batches the first one must stay."""

    batches = ("few", "more")

    def cover(self):
        return ("few",)

    def catch(self, changes, batches, seeds):
        names = {change.kind for change in changes}
        return "caught" if {"first", "second"} <= names or "first" in names and batches == self.batches else None


def test_what_was_kept_for_one_that_must_stay_is_redundant():
    trial: Any = Kept()
    changes = [Mutation(name, i, i, ()) for i, name in enumerate(("first", "second", "third"))]
    assert {change.kind for change in survivors._gone(trial, changes)} == {"second", "third"}


def test_the_other_one_is_found_by_any_schedule():
    body = WRITE + "bar.sync 0;\nadd.s32 %r7, %r0, 1;\nbar.sync 0;" + READ
    ((_, _, reason),) = [o for o in found(body, blind=(0, 1)) if o[0] == "bar.sync removed" and o[2] != TOGETHER]
    assert reason and re.search(f"bar.sync 0 does the same; without both: {RACE}", reason)


def test_what_no_batch_reaches_is_not_called_redundant():
    body = "setp.eq.b32 %p5, 0, 0;\n@%p5 bra $OVER;\nbar.sync 0;\n$OVER:\n" + WRITE + "bar.sync 0;" + READ
    outcomes = [o for o in found(body) if o[0] == "bar.sync removed"]
    assert outcomes[0] == ("bar.sync removed", None, UNREACHED) and outcomes[1][1] is not None


def test_a_barrier_that_nobody_uses_is_not_called_redundant():
    barriers = "".join(f"@%p0 mbarrier.init.shared.b64 [%rd1+{at}], 32;\n" for at in (1024, 1032))
    again = "mbarrier.try_wait.parity.shared.b64 %p20, [%rd1+1032], %r20, %r21;"
    wait = f"mov.b32 %r20, 0; mov.b32 %r21, 9;\n$W: {again} @!%p20 bra $W;"
    arrive = only(0, "mbarrier.arrive.shared.b64 _, [%rd1+1032];")
    outcomes = [o for o in found(only(0, barriers) + "bar.sync 0;" + WRITE + arrive + only(1, wait) + READ) if "init" in o[0]]
    assert outcomes[0][1:] == (None, UNUSED)
    assert outcomes[1][1] and "no mbarrier at" in outcomes[1][1]


def test_one_that_is_moved_past_an_access_that_it_is_not_for():
    outcomes = found(WRITE + "ld.shared.b32 %r6, [%rd2+512];\nbar.sync 0;" + READ)
    assert ("bar.sync before what it follows", None, PASSED) in outcomes
    assert outcomes[0][0] == "bar.sync removed" and outcomes[0][1] is not None


def test_a_program_that_is_broken_already_is_refused():
    with pytest.raises(RuntimeError, match="broken before any mutation: .* unordered with"):
        Trial.of(suite(WRITE + READ), "k")
    with pytest.raises(RuntimeError, match="wrong before any mutation: .* 31 values are wrong"):
        Trial.of(suite(WRITE + "bar.sync 0;" + READ.replace("[%rd2+-128]", "[%rd1]")), "k")


def test_what_takes_too_long_hangs_and_the_next_run_has_its_own_time():
    (endless,) = suite(ENDLESS).runs
    start = time.process_time()
    assert broken(endless, 0, limit=0.3) == "hangs"
    assert 0.2 < time.process_time() - start < 10
    (sound,) = suite(WRITE + "bar.sync 0;" + READ).runs
    assert broken(sound, 0, limit=0.3) is None


def test_a_run_goes_on_where_it_was_interrupted(tmp_path):
    path, body = tmp_path / "log", WRITE + "bar.sync 0;\nbar.sync 0;" + READ
    whole = of_suite(suite(body, calls=(calls := [])), "k", Log(str(path)))
    lines = path.read_text().splitlines()
    assert {"key", "caught", "kernel", "case", "changes", "batches", "seeds", "by", "seconds"} == set(json.loads(lines[1]))
    path.write_text("\n".join([*lines[:3], lines[3][:20]]))  # it was killed
    assert of_suite(suite(body, calls=(again := [])), "k", Log(str(path))) == whole
    assert 0 < len(again) < len(calls)
    assert of_suite(suite(body, calls=(nothing := [])), "k", Log(str(path))) == whole
    assert len(nothing) == 2  # the program itself, to know what it reaches
    of_suite(suite(body.replace("%r5", "%r9"), calls=(other := [])), "k", Log(str(path)))
    assert len(other) == len(calls)  # another program: nothing of it is known


def test_a_run_that_goes_on_has_the_order_of_the_first_one(tmp_path):
    """Batches are ordered by the time that they took, which differs from run to run, and a trial is known by its batches."""
    path, one = tmp_path / "log", suite(WRITE + "bar.sync 0;" + READ)
    two = dataclasses.replace(one, runs=(*one.runs, *one.runs))
    Trial.of(two, "k", Log(str(path)))
    (entry,) = [json.loads(line) for line in path.read_text().splitlines()]
    for took, order in (([1.0, 2.0], [0, 1]), ([2.0, 1.0], [1, 0])):
        path.write_text(json.dumps({**entry, "took": took}))
        assert [batch.number for batch in Trial.of(two, "k", Log(str(path))).batches] == order


def test_other_batches_are_another_trial(tmp_path):
    path, one = tmp_path / "log", suite(WRITE + "bar.sync 0;" + READ)
    (run,) = one.runs
    more = dataclasses.replace(one, runs=(run, dataclasses.replace(run, name="another batch")))
    versions = {Trial.of(of, "k", Log(str(path))).version for of in (one, more, one)}
    assert len(versions) == 2 and len(path.read_text().splitlines()) == 2
