"""scripts.bench_ray runs end to end, and what it makes of rounds and of processes is right. How fast anything is, is no test's
business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.ray_servers import FIGURES, memory_of, processes_of, summary

ROOT = Path(__file__).parents[2]


def test_medians_of_rounds_and_what_is_more_than_plain():
    def of(x: float) -> dict[str, float]:
        return dict.fromkeys(FIGURES, x)

    found = summary({"plain": [of(1.0), of(9.0), of(2.0)], "ray": [of(7.0), of(5.0), of(90.0)]})
    assert found["plain"]["request_ms"] == 2.0 and found["plain"]["more_request_ms"] == 0.0
    assert found["ray"]["start_seconds"] == 7.0 and found["ray"]["more_start_seconds"] == 5.0
    assert "more_request_ms" not in summary({"ray": [of(1.0)]})["ray"], "there is nothing to compare with"


def test_processes_below_one_and_their_memory():
    """A shell, and what it starts, which holds 64 MiB."""
    held = "b = bytearray(64 << 20); print(len(b), flush=True); input()"
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, held]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        found = processes_of(shell.pid)
        assert len(found) == 2 and found[0] == shell.pid and os.getpid() not in found
        assert 64 << 20 < memory_of(found) < 128 << 20
        assert set(found) < set(processes_of(os.getpid()))
        shell.communicate(b"\n")
    assert memory_of(found) == 0


@pytest.mark.slow
def test_it_measures_a_server(tmp_path):
    environment = os.environ | {"JAXSERVE_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    flags = ["--servers=plain", "--rounds=1", "--num_requests=6", f"--json={tmp_path / 'out.json'}"]
    command = [sys.executable, "-m", "scripts.bench_ray", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    (one,) = result["rounds"]["plain"]
    assert all(one[figure] > 0 for figure in FIGURES) and result["medians"]["plain"]["request_ms"] == one["request_ms"]
