"""jaxserve.cli.verify on golden checkpoints, whose expected.npz is what transformers said; and on faults that it must name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.goldens.golden import HERE

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".venv-torch" / "bin" / "python"


def run_python(*args: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


def verify(*flags: str) -> subprocess.CompletedProcess:
    return run_python("-m", "jaxserve.cli.verify", "--json=-", *flags)


@pytest.mark.slow
def test_a_golden_agrees_with_what_transformers_said():
    done = verify(f"--model={HERE / 'qwen3_moe'}", f"--reference={HERE / 'qwen3_moe' / 'expected.npz'}")
    assert done.returncode == 0, done.stderr
    assert "agrees with transformers" in done.stderr
    result = json.loads(done.stdout)
    assert result["revision"] and result["flags"]["model"] == str((HERE / "qwen3_moe").relative_to(ROOT))
    assert result["num_prompts"] == 4 and result["num_greedy_tokens"] == 96 and result["faults"] == result["parted"] == []
    assert 0 < result["logits_max_difference"] < 1e-4 and 0 < result["engine_logprobs_max_difference"] < 1e-4


@pytest.mark.slow
def test_another_models_weights_are_a_fault():
    """The rope of one variant under the answers of another."""
    done = verify(f"--model={HERE / 'llama'}", f"--reference={HERE / 'llama' / 'rope_linear' / 'expected.npz'}")
    assert done.returncode == 1
    assert "FAULT: the model: logits differ by" in done.stderr and "FAULTY" in done.stderr
    assert len(json.loads(done.stdout)["faults"]) > 1


@pytest.mark.skipif(not PEER.exists(), reason="needs .venv-torch (make setup-torch)")
@pytest.mark.slow
def test_the_peer_is_asked_and_its_answers_kept(tmp_path):
    saved, model = tmp_path / "answers.npz", HERE / "qwen2"
    done = verify(f"--model={model}", f"--peer={PEER}", f"--save_reference={saved}", "--max_tokens=5")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_greedy_tokens"] == 20
    assert verify(f"--model={model}", f"--reference={saved}").returncode == 0


# Answers that agree, then one thing changed in each case; prints the faults of all as JSON.
FAULTS = """
import json
import numpy as np
from dataclasses import replace
from jaxserve.cli.verify import Answers, compare
rng = np.random.default_rng(0)
prompts, logits = [np.arange(n, dtype=np.int32) for n in (1, 9)], [rng.normal(size=(n, 30)) for n in (1, 9)]
greedy, logprobs = rng.integers(0, 30, (2, 5)), rng.normal(size=(2, 5))
theirs = Answers(prompts, logits, greedy, gaps=np.full((2, 5), 0.1))
ours = Answers(prompts, [x + 1e-6 for x in logits], greedy, engine_logprobs=logprobs, plain_logprobs=logprobs + 1e-6)
other = greedy.copy()
other[1, 3:] += 1
tie = theirs.gaps.copy()
tie[1, 3] = 1e-6
wrong = logprobs.copy()
wrong[0, 2] += 0.01
missing = logprobs.copy()
missing[0, 0] = np.nan
cases = {
    "none": (ours, theirs),
    "logits": (replace(ours, logits=[logits[0], logits[1] + 0.01 * rng.normal(size=(9, 30))]), theirs),
    "greedy": (replace(ours, greedy=other), theirs),
    "tie": (replace(ours, greedy=other), replace(theirs, gaps=tie)),
    "engine": (replace(ours, engine_logprobs=wrong), theirs),
    "nan": (replace(ours, engine_logprobs=missing), theirs),
}
print(json.dumps({name: compare(*case, "float32")["faults"] for name, case in cases.items()}))
"""


def test_each_fault_is_named():
    done = run_python("-c", FAULTS)
    assert done.returncode == 0, done.stderr
    faults = json.loads(done.stdout)
    assert faults["none"] == faults["tie"] == []
    (logits,), (greedy,), (engine,), (nan,) = (faults[name] for name in ("logits", "greedy", "engine", "nan"))
    assert logits.startswith("the model: logits differ by 9.") or logits.startswith("the model: logits differ by 1.")
    assert greedy == "prompt 1: greedy token 3 differs, where transformers' best is 1.00e-01 ahead"
    assert engine.startswith("the engine: a log-probability differs from the plain forward's by 1.00e-02")
    assert nan.startswith("the engine: ") and "nan" in nan


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reference=none.npz"], "No such file"),
        pytest.param([f"--reference={HERE / 'index.json'}"], "jaxserve verify: ", marks=pytest.mark.slow),
        ([f"--reference={HERE / 'llama' / 'expected.npz'}", "--prompt=a"], "--reference brings its own prompts"),
        ([f"--reference={HERE / 'llama' / 'expected.npz'}", "--max_tokens=5"], "leave out --max_tokens"),
        pytest.param(["--peer=/no/such/python"], "/no/such/python", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mistakes_end_with_one_line(flags, message):
    done = verify(f"--model={HERE / 'qwen2'}", *flags)
    assert done.returncode == 1 and message in done.stderr + done.stdout and "Traceback" not in done.stderr
