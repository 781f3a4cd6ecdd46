"""scripts.bench_trees: its cost of measured steps, its choice among trees, and a run of it on a small head."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve.models.loading import load_model
from jaxserve.training.draft_trainer import DraftTrainer, TrainingConfig
from tests import alphabet_model
from tests.training.test_draft_trainer import answers

ROOT = Path(__file__).parents[2]


def python(*given: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *given], capture_output=True, text=True, cwd=ROOT, timeout=200, env=environment)


def test_where_rows_are_free_trees_win_and_where_they_cost_they_do_not():
    """Half of the tokens are the head's second guess. A step of 1 row takes 10 ms, of 11 rows as long or eleven times as long."""
    code = """
import json, numpy as np
from scripts.bench_trees import compare, measured
ranks = np.random.default_rng(0).choice(2, (4000, 3))
free, dear = measured([(1, 10.0), (11, 10.0)], 1.0), measured([(1, 10.0), (11, 110.0)], 1.0)
assert abs(free(1, [0.5, 0.25], [1, 1]) - 1.75 * 10 / 12) < 1e-9 and abs(dear(2, [0.5], [3]) - 1.5 * 20 / (80 + 1)) < 1e-9
print(json.dumps(compare(ranks, np.arange(4000) // 40, [2, 6, 14], [1], {"free": free, "dear": dear})))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert np.allclose([row[0] for row in found["hits"]], 0.5, atol=0.03) and found["num_places"] == 4000
    assert np.allclose([row["tokens"] for row in found["chains"]], [1.5, 1.75, 1.875], atol=0.05)
    assert [row["widths"] for row in found["trees"]] == [[2], [2, 4], [2, 4, 8]]
    assert np.allclose([row["tokens"] for row in found["trees"]], [2, 3, 4], atol=0.01)
    free, dear = found["best"]
    assert free["tree_drafts"] == 14 and free["tree_over_chain"] > 2
    assert dear["tree_over_chain"] < 1.05


@pytest.mark.slow
def test_a_run_on_a_head(tmp_path):
    model = alphabet_model.save(tmp_path / "model")
    config = TrainingConfig(method="medusa", num_drafts=2, length=16, batch_size=8, steps=20, learning_rate=1e-2)
    trainer = DraftTrainer(load_model(model, skip_tokenizer_init=True).module, answers(40), config, tmp_path / "checkpoints")
    trainer.train()
    trainer.export(tmp_path / "head", "float32")
    lines = "".join(json.dumps(answer._asdict()) + "\n" for answer in answers(9))
    (tmp_path / "answers.jsonl").write_text(lines)
    given = [f"--target={model}", f"--head={tmp_path / 'head'}", f"--answers={tmp_path / 'answers.jsonl'}", "--method=medusa"]
    command = ["-m", "scripts.bench_trees", *given, "--num_eval=8", "--length=16", "--num_nodes=2,4", "--row_ms=1:10,8:12"]
    done = python(*command, "--depth=2", "--json=-")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_places"] == 8 * (12 - 2) and len(result["best"]) == 2 * 5
    assert [len(row) for row in result["hits"]] == [5, 5]
    for flags, message in (
        (["--depth=3"], "--depth=3: "),
        (["--depth=2", "--row_ms=2:10,1:12"], "two ROWS:MILLISECONDS or more, of 1 row first"),
        (["--depth=2", "--num_nodes=0"], "--num_nodes=0 must be integers above 0"),
    ):
        done = python(*command, *flags)
        assert done.returncode and message in done.stderr + done.stdout and "Traceback" not in done.stderr
