"""jaxserve.cli.bench.latency runs, and its numbers fit each other. How large they are is no test's business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve import BucketPlan
from tests import alphabet_model

ROOT = Path(__file__).parents[2]


def run(work: Path, *given: str) -> subprocess.CompletedProcess:
    model = alphabet_model.save(work / "model", tokenizer=False)
    BucketPlan(mixed=((32, 2),), head_rows=(2,)).save(work / "plan.json")
    environment = os.environ | {"JAXSERVE_CACHE": str(work / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-m",
        "jaxserve.cli.bench.latency",
        f"--model={model}",
        f"--bucket_plan={work / 'plan.json'}",
        *given,
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


@pytest.mark.slow
def test_fields_are_those_of_vllm_and_agree(tmp_path):
    flags = ["--batch_size=2", "--input_len=20", "--output_len=5", "--num_iters=4", "--num_iters_warmup=1", "--num_pages=32"]
    done = run(tmp_path, *flags, "--json=-")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    latencies = result["latencies"]
    assert len(latencies) == 4 and result["avg_latency"] == pytest.approx(np.mean(latencies))
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(np.median(latencies))
    assert min(latencies) <= result["percentiles"]["10"] <= result["percentiles"]["99"] <= max(latencies)
    assert result["output_tokens_per_second"] == pytest.approx(2 * 5 / np.mean(latencies))
    assert 0 < result["mean_ttft_ms"] + 4 * result["mean_tpot_ms"] <= 1e3 * result["avg_latency"]
    assert "batch 2, 20 in, 5 out" in done.stderr and result["platform"] == "cpu"
    assert result["revision"] and result["seed"] == 0 and result["flags"]["batch_size"] == 2


def test_a_batch_that_cannot_be_is_refused(tmp_path):
    done = run(tmp_path, "--output_len=5000", "--max_model_len=64", "--num_pages=32")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "jaxserve bench latency: a batch has a request of 32 prompt and 5000 output tokens, more than max_model_len=64"
        in done.stderr
    )
