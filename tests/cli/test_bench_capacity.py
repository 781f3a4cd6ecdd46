"""`jaxserve tune capacity`: in virtual time against a hand calculation, broken off and gone on with, and on a real engine."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve import BucketPlan
from jaxserve.cli.common.finished import Finished
from jaxserve.step_times.fitted import BucketTimes, StepTimeModel
from tests import alphabet_model

ROOT = Path(__file__).parents[2]
# 0.1 s a step, whatever it holds.
STEPS = StepTimeModel(
    (BucketTimes(8, 8, 1, 0.1, 0.0, 0.0), BucketTimes(256, 8, 256, 0.1, 0.0, 0.0)),
    ((8, 0.0),),
    (8,),
    16,
    about={"max_model_len": 128, "max_num_batched_tokens": 256, "max_num_seqs": 8, "num_pages": 256, "multiple": 2},
)
WORK = ("--workload=random", "--num_prompts=600", "--random_input_len=64", "--random_output_len=10", "--start_rate=4")
SEARCH = ("--policies=sarathi,request_level", "--slo_ms=150", "--min_gaps=5000", "--seeds=2")


def run(*given: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxserve.cli.tune.capacity", *given]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


@pytest.mark.slow
def test_simulated_and_resumed(tmp_path):
    STEPS.save(tmp_path / "steps.json")
    path, profile = tmp_path / "capacity.json", f"--step_times={tmp_path / 'steps.json'}"
    done = run(profile, *WORK, *SEARCH, f"--json={path}")
    assert done.returncode == 0, done.stderr
    whole = json.loads(path.read_text())
    ours, theirs = whole["capacities"]
    # Rows of 10 steps, freed a step late: 8 / 1.1 requests a second, and what 2 s of delay let through of 600: 7.64.
    assert all(8 / 1.1 * 0.97 < c < 7.64 * 1.03 for c in ours["capacities"])
    assert theirs["mean"] < ours["mean"] and ours["ratio"] > 1 == theirs["ratio"]
    assert {"revision", "device", "flags"} <= set(whole)

    # A fourth of the trials are lost: the same trials are served again, and those alone.
    lost = list(whole["results"])[::4]
    kept = {key: value for key, value in whole["results"].items() if key not in lost}
    path.write_text(json.dumps({"settings": whole["settings"], "results": kept}))
    done = run(profile, *WORK, *SEARCH, f"--json={path}")
    assert done.returncode == 0, done.stderr
    again = json.loads(path.read_text())
    assert again["capacities"] == whole["capacities"] and again["results"] == whole["results"]
    assert list(again["results"])[: len(kept)] == list(kept), "a finished trial was served again"

    replace(STEPS, host_seconds=0.01, about=STEPS.about).save(tmp_path / "steps.json")
    done = run(profile, *WORK, *SEARCH, f"--json={path}")
    assert done.returncode == 1 and "results of other settings (profile" in done.stderr


@pytest.mark.slow
def test_options_of_a_file(tmp_path):
    """A file's plan without decode buckets makes every step one of 0.2 s, where the default plan's decodes take 0.1 s; its pool and
    threshold count too."""
    times = (BucketTimes(8, 8, 1, 0.1, 0.0, 0.0), BucketTimes(256, 8, 256, 0.2, 0.0, 0.0))
    replace(STEPS, times=times, about=STEPS.about).save(tmp_path / "steps.json")
    plan = BucketPlan(mixed=((256, 8),), head_rows=(8,))
    options = {"bucket_plan": json.loads(plan.to_json()), "num_pages": 64, "long_prefill_token_threshold": 32}
    (tmp_path / "tuned.json").write_text(json.dumps(options))
    search = ("--policies=sarathi", "--slo_ms=400", "--min_gaps=5000", "--seeds=1", "--precision=0.1")
    found = []
    for given in ((), (f"--config={tmp_path / 'tuned.json'}",)):
        path = tmp_path / f"{len(given)}.json"
        done = run(f"--step_times={tmp_path / 'steps.json'}", *WORK, *search, *given, f"--json={path}")
        assert done.returncode == 0, done.stderr
        result = json.loads(path.read_text())
        found.append(result["capacities"][0]["mean"])
    assert 0 < found[1] < 0.75 * found[0]
    settings = result["settings"]
    assert settings["bucket_plan"] == str(plan) and settings["num_pages"] == 64
    assert settings["limits"]["long_prefill_token_threshold"] == 32


@pytest.mark.slow
def test_analytic(tmp_path):
    """Two stages, a budget and one that follows the objective up to it: more capacity where the objective binds, else the same."""
    path = tmp_path / "capacity.json"
    machine = ("--model=qwen3-8b", "--gpu=a40", "--pp=2", "--max_model_len=2048", "--max_num_seqs=32")
    work = ("--workload=random", "--num_prompts=320", "--random_input_len=600", "--random_output_len=80", "--start_rate=4")
    search = ("--policies=sarathi:512,dynamic:512", "--slo_ms=75,300", "--precision=0.2", "--seeds=1", "--min_gaps=5000")
    done = run(*machine, *work, *search, f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert "requests are few" not in done.stderr
    rows = {(row["policy"], row["slo_ms"]): row["mean"] for row in json.loads(path.read_text())["capacities"]}
    assert (
        rows["dynamic:512", 75.0] > 1.4 * rows["sarathi:512", 75.0] and rows["dynamic:512", 300.0] == rows["sarathi:512", 300.0] > 1
    )


@pytest.mark.slow
def test_analytic_with_a_plan(tmp_path):
    """Bound by compute, and steps of 1024 tokens in buckets of 2048: half of the capacity. The default plan lies between."""
    BucketPlan(mixed=((2048, 16),), head_rows=(16,)).save(tmp_path / "plan.json")
    machine = ("--model=qwen3-8b", "--gpu=a40", "--max_model_len=2048", "--max_num_seqs=16", "--max_num_batched_tokens=1024")
    work = ("--workload=random", "--num_prompts=160", "--random_input_len=1000", "--random_output_len=20", "--start_rate=4")
    search = ("--policies=sarathi", "--slo_ms=1000", "--precision=0.05", "--seeds=1", "--min_gaps=1000")
    found = {}
    for name in ("none", "default", f"{tmp_path / 'plan.json'}"):
        path, given = tmp_path / "capacity.json", [] if name == "none" else [f"--bucket_plan={name}"]
        path.unlink(missing_ok=True)
        done = run(*machine, *work, *search, *given, f"--json={path}")
        assert done.returncode == 0 and "searches: 100%" in done.stderr and "1/1" in done.stderr, done.stderr
        result = json.loads(path.read_text())
        found[result["settings"]["bucket_plan"]] = result["capacities"][0]["mean"]
    none, default, wide = found.values()
    assert list(found)[:2] == ["none", "default"] and 0 < wide < 0.6 * none and wide < default <= none


def test_a_plot_that_cannot_be_drawn_is_refused_at_once():
    code = (
        "import runpy, sys\nsys.modules['matplotlib'] = None\nrunpy.run_module('jaxserve.cli.tune.capacity', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "--plot=x", "--step_times=nowhere.json", "--slo_ms=9"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 1 and "plots need matplotlib" in done.stdout + done.stderr and "nowhere.json" not in done.stderr


@pytest.mark.slow
def test_real(tmp_path):
    """60 requests at once for 4 rows wait, a few a second don't; what lies between is the machine's business."""
    alphabet_model.save(tmp_path / "model", tokenizer=False)
    path = tmp_path / "capacity.json"
    limits = ("--max_model_len=64", "--max_num_seqs=4", "--max_num_batched_tokens=32", "--num_pages=32", "--page_size=16")
    work = ("--workload=random", "--num_prompts=60", "--random_input_len=8", "--random_output_len=4", "--start_rate=4096")
    search = ("--policies=sarathi", "--slo_ms=1e6", "--max_scheduling_delay=0.005", "--precision=1", "--min_gaps=100", "--seeds=1")
    done = run(f"--model={tmp_path / 'model'}", "--real", "--bucket_plan=default", *limits, *work, *search, f"--json={path}")
    assert done.returncode == 0 and re.search(r"sarathi: .*/60 ", done.stderr), done.stderr
    result = json.loads(path.read_text())
    (row,) = result["capacities"]
    trials = {t["rate"]: t for t in result["results"].values()}
    assert len(trials) >= 2 and all(t["num_gaps"] == 180 and t["delay"] > 0 < t["tbt"] for t in trials.values())
    assert row["mean"] == max(rate for rate, t in trials.items() if t["delay"] <= 0.005)


CACHED = """
import sys
from absl import flags
from jaxserve.simulation.capacity import Objective
from jaxserve.cli.tune import capacity as bench_capacity
from jaxserve.cli.common import open_loop
flags.FLAGS(sys.argv)
run, shares = open_loop.serve, []
def serve(*given, **options):
    ran = run(*given, **options)
    shares.append(ran.counts["prefix_hit_share"])
    return ran
