"""What the reproductions compute, against hand calculation; their results are on their pages and no test's business."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from jaxserve.buckets import Bucket
from jaxserve.simulation.capacity import Objective
from scripts import orca_report, sarathi_capacity, sarathi_costs
from scripts.finished import Finished
from scripts.sarathi_report import agreement, table
from scripts.sarathi_session import Question, Session, processes, serve_rate
from scripts.sarathi_setups import DATASETS, SETUPS, Contender, orca, run_at, sarathi, stages, vllm

ROOT = Path(__file__).parents[2]
MISTRAL = SETUPS["mistral-7b"].machine


class Bar:
    def set_postfix_str(self, *_, **__): ...
    def update(self): ...


@pytest.mark.parametrize(
    ("published", "ours", "verdict"),
    [(2.0, 2.25, "agrees"), (2.0, 2.3, "same sign"), (2.0, 1.7, "same sign"), (2.0, 0.9, "contradicts"), (0.6, 0.7, "agrees"),
     (0.6, 0.8, "same sign"), (0.6, 1.1, "contradicts"), (None, 3.0, ""), (3.0, None, "no rate")],
)  # fmt: skip
def test_agreement(published, ours, verdict):
    assert agreement(published, ours) == verdict


def test_table():
    assert table(("a", "b"), [[1.23456, None], ["x", 2]]) == "| a | b |\n| --- | --- |\n| 1.23 | none given |\n| x | 2 |\n"


def test_a_step_by_hand():
    """Pairs and KV as demand.step_demand counts them: whole pages of decodes, every key of a chunk, both within the window."""
    times = stages(MISTRAL)[0]
    own = sarathi_costs.step_seconds(MISTRAL, 2, 1000, 100, 50)
    pairs = sum(50 + i + 1 for i in range(100))
    assert own == pytest.approx(times.seconds(Bucket(102, 3, 100), 3, 2 * 1008, pairs))
    far = sarathi_costs.step_seconds(MISTRAL, 1, 9000, 2, 4095)  # one query sees 4096 keys, the next as many
    assert far == pytest.approx(times.seconds(Bucket(3, 2, 2), 2, 4096, 2 * 4096))
    whole, halves = (sarathi_costs.prompt_seconds(MISTRAL, 1024, chunk) for chunk in (1024, 512))
    assert halves > whole == pytest.approx(sarathi_costs.step_seconds(MISTRAL, 0, 0, 1024))
    llama = SETUPS["llama2-70b"].machine
    both = sum(stage.seconds(Bucket(8, 8, 1), 8, 8 * 1008, 0) for stage in stages(llama))
    assert sarathi_costs.step_seconds(llama, 8, 1000) == pytest.approx(both + llama.send_seconds(8))


@pytest.mark.parametrize("contender", [sarathi(512), vllm(32), orca(16), Contender("chunks", "sarathi", 1024, mixed=False)])
@pytest.mark.parametrize("setup", ["mistral-7b", "falcon-180b"])
def test_a_run_is_what_the_contender_says(contender, setup):
    run = run_at(SETUPS[setup].machine, contender, "openchat_sharegpt4", 2.0, 40, 0)
    prompts = run.demands.tokens > run.demands.decodes
    assert run.demands.samples.sum() == run.times.num_output.sum()
    assert run.demands.seqs.max() <= contender.max_num_seqs and np.isfinite(run.times.last).all()
    mixes = bool((prompts & (run.demands.decodes > 0)).any())
    assert mixes == (contender.policy in ("sarathi", "orca") and contender.mixed is None)
    whole = contender.policy != "sarathi"
    assert (run.demands.tokens.max() > 2048) == whole and whole or run.demands.tokens.max() <= contender.budget


def session(path: Path, **options) -> Session:
    return Session(path, Finished(path / "trials.json", {}), Bar(), seeds=2, num_requests=120, precision=0.3, **options)


QUESTIONS = [
    Question(MISTRAL, contender, "openchat_sharegpt4", slo) for contender in (sarathi(512), vllm(8), orca(8)) for slo in (0.1, 0.5)
]


def test_trials_are_kept(tmp_path):
    """A second search over the same seeds serves nothing; each seed's capacity meets the objective and its neighbour does not."""
    first = session(tmp_path)
    found = first.capacities(QUESTIONS)
    kept = dict(first.finished.results)
    again = session(tmp_path)
    assert again.capacities(QUESTIONS) == found and again.finished.results == kept
    for question, capacities in zip(QUESTIONS, found, strict=True):
        objective = Objective(question.slo)
        for seed, rate in enumerate(capacities):
            trials = [
                serve_rate(MISTRAL, question.contender, question.dataset, r, 120, seed, Objective(1e9)) for r in (rate, 1.3 * rate)
            ]
            assert [t.complete for t in trials] == [t.meets(Objective(1e9)) for t in trials]
            assert trials[0].meets(objective) and not trials[1].meets(objective)
    assert not all(trial["complete"] for trial in kept.values()), "nothing was broken off"


