"""scripts.bench_experts times two ways to compute one layer. How long they take is no test's business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}
SMALL = ["--experts=5", "--active=3", "--num_tokens=4", "--experts_per_token=2", "--hidden_size=16", "--expert_size=8"]
# Both ways beside a loop over tokens in float64.
AGREE = """
import jax
import numpy as np
from scripts.bench_experts import by_groups, by_ragged_dot, choices

rng = np.random.default_rng(0)
E, T, k, D, F = 6, 5, 2, 16, 8
ids = choices(E, 4, T, k)
assert len(np.unique(ids)) == 4 and all(len(set(row)) == k for row in ids.tolist())
weights = rng.random((T, k)).astype(np.float32)
x, gate_up, down = (rng.normal(size=shape).astype(np.float32) for shape in ((T, D), (E, D, 2 * F), (E, F, D)))
expected = np.zeros((T, D))
for t in range(T):
    for expert, weight in zip(ids[t], weights[t]):
        gate, up = np.split(x[t].astype(np.float64) @ gate_up[expert], 2)
        expected[t] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
for layer in (by_groups, by_ragged_dot):
    np.testing.assert_allclose(jax.jit(layer)(x, ids, weights, gate_up, down), expected, rtol=1e-4, atol=1e-3)
print("agree")
"""

pytestmark = pytest.mark.slow  # a command; tests/kernels/test_grouped_matmul.py has the matmuls


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=200)


def test_both_ways_compute_the_layer():
    done = run("-c", AGREE)
    assert done.returncode == 0 and done.stdout == "agree\n", done.stderr


def test_every_case_is_timed():
    done = run("-m", "scripts.bench_experts", *SMALL, "--repeats=6", "--backend=xla", "--json=-")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(r["experts"], r["active"]) for r in result["results"]] == [(5, 3)]
    for r in result["results"]:
        assert (r["grouped_ms"]["runs"], r["ragged_dot_ms"]["runs"]) == (6, 5)
        assert all(0 < r[name]["min"] <= r[name]["median"] for name in ("grouped_ms", "ragged_dot_ms"))
    assert result["revision"] and result["flags"]["repeats"] == 6 and result["backend"] == "xla" and result["platform"] == "cpu"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--active=1,3", "at least 2 and at most 5 are active"),
        ("--experts=x", "'x'"),
        ("--backend=fast", "backend='fast' must be one of auto, reference, xla, cpu"),
    ],
)
def test_mistakes_end_with_one_line_and_an_exit_code(flag, message):
    done = run("-m", "scripts.bench_experts", *SMALL, flag)
    assert done.returncode == 1 and done.stderr.startswith("python -m scripts.bench_experts: ") and message in done.stderr
    assert "Traceback" not in done.stderr
