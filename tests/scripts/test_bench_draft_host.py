"""scripts.bench_draft_host times whole steps with drafts. How long they take is no test's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_drafts_are_made_and_stand_in_part():
    flags = ["--num_running=6", "--num_steps=40", "--num_drafts=3", "--page_sizes=16", "--json=-"]
    command = [sys.executable, "-m", "scripts.bench_draft_host", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [(r["method"], r["page_size"]) for r in results] == [("device", 16), ("suffix", 16)]
    for r in results:
        assert min(r[f"{part}_us"] for part in ("schedule", "pack", "update", "drafts")) > 0
        assert r["num_steps"] == 40 and 0.2 < r["drafts_a_row"] <= 3 and " accepted; steps by drafts" in r["draft_summary"]
