"""reproduce_orca: its settings in virtual time, its figures by hand, and the command on a tiny model."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxserve.cli.common import open_loop
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.simulation.replay import replay
from jaxserve.step_times.analytic import Deployment
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import fixed
from scripts.reproduce import orca_report
from tests import alphabet_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("max_num_seqs", [2, 4, 6, 8])
@pytest.mark.parametrize("name", list(orca_report.SETTINGS))
def test_every_seat_is_taken(name, max_num_seqs):
    """In virtual time, with the setting's own buckets. No step of Orca's has an empty seat while a prompt is left."""
    limits = SchedulerConfig(policy=orca_report.SETTINGS[name], **orca_report.limits(name, max_num_seqs))
    plan = orca_report.bucket_plan(name, max_num_seqs)
    times = Deployment.named("qwen3-0.6b", "h100").step_times(page_size=64)
    run = replay(fixed("short_long_mix"), plan, times, limits, 10 * max_num_seqs, async_scheduling=False)
    seqs, prompts = run.demands.seqs, np.flatnonzero(run.demands.tokens > run.demands.decodes)
    assert seqs.max() == max_num_seqs
    if name == "orca":
        assert (seqs[: prompts[-1]] == max_num_seqs).all()
    assert {b.seqs for b in run.buckets if b.max_q_len == 1} <= ({max_num_seqs} if name == "padded" else {2, 4, 6, 8})


def test_settings_differ_in_nothing_else():
    plans = {name: orca_report.bucket_plan(name, 8) for name in orca_report.SETTINGS}
    assert {plan.mixed for plan in plans.values()} == {tuple((n, 8) for n in (32, 64, 128, 256, 512, 544, 1088, 2176))}
    assert plans["iteration"] == plans["orca"] == plans["shrinking"] and plans["iteration"].decode == (2, 4, 8)
    assert plans["padded"].decode == (8,) and orca_report.bucket_plan("orca", 2).mixed[-1] == (544, 2)
    budgets = {name: orca_report.limits(name, 4)["max_num_batched_tokens"] for name in orca_report.SETTINGS}
    assert budgets == {"iteration": 512, "orca": 4 * 272, "shrinking": 512, "padded": 512}


def test_figures_of_a_run_by_hand(monkeypatch):
    """Batches of two end at 2 and 5 s, which is when their answers return."""
    first, last, num = np.array([0.5, 0.5, 2.5, 3.5]), np.array([1.0, 2.0, 5.0, 4.0]), np.array([3, 3, 4, 10])
    times = ServedTimes(np.zeros(4), first, last, num, num, np.empty(0), np.empty(0))
    steps = {"decode(2,2)": 9}
    run = SimpleNamespace(times=times, counts={"num_steps": 9, "steps_by_bucket": steps})
    monkeypatch.setattr(open_loop, "serve", lambda engine, workload, seed: run)
    figures = {"throughput": 4.0, "ttft": 1.75, "e2e": 3.0, "returned": 3.5, "num_steps": 9}
    assert orca_report.measure(None, None, 0, 2) == (figures, steps)


def test_order_of_rounds():
    """Of 8 rounds each of 4 settings comes twice at each place, and after each neighbour as often as before it."""
    rounds = [orca_report.order("abcd", i) for i in range(8)]
    for i in range(4):
        assert sorted(names[i] for names in rounds) == sorted("abcd" * 2)
    follows = [pair for names in rounds for pair in itertools.pairwise(names)]
    assert all(follows.count((a, b)) == follows.count((b, a)) for a, b in itertools.combinations("abcd", 2))


def settings(**throughputs):
    """Rounds of every setting, all with their own steps; of one throughput 1 where none is given."""
    num_rounds = len(next(iter(throughputs.values())))
    found = {}
    for name in orca_report.SETTINGS:
        rest = {"ttft": 1.0, "e2e": 2.0, "returned": 4.0, "num_steps": 10}
        rounds = [rest | {"throughput": t} for t in throughputs.get(name, [1.0] * num_rounds)]
        found[name] = {"steps_by_bucket": {name: 10}, "rounds": rounds}
    return found


def test_ratios():
    """Of both iteration-level settings over each request-level one, whose answers return when their batch ends."""
    found = settings(iteration=[3.0], orca=[2.0], shrinking=[1.0], padded=[1.5])
    text = orca_report.tables({"short_long_mix, 2": found})
    for pair, ratio in (("iteration | padded", 2), ("iteration | shrinking", 3), ("orca | padded", 1.33), ("orca | shrinking", 2)):
        assert f"| short_long_mix, 2 | {pair} | {ratio} | {ratio} to {ratio} | 1 | 1 | 0.5 |" in text
    assert "throughput agrees, ttft same sign" in text.splitlines()[-2]  # 1.33 for 1.44
    assert "| short_long_mix, 2 | padded | 1.5 | 1 | 2 | 4 | 10 |" in text and "Noise" not in text


def test_a_ratio_is_taken_within_a_round():
    """A machine that is ten times slower in two rounds of three: of the medians iteration over padded would be 2.2."""
    text = orca_report.tables({"equal_size, 2": settings(iteration=[2.0, 0.2, 0.22], padded=[1.0, 0.1, 0.1])})
    assert "| iteration | padded | 2 | 2 to 2.2 |" in text and "| orca | padded | 10 | 1 to 10 |" in text


def test_noise_is_of_equal_steps():
    found = settings(iteration=[1.1, 1.02, 0.98], orca=[2.0, 2.0, 2.0])
    found["iteration"]["steps_by_bucket"] = found["padded"]["steps_by_bucket"]
    lines = orca_report.tables({"equal_size, 2": found}).splitlines()
    assert [line.endswith("the same steps |") for line in lines if "control" in line] == [True, False, False, False]
    assert lines[-1].startswith("Noise: of 1 pairs") and "2.0% apart in a round (median; at most 10.0%)" in lines[-1]
    assert lines[-1].endswith("2.0% off 1 (median; at most 2.0%).")


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "agrees"), (0.975, "agrees"), (1.031, "contradicts"), (0.9, "contradicts")])
def test_the_control_is_judged(ratio, verdict):
    lines = orca_report.tables({"equal_size, 2": settings(orca=[ratio])}).splitlines()
    assert lines[-1].endswith(f"{verdict} |") and lines[-3].endswith("agrees |")


SMALL = """
from jaxserve.cli.common.command import run_command
from jaxserve.workloads.workload import Workload, WorkloadRequest
from scripts import reproduce_orca
from scripts.reproduce import orca_report
orca_report.BUDGET, orca_report.TWO_PROMPTS = 24, 8 + 24
reproduce_orca.fixed = lambda name: Workload(name, (WorkloadRequest(8, 4), WorkloadRequest(24, 8)) * 2)
run_command(reproduce_orca.main)
"""


@pytest.mark.slow
def test_the_command(tmp_path):
    """On few requests for a tiny model: real engines of every setting, and all that is written."""
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[plots]')")
    alphabet_model.save(tmp_path / "model", tokenizer=False, max_position_embeddings=1024)
    given = [f"--model={tmp_path / 'model'}", "--max_num_seqs_list=2", "--rounds=1", f"--output={tmp_path / 'out'}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SMALL, *given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "compiling, at most 2: 100%" in done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["results"]) == ["short_long_mix, 2", "equal_size, 2"] and results["flags"]["model"] == "model"
    for found in results["results"].values():
        assert list(found) == list(orca_report.SETTINGS)
        rounds = [r for setting in found.values() for r in setting["rounds"]]
        assert len(rounds) == 4 and all(0 < r["ttft"] < r["e2e"] <= r["returned"] and r["throughput"] > 0 for r in rounds)
        for setting in found.values():
            assert sum(setting["steps_by_bucket"].values()) == setting["rounds"][0]["num_steps"] > 8
    assert orca_report.tables(results["results"]) in (tmp_path / "out" / "tables.md").read_text()
    assert (tmp_path / "out" / "orca.png").stat().st_size > 10_000
