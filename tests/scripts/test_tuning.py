"""The chain from a profile to a plan in use: profile_steps, tune_buckets, tune_budget, bench_serve. Their numbers fit each other;
how large they are is no test's business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import BucketPlan
from jaxserve.simulation.step_time import StepTimeModel
from tests import alphabet_model

ROOT = Path(__file__).parents[2]
LIMITS = ("--max_num_seqs=4", "--max_num_batched_tokens=32", "--max_model_len=64", "--num_pages=32", "--page_size=16")


def run(work: Path, script: str, *given: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAXSERVE_CACHE": str(work / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", f"scripts.{script}", f"--model={work / 'model'}", *given]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model, a trace, and a profile of the one for the other."""
    work = tmp_path_factory.mktemp("tuning")
    alphabet_model.save(work / "model", tokenizer=False)
    rows = [f"{i * 0.01},{5 + 7 * i % 40},{1 + i % 9}" for i in range(20)]
    (work / "trace.csv").write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows, "1.0,60,6"]))
    flags = ["--rounds=1", "--held_out=3", "--min_seconds=0.005", f"--output={work / 'steps.json'}"]
    done = run(work, "profile_steps", *LIMITS, *flags)
    assert done.returncode == 0, done.stderr
    return work


def test_profile(work):
    model = StepTimeModel.load(work / "steps.json")
    about = model.about
    assert {t.max_q_len == 1 for t in model.times} == {True, False} and model.max_tokens == 32
    assert all(t.base > 0 and t.compile_seconds > 0 for t in model.times) and model.host_seconds > 0
    assert about["held_out_error"]["num_points"] == 3 and about["held_out_error"]["median"] >= 0
    assert {"revision", "device", "jax", "seed", "flags"} <= set(about) and about["flags"]["rounds"] == 1


def test_plan_is_tuned_measured_and_served(work):
    traffic = ["--workload=trace", f"--dataset_path={work / 'trace.csv'}", "--max_model_len=64"]
    plan, path = work / "plan.json", work / "tuned.json"
    given = [f"--step_times={work / 'steps.json'}", "--max_programs=10", "--measure=1", f"--output={plan}", f"--json={path}"]
    done = run(work, "tune_buckets", *traffic, *given)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    rows = result["plans"]
    assert set(rows) == {"default", "powers", "tuned"} and result["workload"].startswith("trace: 20 requests")
    for row in rows.values():
        (measured,) = row["measured"]
        assert row["num_programs"] <= 10 and measured["completed"] == 20
        # All at once, the steps of the real run are those that were predicted.
        assert measured["padding_share"] == pytest.approx(row["padding_share"])
    assert rows["tuned"]["predicted_gain"] == 1 <= rows["powers"]["predicted_gain"]
    assert str(BucketPlan.load(plan)) == rows["tuned"]["plan"]

    path = work / "serve.json"
    rates = ["--request_rate=200,inf", "--goodput=ttft:60000", "--max_num_seqs=4", "--num_pages=32", "--page_size=16"]
    done = run(work, "bench_serve", *traffic, *rates, f"--bucket_plan={plan}", f"--json={path}")
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert [r["request_rate"] for r in result["results"]] == [200.0, "inf"]
    for r in result["results"]:
        assert r["completed"] == 20 and r["total_output_tokens"] == sum(1 + i % 9 for i in range(20))
        assert r["request_goodput"] == pytest.approx(r["request_throughput"]) == pytest.approx(20 / r["duration"])
        assert 0 < r["median_ttft_ms"] <= r["p99_e2el_ms"]
    assert result["results"][1]["padding_share"] == pytest.approx(rows["tuned"]["padding_share"])


def test_budget(work):
    given = [f"--step_times={work / 'steps.json'}", "--workload=trace", f"--dataset_path={work / 'trace.csv'}"]
    path = work / "budget.json"
    flags = ["--arrivals_from_trace", "--budgets=16,20,32", "--tbt_slo_ms=60000", "--dynamic=1", f"--json={path}"]
    done = run(work, "tune_budget", *given, *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["budget"] == 32 and [r["budget"] for r in result["tried"]] == [16, 20, 32]
    assert "budget 20 runs in the bucket of 32" in done.stdout and "budget 32 runs" not in done.stdout
    assert result["dynamic"][0]["fixed"]["budget"] == 32
    done = run(work, "tune_budget", *given, "--tbt_slo_ms=0.0001")
    assert done.returncode and "no token budget keeps P99" in done.stderr


def test_bad_trace(work):
    (work / "bad.csv").write_text("num_prefill_tokens,num_decode_tokens\n400,5\n")
    flags = [f"--step_times={work / 'steps.json'}", "--workload=trace", f"--dataset_path={work / 'bad.csv'}"]
    done = run(work, "tune_buckets", *flags)
    assert done.returncode and "no request of bad fits max_model_len=64" in done.stderr


def test_simulation_beside_the_engine(work):
    """Three figures of one workload, simulated and served; none differs by nothing, which the exit status says."""
    path, given = work / "errors.json", [f"--step_times={work / 'steps.json'}", "--rounds=1", "--max_model_len=64", "--tolerance=0"]
    traffic = ["--workload=trace", f"--dataset_path={work / 'trace.csv'}", "--request_rate=40", f"--json={path}"]
    done = run(work, "validate_simulator", *given, *traffic)
    assert done.returncode == 1 and done.stdout.count("simulated") == 3, done.stderr
    assert "differ by more than 0%: output_throughput, median_ttft_ms, p99_tbt_ms" in done.stderr
    metrics = json.loads(path.read_text())["metrics"]
    for row in metrics.values():
        assert row["measured"] == row["rounds"][0] > 0
        assert row["error"] == pytest.approx(row["simulated"] / row["measured"] - 1)
