"""simulate and validate_simulator from a shell: what they print and refuse."""

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import BucketPlan
from jaxserve.step_times.analytic import Deployment
from jaxserve.step_times.hardware import GPUS
from jaxserve.step_times.model_shapes import ModelShape
from scripts.reproduce.vidur_profiles import OPERATORS
from tests import alphabet_model
from tests.cli.commands import MODULES

ROOT = Path(__file__).parents[2]


def run(script: str, *given: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", MODULES[script], *given]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


@pytest.mark.slow
def test_more_replicas_serve_more(tmp_path):
    """Overloaded, three replicas have about three times the throughput of one; a pipeline names its bubbles."""
    rates = []
    work = ["--workload=random", "--num_requests=150", "--random_input_len=512", "--random_output_len=32"]
    for replicas, path in ((1, tmp_path / "one.json"), (3, tmp_path / "three.json")):
        given = ["--model=qwen3-8b", "--gpu=h100", "--max_num_seqs=8", f"--replicas={replicas}", "--goodput=ttft:200"]
        done = run("simulate", *given, *work, f"--json={path}")
        assert done.returncode == 0 and "150 requests in" in done.stdout, done.stderr
        result = json.loads(path.read_text())
        rates.append(result["request_throughput"])
        assert result["gpus"] == replicas == len(result["busy_share"]) and 0 < result["request_goodput"] < rates[-1]
    assert rates[1] == pytest.approx(3 * rates[0], rel=0.1)
    done = run(
        "simulate",
        "--model=falcon-180b",
        "--gpu=a100-80gb",
        "--tensor_parallel_size=4",
        "--pp=2",
        "--repeat=2",
        "--gpus_per_node=4",
    )
    assert done.returncode == 0 and "8 GPUs, 32 requests in" in done.stdout and "stages: pb1" in done.stdout, done.stderr


@pytest.mark.slow
def test_steps_are_padded_as_an_engines(tmp_path):
    """The engine's default plan unasked, one of a file, or none; its buckets are what a step is timed by."""
    BucketPlan(mixed=((2048, 16),), head_rows=(16,)).save(tmp_path / "plan.json")
    work = ["--model=qwen3-8b", "--gpu=a40", "--workload=random", "--num_requests=20", "--random_input_len=500"]
    work += ["--random_output_len=20", "--max_num_seqs=16", "--request_rate=2"]
    latencies = []
    for given in ([], ["--bucket_plan=default"], ["--bucket_plan=none"], [f"--bucket_plan={tmp_path / 'plan.json'}"]):
        done = run("simulate", *work, *given, f"--json={tmp_path / 'out.json'}")
        assert done.returncode == 0, done.stderr
        latencies.append(json.loads((tmp_path / "out.json").read_text())["mean_e2el_ms"])
    unasked, default, none, wide = latencies
    assert none < default == unasked < wide / 3


@pytest.mark.slow
def test_a_folder_has_a_shape_too(tmp_path):
    alphabet_model.save(tmp_path / "model", tokenizer=False)
    done = run("simulate", f"--model={tmp_path / 'model'}", "--workload=eight")
    assert done.returncode == 0 and "8 requests in" in done.stdout, done.stderr
    assert "8/8" in done.stderr  # the bar ends full
    layers = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(alphabet_model.CONFIG | layers))
    done = run("simulate", f"--model={tmp_path / 'model'}", "--workload=eight")
    assert done.returncode == 1 and "layers of several kinds" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--goodput=speed:3"], "jaxserve simulate: "),
        (["--bucket_plan=nowhere.json"], "No such file or directory: 'nowhere.json'"),
        (["--tp=3"], "jaxserve simulate: qwen3-8b has 32 heads"),
        (["--graph_collectives"], "graph_collectives=True is of several devices, and tensor_parallel_size=1: leave it out"),
        (["--gpu=abacus"], "--gpu=abacus is not known; choose from a100-80gb"),
        (["--model=nowhere"], "neither a folder with a config.json nor one of mistral-7b"),
    ],
)
def test_bad_flags(given, message):
    done = run("simulate", *given)
    assert done.returncode != 0 and message in done.stderr + done.stdout and "Traceback" not in done.stderr