open_loop.serve = serve
real = bench_capacity.Real()
for rate in (1e4, 2e4):
    real.serve(bench_capacity.Contender.parse("sarathi"), Objective(1.0), bench_capacity.traffic(real, rate, 0), 0)
print(shares)
config = real._engine.config
print(config.plan, config.cache.num_pages, config.scheduler.long_prefill_token_threshold)
"""


@pytest.mark.slow
def test_a_rate_finds_nothing_cached(tmp_path):
    """The prompts of one seed are the same at every rate. The engine's options are those of the file."""
    alphabet_model.save(tmp_path / "model", tokenizer=False)
    plan = BucketPlan(mixed=((32, 4),), head_rows=(4,))
    options = {"bucket_plan": json.loads(plan.to_json()), "num_pages": 64, "page_size": 4, "long_prefill_token_threshold": 8}
    (tmp_path / "tuned.json").write_text(json.dumps(options))
    limits = ("--max_model_len=64", "--max_num_seqs=4", "--max_num_batched_tokens=32", f"--config={tmp_path / 'tuned.json'}")
    work = ("--workload=random", "--num_prompts=6", "--random_input_len=24", "--random_output_len=4")
    command = [sys.executable, "-c", CACHED, f"--model={tmp_path / 'model'}", *limits, *work]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[0.0, 0.0]", f"{plan} 64 8"]


