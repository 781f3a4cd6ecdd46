"""scripts.bench_work_list plans the steps of a trace, and its numbers fit each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_longest_decodes():
    command = [sys.executable, "-m", "scripts.bench_work_list", "--longest", "--json=-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    results = {(r["max_kv_len"], r["chunk"]): r for r in json.loads(done.stdout)["results"]}
    assert len(results) == 12 and all(16 <= r["at"] <= 32 for r in results.values())
    assert results[8192, 512]["max_over_mean"] <= 1.1 < results[1024, 512]["max_over_mean"]
    refused = subprocess.run([*command, "--chunk=64"], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert refused.returncode == 1 and "--chunk" in refused.stderr + refused.stdout


@pytest.mark.slow
def test_steps_of_a_trace(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{600 + 97 * (i % 9)},{30 + i % 9}\n" for i in range(32))
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + rows + "99999,5\n")  # the last is longer than max_kv_len
    flags = [f"--trace={trace}", "--num_running=3,4", "--stride=1", "--max_kv_len=4096", "--json=-"]
    command = [sys.executable, "-m", "scripts.bench_work_list", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["flags"]["max_kv_len"] == 4096 and result["date"] and result["python"]
    results = result["results"]
    assert [r["num_running"] for r in results] == [3, 4]
    for r in results:
        assert r["num_steps"] >= 30
        for which in ("median", "max"):
            assert 1 <= r["max_over_mean"][which] <= r["max_over_uncut"][which]
        assert 1 <= r["kv_read"]["decode"] <= 1 + 15 / 600
        assert 1 < r["kv_read"]["mixed"] < 1.1
        assert r["steps_over_1.1"] > 0.9  # a few sequences of one to three chunks leave most SMs idle
