"""scripts.rl_rollout learns something, on weights that the engine shares with the trainer, and reports the gap between the two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_reward_rises_and_the_gap_is_as_small_as_the_dtype(tmp_path):
    flags = ["--iterations=20", f"--json={tmp_path / 'out.json'}"]
    environment = os.environ | {"JAXSERVE_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "scripts.rl_rollout", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["revision"] and result["platform"] == "cpu" and result["flags"]["iterations"] == 20
    rewards = [record["reward"] for record in result["iterations"]]
    assert len(rewards) == 20 and abs(np.mean(rewards[:2]) - 0.25) < 0.05, "a quarter by chance"
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    assert result["shared_weights"] and "weights shared" in done.stdout
    gap = {(row["engine"], row["trainer"]): row for row in result["differences"]}
    assert gap.keys() == {("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")}
    # float32 has 24 bits, bfloat16 8: a few of their units in the last place, on log-probabilities of about -4.
    assert 0 < gap["float32", "float32"]["mean"] < 2e-6 and gap["float32", "float32"]["max"] < 1e-4
    assert 1e-5 < gap["bfloat16", "bfloat16"]["mean"] < 2e-2 and gap["bfloat16", "float32"]["mean"] < 2e-2
    assert all(record["max_difference"] < 1e-4 for record in result["iterations"]), "new weights are in use at once"
