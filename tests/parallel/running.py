"""pytest in a process with eight virtual devices, as JAX must be told of them before it starts.

Each `test_*.py` beside this file is one such process or a few. They are many files because `--dist=loadfile` gives a file to one
worker: one file of all would be the longest of the suite by far.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_tests(request: pytest.FixtureRequest, name: str, *args: str, marks: str | None = None) -> None:
    """The tests of these that this run wants, or those with such marks."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    marks = request.config.option.markexpr if marks is None else marks
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *args]
    done = subprocess.run([*command, "-m", marks] if marks else command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    request.node.user_properties.append(("counted", f"{name}: {done.stdout.strip().splitlines()[-1]}"))


def run_on_eight_devices(request: pytest.FixtureRequest, name: str) -> None:
    """The tests of `eight_devices/<name>.py`."""
    run_tests(request, name, f"tests/parallel/eight_devices/{name}.py")


def run_suites(request: pytest.FixtureRequest, plugin: str, suites: tuple[str, ...], left_out: tuple[str, ...] = ()) -> None:
    """The tests of these files once more, in one process, every engine of theirs as `tests.parallel.<plugin>` has it.

    `make test-all` runs all of them again, any other run those that are not slow: each policy, chunks, samples, beams, drafts and
    grammars are among them.
    """
    kept = " and ".join(f"not {name}" for name in left_out)
    files = [f"tests/{suite}.py" for suite in suites]
    marks = "not slow" if request.config.option.markexpr else ""
    run_tests(request, plugin, "-p", f"tests.parallel.{plugin}", *(["-k", kept] if kept else []), *files, marks=marks)
