"""The process that tries kernels, watched: every way in which one may end."""

import dataclasses
import os
import sys
import time
from pathlib import Path

import pytest

from jaxserve.qualification.watch import Limits, environment, watch
from kernels.qualification.plan import CRASHED, DIFFERS, ERROR, HUNG, NO_MEMORY, NOT_MEANT, NOT_TRIED, PASSED, UNCOMPILED, WRONG
from tests.qualification.conftest import LIMITS, PLAN


def results(verdicts):
    return {v.backend: v.result for v in verdicts.values()}


def test_the_preferred_backend_passes_and_no_other_is_tried(fake):
    verdicts = watch(PLAN, {}, command=fake(), limits=LIMITS)
    assert results(verdicts) == {"bent": PASSED} and PLAN.left_out("attention", verdicts) == {}


@pytest.mark.parametrize(
    ("behaviour", "result", "num_starts"),
    [
        ("wrong", WRONG, 1),
        ("differ", DIFFERS, 1),
        ("uncompiled", UNCOMPILED, 1),
        ("error", ERROR, 2),  # which may leave the device's context broken
        ("segv", CRASHED, 2),
        ("exit", CRASHED, 2),
        ("memory", NO_MEMORY, 1),
    ],
)
def test_what_fails_is_left_out_and_the_next_one_tried(fake, starts, behaviour, result, num_starts):
    verdicts = watch(PLAN, {}, command=fake(bent=behaviour), limits=LIMITS)
    assert results(verdicts) == {"bent": result, "right": PASSED} and starts() == num_starts
    left_out = PLAN.left_out("attention", verdicts)
    assert list(left_out) == ["bent"] and left_out["bent"].startswith(result)


def test_a_crash_says_where_and_how(fake):
    def reason(behaviour):
        return next(iter(watch(PLAN, {}, command=fake(bent=behaviour), limits=LIMITS).values())).reason

    assert reason("segv") == "a batch: signal SIGSEGV"
    assert reason("exit") == "a batch: status 3: CUDA_ERROR_ILLEGAL_ADDRESS"


def test_a_process_that_the_system_ends_says_nothing_of_the_kernel(fake):
    verdicts = watch(PLAN, {}, command=fake(bent="killed"), limits=LIMITS)
    assert results(verdicts) == {"bent": NOT_TRIED, "right": NOT_TRIED}
    assert "ended from outside by signal SIGKILL" in verdicts["attention bent"].reason


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"  # killed, and nobody has asked for it yet


@pytest.mark.parametrize("behaviour", ["hang", "hang at once", "grandchild"])
def test_a_hang_is_killed_with_all_that_it_started(fake, tmp_path, starts, behaviour):
    limits = dataclasses.replace(LIMITS, batch=1.0)
    start = time.monotonic()
    verdicts = watch(PLAN, {}, command=fake(bent=behaviour), limits=limits)
    assert time.monotonic() - start < 10
    assert results(verdicts) == {"bent": HUNG, "right": PASSED} and starts() == 2
    where = "" if behaviour == "hang at once" else "a batch: "
    assert next(iter(verdicts.values())).reason.startswith(f"{where}no end after 1")
    if behaviour == "grandchild":
        deadline = time.monotonic() + 5
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        while not all(map(is_gone, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(pids) == 2 and all(map(is_gone, pids))


def test_a_backend_that_lacks_something_is_passed_over_and_not_left_out(fake):
    verdicts = watch(PLAN, {}, command=fake(bent="lacks"), limits=LIMITS)
    assert results(verdicts) == {"bent": NOT_MEANT, "right": PASSED} and PLAN.left_out("attention", verdicts) == {}


def test_the_models_own_shapes_can_fail_alone(fake):
    own = dataclasses.replace(PLAN, asks={"attention": dataclasses.replace(PLAN.asks["attention"], shapes={"head_dim": 96})})
    verdicts = watch(own, {}, command=fake(**{"bent own": "wrong"}), limits=LIMITS)
    assert list(own.left_out("attention", verdicts)) == ["bent"] and PLAN.left_out("attention", verdicts) == {}
    assert {name: v.result for name, v in verdicts.items()} == {
        "attention bent": PASSED,
        "attention bent head_dim=96": WRONG,
        "attention right": PASSED,
        "attention right head_dim=96": PASSED,
    }


def test_every_asks_for_what_auto_would_not_come_to(fake):
    verdicts = watch(dataclasses.replace(PLAN, every=True), {}, command=fake(right="wrong"), limits=LIMITS)
    assert results(verdicts) == {"bent": PASSED, "right": WRONG}


@pytest.mark.parametrize(("start", "says"), [("hang", "did not begin within"), ("exit", "status 1: no device")])
def test_a_process_that_never_begins_leaves_all_untried(fake, starts, start, says):
    """Which says nothing of the kernels: auto takes none of them, and the next start asks again."""
    limits = dataclasses.replace(LIMITS, start=0.5) if start == "hang" else LIMITS
    verdicts = watch(PLAN, {}, command=fake(start=start), limits=limits)
    assert results(verdicts) == {"bent": NOT_TRIED, "right": NOT_TRIED} and starts() == 1
    assert all(says in verdict.reason for verdict in verdicts.values())
    assert set(PLAN.left_out("attention", verdicts)) == {"bent", "right"}


def test_the_whole_has_a_limit(fake):
    limits = Limits(start=20, batch=20, whole=1.0, ending=5)
    start = time.monotonic()
    verdicts = watch(PLAN, {}, command=fake(bent="hang"), limits=limits)
    assert time.monotonic() - start < 10
    assert results(verdicts) == {"bent": NOT_TRIED, "right": NOT_TRIED}  # a second is less than a batch may take
    assert all("no time was left of 1 s" in verdict.reason for verdict in verdicts.values())


def test_what_is_known_is_not_tried(fake, starts):
    known = watch(PLAN, {}, command=fake(), limits=LIMITS)
    assert watch(PLAN, known, command=["/nowhere"], limits=LIMITS) == known and starts() == 1


def test_the_process_leaves_the_devices_memory_to_this_one(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")  # of which jaxlib takes one spelling at a time
    found = environment()
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false" and float(found["XLA_CLIENT_MEM_FRACTION"]) < 0.5
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in found


def test_the_process_ends_with_the_one_that_started_it(tmp_path):
    """Killed, the parent can kill nothing: the child, whose kernel hangs, sees its stdin end."""
    import subprocess

    code = """
import os, subprocess, sys, time
ends = "import threading, time; from kernels.qualification.__main__ import _end_with_stdin as end"
hangs = ends + "; threading.Thread(target=end).start(); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", hangs], stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(pid)