def test_kernel_profiles_are_compared(tmp_path):
    """A made-up profile of a GPU that is a tenth slower than predicted, whose qkv takes half as long up to 64 tokens at TP 2; and
    of one whose norms take twice as long."""
    done = run("validate_simulator", f"--vidur={tmp_path}")
    assert done.returncode != 0 and "no profile <gpu>_<model>_mlp.csv.gz" in done.stdout + done.stderr
    for name, message in (("abacus_tiny", "must begin with a known GPU, a100"), ("a40_empty", "it has 0 rows and lacks n_embd")):
        with gzip.open(tmp_path / f"{name}_mlp.csv.gz", "wt") as file:
            file.write("num_tokens\n")
        done = run("validate_simulator", f"--vidur={tmp_path}")
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
        (tmp_path / f"{name}_mlp.csv.gz").unlink()
    shape = ModelShape(name="tiny", num_layers=1, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=1024,
                       vocab_size=1000)  # fmt: skip
    about = {"n_head": 8, "n_kv_head": 8, "n_embd": 512, "n_expanded_embd": 1024, "vocab_size": 1000, "use_gated_mlp": True}
    for gpu, norms in (("a40", 1.0), ("h100", 2.0)):
        rows = []
        for tp in (1, 2):
            times = Deployment(shape, GPUS[gpu], tp).step_times()
            for tokens in (1, 100, 4096):
                row = about | {"num_tokens": tokens, "num_tensor_parallel_workers": tp}
                for name, (columns, runs) in OPERATORS.items():
                    factor = norms if name == "norms" else 0.5 if (gpu, name, tp, tokens) == ("a40", "qkv", 2, 1) else 1.0
                    seconds = 1.1 * times.operators(tokens)[name] * factor
                    row |= {f"time_stats.{column}.median": 1e3 * seconds / len(columns) / runs for column in columns}
                rows.append(row)
        with gzip.open(tmp_path / f"{gpu}_tiny_mlp.csv.gz", "wt", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    done = run("validate_simulator", f"--vidur={tmp_path}", f"--json={tmp_path / 'errors.json'}")
    assert done.returncode == 0 and "| a40_tiny | layer | 9.1 |" in done.stdout, done.stderr
    rows = {(r["profile"], r["operator"]): r for r in json.loads((tmp_path / "errors.json").read_text())["rows"]}
    assert len(rows) == 2 * (len(OPERATORS) + 2) and rows["a40_tiny", "qkv"]["bias"] == pytest.approx(1 / 1.1 - 1)
    assert rows["a40_tiny", "qkv"]["by_tp"]["2"] == pytest.approx({"1-64": 2 / 1.1 - 1, "65-512": 1 / 1.1 - 1, "513-": 1 / 1.1 - 1})
    assert "| a40_tiny | qkv | -9.1, +81.8 | -9.1, -9.1 | -9.1, -9.1 |" in done.stdout
    assert rows["h100_tiny", "norms"]["median"] == pytest.approx(1 - 1 / 2.2)
    assert rows["h100_tiny", "matmuls"]["by_tokens"]["513-"] == pytest.approx(1 - 1 / 1.1)


@pytest.mark.slow
def test_prefill_and_decode_apart(tmp_path):
    """Prompts no longer delay tokens; a slow link delays first tokens, and nothing else."""
    work = ["--model=qwen3-8b", "--gpu=h100", "--workload=random", "--num_requests=100", "--random_input_len=2000"]
    work += ["--random_output_len=32", "--request_rate=6", "--goodput=ttft:500"]
    results = []
    for given in (["--replicas=2"], ["--replicas=1", "--prefill_replicas=1"]):
        for more in ([], ["--kv_bandwidth=2"])[: len(given)]:
            done = run("simulate", *work, *given, *more, f"--json={tmp_path / 'out.json'}")
            assert done.returncode == 0 and "2 GPUs, 100 requests in" in done.stdout, done.stderr
            results.append(json.loads((tmp_path / "out.json").read_text()))
    together, apart, slow = results
    assert apart["p99_itl_ms"] < 0.6 * together["p99_itl_ms"]
    bytes_of_prompt = 2000 * 36 * 2 * 8 * 128 * 2
    delay = 2 * 1e3 * bytes_of_prompt * (1 / 2e9 - 1 / 10e9)  # saved and loaded
    assert slow["median_ttft_ms"] - apart["median_ttft_ms"] > 0.9 * delay
    assert slow["p50_itl_ms"] == pytest.approx(apart["p50_itl_ms"], rel=0.1)
    assert len(apart["busy_share"]) == 2 and apart["prefill_replicas"] == 1
    done = run("simulate", *work, "--prefill_replicas=1", "--pp=2")
    assert done.returncode == 1 and "engines of one stage: leave --pp out" in done.stderr


@pytest.mark.slow
def test_a_fleet_with_failures_and_prefixes(tmp_path):
    """All flags of a fleet at once: roles, groups of prompts that begin alike, replicas that are lost."""
    work = ["--workload=random", "--num_requests=60", "--random_input_len=900", "--random_output_len=150", "--request_rate=20"]
    roles = ["--prefill_replicas=2", "--replicas=2", "--prefix_groups=2", "--prefix_group_len=700"]
    found = []
    for failures in (0, 12):
        done = run("simulate", *work, *roles, f"--failures={failures}", "--repair_seconds=0.2", f"--json={tmp_path / 'r.json'}")
        assert done.returncode == 0 and ("failures: " in done.stdout) is bool(failures), done.stderr
        found.append(json.loads((tmp_path / "r.json").read_text()))
    assert [r["completed"] for r in found] == [60, 60] and found[0]["failures"] == 0
    assert all(r["prefix_hit_share"] > 0.4 for r in found), "700 of 900 tokens, but for those who come first"
    assert 0 < found[1]["failures"] <= 12, "one that is down already is not lost again"
    assert found[0]["requests_sent_again"] == 0 < found[1]["requests_sent_again"]
    at_once = run("simulate", "--failures=1", "--workload=eight")
    assert at_once.returncode == 1 and "--failures come while requests arrive: give --request_rate" in at_once.stderr


@pytest.mark.slow
def test_what_drafts_would_gain(tmp_path):
    """Each batch and number of drafts has a row; tokens of a step are those of Leviathan et al.'s equation 1."""
    path = tmp_path / "drafts.json"
    given = ["--model=qwen3-8b", "--gpu=h100", "--speculative=0.75", "--drafts_by=eagle3", "--num_drafts=1,3", "--batches=1,8"]
    done = run("simulate", *given, f"--json={path}")
    assert done.returncode == 0 and "speed-up" in done.stdout, done.stderr
    rows = json.loads(path.read_text())["results"]
    assert [(row["batch"], row["num_drafts"]) for row in rows] == [(1, 1), (1, 3), (8, 1), (8, 3)]
    for row in rows:
        tokens = (1 - 0.75 ** (row["num_drafts"] + 1)) / (1 - 0.75)
        assert row["factor"] == pytest.approx(tokens * row["plain_seconds"] / (row["verify_seconds"] + row["draft_seconds"]))
    done = run("simulate", *given[:2], "--speculative=half")
    assert done.returncode == 1 and "--speculative=half must be numbers" in done.stderr, done.stderr
