"""jaxserve.cli.bench.throughput runs, and its numbers fit each other. How large they are is no test's business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import BucketPlan
from jaxserve.cli.common.timed_run import check_fits
from jaxserve.workloads.workload import Workload, WorkloadRequest
from tests import alphabet_model
from tests.dummy import dummy_model, make_engine

ROOT = Path(__file__).parents[2]


def run(work: Path, *given: str) -> subprocess.CompletedProcess:
    model = alphabet_model.save(work / "model", tokenizer=False)
    BucketPlan(mixed=((32, 2),), head_rows=(2,)).save(work / "plan.json")
    flags = [
        f"--model={model}",
        "--workload=single",
        "--repeats=1",
        f"--bucket_plan={work / 'plan.json'}",
        "--num_pages=32",
        *given,
    ]
    environment = os.environ | {"JAXSERVE_CACHE": str(work / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxserve.cli.bench.throughput", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


@pytest.mark.slow
def test_two_settings_are_compared(tmp_path):
    path = tmp_path / "results" / "out.json"
    done = run(tmp_path, "--policies=sarathi,request_level", f"--json={path}", "--max_num_seqs=2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["single | sarathi", "single | request_level"]
    assert lines[0].endswith("x request_level") and "output tok/s" in lines[1]
    written = json.loads(path.read_text())
    assert written["workload"] == "single" and written["max_num_seqs"] == 2 and written["platform"] == "cpu"
    assert written["revision"] and written["seed"] == 0 and written["flags"]["policies"] == ["sarathi", "request_level"]
    for result in written["results"].values():
        seconds = result["elapsed_time"]
        assert result["num_requests"] == 1 and result["total_num_tokens"] == 32 + 64
        assert result["output_tokens_per_second"] == pytest.approx(64 / seconds)
        assert result["tokens_per_second"] == pytest.approx(96 / seconds)
        assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"] <= 1e3 * seconds
        assert result["num_steps"] == 64, "the prompt in one step, then a token a step"
        assert result["num_programs"] == 5, "a body, a head with and without logprobs, the score, the update of the state"


# Engines that decide on 1000 pages where all the memory is theirs; on a GPU a later one would find the first's pool in use.
POOLS = """
import jaxserve
from types import SimpleNamespace
from absl import flags
from jaxserve.cli.bench import throughput as bench_throughput

def make(model, config, eos_token_ids):
    decided = config.num_pages or round(1000 * config.gpu_memory_utilization)
    return SimpleNamespace(given=config, config=SimpleNamespace(cache=SimpleNamespace(num_pages=decided)))

jaxserve.Engine = make
flags.FLAGS(["", "--policies=sarathi,request_level", "--prefix_caching=true,false", "--gpu_memory_utilization=0.8"])
for name, engine in bench_throughput.make_engines().items():
    given = engine.given
    print(name, given.batching_policy, given.enable_prefix_caching, given.num_pages, engine.config.cache.num_pages)
"""


@pytest.mark.slow
def test_settings_compared_share_the_memory_and_have_pools_of_one_size():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", POOLS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "sarathi, prefix caching true sarathi True None 200",
        "sarathi, prefix caching false sarathi False 200 200",
        "request_level, prefix caching true request_level True 200 200",
        "request_level, prefix caching false request_level False 200 200",
    ]


@pytest.mark.slow
def test_a_trace_of_random_prompts(tmp_path):
    """What is longer than the engine allows is left out."""
    (tmp_path / "config.json").write_text('{"max_model_len": 64}')
    (tmp_path / "trace.csv").write_text("num_prefill_tokens,num_decode_tokens\n9,3\n60,6\n20,2\n7,4\n")
    flags = ["--workload=trace", f"--dataset_path={tmp_path / 'trace.csv'}", "--num_requests=2", "--json=-"]
    done = run(tmp_path, *flags, f"--config={tmp_path / 'config.json'}")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout[done.stdout.index("{") :])["results"].values()
    assert result["num_requests"] == 2 and result["total_num_tokens"] == 9 + 3 + 20 + 2


def test_what_an_engine_would_refuse_or_cut_short_does_not_fit():
    engine = make_engine(dummy_model(), batching_policy="orca")  # whole prompts, in steps of 24 tokens; 192 a request
    check_fits(Workload("fits", (WorkloadRequest(24, 10), WorkloadRequest(2, 190))), engine)
    with pytest.raises(ValueError, match="a prompt of 25 tokens, which no step can hold"):
        check_fits(Workload("wide", (WorkloadRequest(25, 1), WorkloadRequest(2, 190))), engine)
    with pytest.raises(ValueError, match="3 prompt and 190 output tokens, more than max_model_len=192: raise it to 193"):
        check_fits(Workload("long", (WorkloadRequest(24, 10), WorkloadRequest(3, 190))), engine)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--prefix_caching=yes", "give true, false or both"),
        ("--workload=none", "single"),
        ("--repeats=0", "repeats"),
        ("--workload=trace", "--workload=trace needs --dataset_path"),
        ("--max_num_seqs=64", "jaxserve bench throughput: the bucket plan's mixed buckets"),
        ("--warm_up=first_use", "jaxserve bench throughput: --warm_up: all programs are compiled before the first timed run"),
        ("--page_size=3", "jaxserve bench throughput: flag --page_size=3: must be a power of two"),
        ("--max_model_len=95", "jaxserve bench throughput: single has a request of 32 prompt and 64 output tokens, more than max"),
        ("--config={work}/config.json", "more than max_model_len=95: raise it to 96 or ask for shorter requests"),
        ("--random_input_len=5", "--random_input_len means nothing to --workload=single; it is for random"),
    ],
)
def test_bad_flags_are_refused(tmp_path, flag, message):
    (tmp_path / "config.json").write_text('{"max_model_len": 95}')
    done = run(tmp_path, flag.format(work=tmp_path))
    assert done.returncode != 0 and message in done.stderr + done.stdout and "Traceback" not in done.stderr
