"""Scripts whose engine lies on two devices by the flags that say so: they end well, and say on what they ran."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import alphabet_model

ROOT = Path(__file__).parents[2]
ON_TWO = "--tensor_parallel_size=2"


def run(tmp_path: Path, script: str, *flags: str) -> tuple[str, dict[str, Any]]:
    """(what it printed, its JSON)."""
    command = [sys.executable, "-m", f"scripts.{script}", *flags, f"--json={tmp_path / 'out.json'}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((tmp_path / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ON_TWO, "--pipeline_parallel_size=2"])
def test_rl_rollout(layout, tmp_path):
    """The log-probabilities of the cut model are the trainer's, also after new weights."""
    said, result = run(tmp_path, "rl_rollout", layout, "--iterations=2", "--prompts=2", "--group=2")
    assert "weights converted" in said, "a trainer's fused kernels have other columns than devices need"
    assert result["flags"][layout[2:-2]] == 2 and len(result["iterations"]) == 2
    assert all(0 < record["max_difference"] < 1e-4 for record in result["iterations"])


@pytest.mark.slow
def test_bench_deterministic(tmp_path):
    flags = ("--model=tiny-qwen3-moe", "--decodes=1", "--prefills=16", "--kv_len=16", "--rounds=2", "--dtype=float32")
    _, result = run(tmp_path, "bench_deterministic", ON_TWO, *flags)
    assert result["tensor_parallel_size"] == 2 and [row["step"] for row in result["rows"]] == ["decode 1", "prefill 16"]


@pytest.mark.slow
def test_bench_engine(tmp_path):
    """Without the comparison with a bare step, which is one device's."""
    _, result = run(tmp_path, "bench_engine", ON_TWO, "--peer=", "--only=tiny_equal_2", "--rounds=1")
    assert result["flags"]["tensor_parallel_size"] == 2 and result["results"]["tiny_equal_2"]["runs"][0] > 0


@pytest.mark.slow
def test_bench_loading(tmp_path):
    said, result = run(tmp_path, "bench_loading", ON_TWO, "--model=tiny-qwen3", "--dtype=float32")
    assert result["tensor_parallel_size"] == 2 and result["weights_bytes"] == 4 * NUM_WEIGHTS
    assert result["peak_bytes"] >= result["held_bytes"] > 0.9 * result["weights_bytes"]
    assert f"peak {result['peak_bytes'] / 2**20:.0f} MiB, {result['peak_ratio']:.2f} times" in said


# tiny-qwen3: the embedding; of each of 4 layers q and o, k and v, gate, up and down, the norms; the last norm
NUM_WEIGHTS = 4096 * 256 + 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768 + 2 * 256 + 2 * 64) + 256


@pytest.mark.slow
def test_soak(tmp_path):
    """A server on two devices leaks nothing; flags that a server at an address can't heed are refused."""
    folder = alphabet_model.save(tmp_path / "model", max_position_embeddings=1024)
    sizes = ("--num_requests=40", "--check_every=20", "--max_concurrency=8", "--max_growth_mb=2000")
    _, result = run(tmp_path, "soak", ON_TWO, f"--model={folder}", *sizes)
    assert result["faults"] == [] and result["statuses"]["200"]
    command = [sys.executable, "-m", "scripts.soak", "--url=http://127.0.0.1:9", ON_TWO]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode and "--tensor_parallel_size: of a server that is started here" in done.stderr
