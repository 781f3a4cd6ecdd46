"""scripts.demo without what it checks by, or its model. That it answers as transformers do is `make demo`'s own exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import real_files

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from pathlib import Path
from jaxserve.cli.common.command import run_command
from scripts import demo, fetch_demo_model
demo.GOLDENS = Path(sys.argv.pop())
def fetch():
    raise AssertionError("fetched before the golden was looked for")
fetch_demo_model.fetch = fetch
run_command(demo.main)
"""


def test_a_missing_golden_is_a_failure(tmp_path):
    command = [sys.executable, "-c", RUN, str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 1
    assert (
        done.stderr.startswith(f"python -m scripts.demo: {tmp_path / 'none.json'}, four of the prompts")
        and "Traceback" not in done.stderr
    )


UNREACHABLE = """
import sys
from jaxserve.cli.common.command import run_command
from scripts import {script}, fetch_demo_model
def fetch():
    raise {error}
fetch_demo_model.fetch = fetch
run_command({script}.main)
"""


@pytest.mark.parametrize(
    ("script", "error", "given"),
    [
        ("demo", 'fetch_demo_model.FetchError("no network: put the file here")', []),
        ("demo", 'PermissionError("no writing here")', []),
        ("bench_engine", 'fetch_demo_model.FetchError("no network: put the file here")', ["--peer=", "--only=smollm2_b1"]),
    ],
)
def test_a_model_that_cannot_be_fetched_is_one_line(script, error, given):
    command = [sys.executable, "-c", UNREACHABLE.format(script=script, error=error), *given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    said = error.split('"')[1]
    assert done.returncode == 1 and done.stderr == f"python -m scripts.{script}: {said}\n"


@pytest.mark.slow  # tests/cli/test_generate.py asks the same of `jaxserve generate`
def test_the_demo_prints_nothing_of_other_libraries():
    real_files.smollm2_gguf()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "scripts.demo", "--max_tokens=2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"(?:DEBUG|INFO|WARNING|ERROR) (\S+):", done.stderr)) <= {"jaxserve"}
    assert "Unable to initialize" not in done.stderr and "Resetting cache" not in done.stderr
