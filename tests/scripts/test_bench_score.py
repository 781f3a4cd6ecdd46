"""scripts.bench_score runs, and its numbers fit each other. How large they are is no test's business."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import BucketPlan
from tests import alphabet_model

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # a command; tests/llm/test_scoring.py has the scores


def run(work: Path, *given: str) -> subprocess.CompletedProcess:
    model = alphabet_model.save(work / "model", tokenizer=False)
    BucketPlan(mixed=((32, 2),), head_rows=(2,)).save(work / "plan.json")
    flags = [f"--model={model}", f"--bucket_plan={work / 'plan.json'}", "--num_pages=8", "--num_prompts=3", "--repeats=3", *given]
    environment = os.environ | {"JAXSERVE_CACHE": str(work / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "scripts.bench_score", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


def test_ratio_is_that_of_the_pairs(tmp_path):
    done = run(tmp_path, "--length=40", f"--json={tmp_path / 'out.json'}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    plain, scored = result["seconds_plain"], result["seconds_scored"]
    assert len(plain) == len(scored) == 3
    assert result["ratio"] == pytest.approx(statistics.median(p / s for p, s in zip(plain, scored, strict=True)))
    assert result["tokens_per_second_scored"] == pytest.approx(3 * 40 / statistics.median(scored))
    assert 0 < result["head_share_of_flops"] < 1
    assert result["revision"] and result["seed"] == 0 and result["flags"]["length"] == 40


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--length=256", "python -m scripts.bench_score: request 'longest' has a prompt of 256 tokens, but max_model_len=256"),
        ("--model=no/such/model/here", "python -m scripts.bench_score: 'no/such/model/here' is not a file or folder here"),
    ],
)
def test_mistakes_end_with_one_line_and_an_exit_code(tmp_path, flag, message):
    done = run(tmp_path, flag)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(message) and "Traceback" not in done.stderr
