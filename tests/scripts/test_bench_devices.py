"""scripts.bench_devices on two devices: what it prints is what it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_engines_of_one_and_two_devices(tmp_path):
    command = [
        sys.executable,
        "-m",
        "scripts.bench_devices",
        "--devices=1,2",
        "--rounds=2",
        "--batch=1",
        f"--json={tmp_path / 'out.json'}",
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert list(results) == ["1", "2"]
    for n, found in results.items():
        assert len(found["turns"]) == 2 and found["step_ms"] > found["host_ms"] > 0 and found["compile_seconds"] > 0
        assert f"{n} devices: step {found['step_ms']:.2f} ms" in done.stdout
