"""A guard against a process of its own: what ends it, and what does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BEATS = """
import sys, time
from jaxserve.hosts.guard import Guard
guard = Guard(silence=0.5)
print("begun", flush=True)
for i in range(20):
    time.sleep(0.1)
    guard.beat()
guard.close()
guard.close()
guard.beat()
time.sleep(1.7)
print("ended", flush=True)
"""
ROOT = Path(__file__).parents[2]


def started() -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", BEATS], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def test_who_beats_lives_and_may_be_silent_behind_its_close():
    output, errors = started().communicate(timeout=60)
    assert (output, errors) == ("ended\n", "")


@pytest.mark.slow
def test_who_stands_still_is_ended_and_who_does_for_a_moment_is_not():
    process = started()
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.2)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGSTOP)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL and f"process {process.pid} stood still" in errors


@pytest.mark.slow
def test_the_watching_process_ends_with_the_watched_one():
    with started() as process:
        watching = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(watching) == 1
        process.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{watching[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{watching[0]}").exists()