def test_workers_find_the_same(tmp_path):
    """On two processes; and the capacities of an objective do not depend on which one was asked before it."""
    with processes(2) as pool:
        found = session(tmp_path / "two", pool=pool, workers=2).capacities(QUESTIONS)
    assert found == session(tmp_path / "one").capacities(QUESTIONS)
    tight_first = session(tmp_path / "order")
    assert [tight_first.capacities([q])[0] for q in QUESTIONS] == found


def test_a_trial_broken_off_says_nothing_of_a_looser_objective(tmp_path):
    ours = session(tmp_path)
    question, tight, loose = QUESTIONS[2], Objective(0.02), Objective(5.0, delay=1e9)
    broken = ours.trial(question, 3.0, 0, tight)
    assert not broken.complete and broken is not ours.trial(question, 3.0, 0, tight) == broken
    whole = ours.trial(question, 3.0, 0, loose)
    assert whole.complete and whole.meets(loose) and not whole.meets(tight)
    assert ours.trial(question, 3.0, 0, tight) == whole and list(ours.finished.results.values()) == [asdict(whole)]


def test_no_rate_is_no_verdict():
    assert sarathi_capacity.best_over([2.0, 3.0], [0.0, 1.5]) == 2 and sarathi_capacity.best_over([2.0], [0.0, 0.0]) is None
    assert agreement(2.0, None) == sarathi_capacity.shown_ratio(None) == "no rate" and agreement(2.0, 0.0) == "contradicts"


def test_sections_of_step_times(tmp_path):
    """Those that take no search are written, with their plots, under the command's own flags."""
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[plots]')")
    sections = "objectives,incremental_cost,chunking_overhead,tile_quantisation,arithmetic_intensity,cross_node,bubbles_by_hand"
    given = ("--seeds=1", f"--sections={sections}", f"--output={tmp_path}")
    command = [sys.executable, "-m", "scripts.reproduce_sarathi", *given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert set(results) == set(sections.split(",")) and len(list(tmp_path.glob("*.png"))) == 5
    decode = results["objectives"]["mistral-7b"]["decode_seconds"]
    tables = (tmp_path / "tables.md").read_text()
    assert f"| {1e3 * decode:.3g} |" in tables and "one seed, so that there are no intervals" in tables
    assert f"`python -m scripts.reproduce_sarathi {' '.join(given)}`" in tables


def test_objectives_are_the_published_ones():
    """By the paper's own rule they are near 5 and 25 of the decode iterations; the datasets' caps are the models' lengths."""
    assert [s.slos for s in SETUPS.values()] == [{"strict": a, "relaxed": b} for a, b in ((0.1, 0.5), (0.2, 1), (1, 5), (1, 5))]
    assert [s.budgets for s in SETUPS.values()] == [{"strict": 512, "relaxed": b} for b in (2048, 2048, 1536, 2048)]
    assert list(DATASETS.values()) == [8192, 16384]


def test_orca_ratios():
    """Of the iteration-level setting over each request-level one, whose answers return when their batch ends."""
    tokens = dict(zip(orca_report.SETTINGS, (3.0, 2.0, 1.0, 1.5), strict=True))
    found = {name: {"throughput": t, "ttft": 1.0, "e2e": 2.0, "returned": 4.0} for name, t in tokens.items()}
    text = orca_report.tables({"short_long_mix, 2": found})
    for base, ratio in (("padded", 2), ("shrinking", 3)):
        assert f"| short_long_mix, 2 | {base} | {ratio} | 1 | 1 | 0.5 |" in text
