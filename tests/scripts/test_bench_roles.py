"""scripts.bench_roles runs end to end, and what it makes of metrics and of the simulator is right. How fast anything is, is no
test's business."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.workloads.workload import Workload, WorkloadRequest
from scripts.bench.expected_roles import KVSeconds, expected, seconds_a_token, sum_of
from tests import alphabet_model
from tests.simulation.machines import LIMITS, MODEL

ROOT = Path(__file__).parents[2]
PREFILL = """# HELP jaxserve:kv_store_pages_written_total Pages.
jaxserve:kv_store_pages_written_total{tier="host"} 10.0
jaxserve:kv_store_pages_written_total{tier="disk"} 30.0
jaxserve:kv_store_write_seconds_total{tier="host"} 0.5
jaxserve:kv_store_write_seconds_total{tier="disk"} 1.5
jaxserve:kv_store_pages_read_total{tier="disk"} 99.0
"""
DECODE = "jaxserve:kv_store_pages_read_total 5.0\njaxserve:kv_store_read_seconds_total 0.25\njaxserve:kv_store_pages_written 1e9\n"


def test_seconds_of_a_tokens_kv():
    assert sum_of(PREFILL, "kv_store_pages_written") == 40 and sum_of(PREFILL, "kv_store_pages") == 0
    assert seconds_a_token({"prefill": PREFILL, "decode": DECODE}, 4) == (2.0 / 160, 0.25 / 20)
    assert seconds_a_token({"prefill": "", "decode": ""}, 4) == (0.0, 0.0), "nothing has passed"


def test_what_is_expected_of_a_request_alone():
    """Together it is one server's; apart each second that its KV takes is one of its first token, and none of those after it."""
    work = Workload("one", (WorkloadRequest(90, 3),))
    without = expected(MODEL, LIMITS, 256, work, KVSeconds(0.0, 0.0, 0.0))
    times = expected(MODEL, LIMITS, 256, work, KVSeconds(0.01, 0.001, 0.25))
    assert times["together"].first[0] == without["together"].first[0] < without["apart"].first[0]
    assert times["apart"].first[0] - without["apart"].first[0] == pytest.approx(64 * 0.01 + 88 * 0.001 + 0.25), (
        "a step's tokens are saved behind the last one, and full pages are loaded"
    )
    for name in ("together", "apart"):
        assert times[name].last[0] - times[name].first[0] == pytest.approx(without[name].last[0] - without[name].first[0])


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two servers need a core each")
def test_it_measures_both_arrangements_and_plays_them(tmp_path):
    model, steps = alphabet_model.save(tmp_path / "model"), tmp_path / "steps.json"
    replace(MODEL, page_size=16).save(str(steps))
    flags = ["--rate=20", "--num_requests=6", "--prompt=60", "--output=8", "--max_num_batched_tokens=64", "--max_model_len=128"]
    files = [f"--model={model}", f"--step_times={steps}", f"--json={tmp_path / 'out.json'}"]
    environment = os.environ | {"JAXSERVE_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "scripts.bench_roles", *files, *flags, "--num_pages=64"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["kv_seconds_a_token"]["save"] > 0 and result["kv_seconds_a_token"]["load"] > 0
    for kind in ("measured", "simulated"):
        table = result[kind]
        assert table.keys() == {"together", "apart"}
        for row in table.values():
            # On a busy machine a client may read most tokens together with the one before.
            least = {"p50_itl_ms": -1e-9} if kind == "measured" else {}
            assert row and all(value > least.get(metric, 0.0) for metric, value in row.items()), (kind, row)
    assert [len(values) for values in result["rounds"]["apart"].values()] == [1] * 5, "the first of two rounds is not counted"