UNBOUNDED = """
import sys
from absl import flags
from jaxserve.simulation.capacity import Objective
from jaxserve.workloads.workload import Workload, WorkloadRequest
from jaxserve.cli.tune import capacity as bench_capacity
flags.FLAGS(sys.argv)
server = bench_capacity.Analytic("h100")
work = Workload("four", (WorkloadRequest(1900, 8),) * 4)
for policy in ("orca", "orca:2048", "prefill_first"):
    times = server.serve(bench_capacity.Contender.parse(policy), Objective(1e9), work, 0)
    print(len(set(times.first.tolist())))
"""


def test_sequences_alone_bound_orcas_steps_without_a_plan():
    """Four prompts of nearly the longest length are one step; with a budget, or another policy, four."""
    command = [sys.executable, "-c", UNBOUNDED, "--model=qwen3-0.6b", "--max_model_len=2048", "--max_num_seqs=4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "4", "4"]


@pytest.mark.slow
def test_trials_of_another_workload_are_not_taken_for_ours(tmp_path):
    path, machine = tmp_path / "capacity.json", ("--model=qwen3-8b", "--gpu=a40", "--max_model_len=2048", "--max_num_seqs=8")
    work = ("--workload=random", "--num_prompts=40", "--random_output_len=20", "--start_rate=4", "--seeds=1", "--precision=1")
    search = (*work, "--policies=sarathi", "--slo_ms=1", "--min_gaps=100", f"--json={path}")
    assert run(*machine, *search, "--random_input_len=64").returncode == 0
    for given, name in ((["--random_input_len=65"], "requests: "), (["--random_input_len=64", "--num_pages=300"], "num_pages: ")):
        done = run(*machine, *search, *given)
        assert done.returncode == 1 and "results of other settings" in done.stderr and name in done.stderr
    whole = json.loads(path.read_text())
    assert whole["settings"]["code"] and "revision" not in whole["settings"]
    whole["settings"]["code"] = "another"
    path.write_text(json.dumps(whole))
    done = run(*machine, *search, "--random_input_len=64")
    assert done.returncode == 1 and "results of other settings (code: 'another' there" in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--slo_ms=50", "--policies=fifo"], "'fifo' must be one of sarathi, .*, dynamic"),
        pytest.param(["--slo_ms=50"], "give --step_times", marks=pytest.mark.slow),
        pytest.param(["--slo_ms=50", "--real"], "give --max_model_len", marks=pytest.mark.slow),
        (["--slo_ms=50", "--real", "--gpu=h100"], "give one of them"),
        (["--slo_ms=50", "--gpu=h1000", "--model=qwen3-8b"], "'h1000' is not known"),
        pytest.param([], "give --slo_ms", marks=pytest.mark.slow),
        (["--slo_ms=50", "--batching_policy=orca"], "--batching_policy: --policies says"),
        (["--slo_ms=50", "--real", "--tp=2", "--pp=2"], "--pp: they are of --gpu"),
        (["--slo_ms=50", "--gpu=h100", "--noenable_prefix_caching", "--dtype=float32"], "--dtype, --enable_prefix_caching: --gpu"),
        (
            ["--slo_ms=50", "--gpu=h100", "--noasync_scheduling", "--speculative_config={}"],
            "--async_scheduling, --speculative_config:",
        ),
        (["--slo_ms=50", "--gpu=h100", "--multiple=4"], "--multiple: it is of plans for --step_times"),
        pytest.param(
            ["--slo_ms=50", "--real", "--multiple=4"], "--multiple: it is of plans for --step_times", marks=pytest.mark.slow
        ),
        (["--slo_ms=50", "--request_rate=4", "--arrivals_from_trace"], "--request_rate, --arrivals_from_trace: rates are searched"),
        pytest.param(["--slo_ms=50", "--seed=3"], "--seed: rates are searched", marks=pytest.mark.slow),
        (["--slo_ms=50", "--real", "--max_model_len=128", "--step_times=x"], "--step_times: only a dynamic budget"),
        (["--slo_ms=50", "--step_times=x", "--speculative_config={}"], "--speculative_config: steps with drafts"),
        pytest.param(["--slo_ms=50", "--step_times=x", "--dtype=float32"], "--dtype: a profile's steps", marks=pytest.mark.slow),
        (["--slo_ms=50", "--tbt_slo_ms=9"], "--tbt_slo_ms: a dynamic budget has each of --slo_ms"),
        (
            ["--slo_ms=50", "--gpu=h100", "--model=qwen3-8b", "--max_model_len=2048", "--gpu_memory_utilization=0.1"],
            "GiB of weights a GPU leave no room for KV",
        ),
    ],
)
def test_bad_flags(given, message):
    done = run(*given)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(message, done.stderr)


def test_finished(tmp_path):
    path = tmp_path / "sub" / "done.json"
    first = Finished(path, {"a": (1, 2)})
    first["x"] = {"value": 0.1}
    assert "x" in Finished(path, {"a": [1, 2]}) and Finished(path, {"a": [1, 2]})["x"] == {"value": 0.1}
    with pytest.raises(ValueError, match=r"other settings \(a: \[1, 2\] there, 3 now\)"):
        Finished(path, {"a": 3})
    path.write_text("{")
    with pytest.raises(ValueError, match="does not hold finished results"):
        Finished(path, {"a": 3})
