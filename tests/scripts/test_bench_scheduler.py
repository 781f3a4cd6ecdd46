"""scripts.bench_scheduler times whole steps, with --planners those of a Hopper GPU. How long they take is no test's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A step of 6 decodes as --planners packs it: the items of its work list, and those of the planner asked directly.
PLANNED = """
import numpy as np
from jaxserve.batching.work_lists import AHEAD
from scripts.bench.decode_steps import make_packer, make_scheduler

scheduler = make_scheduler(6, 64, True, "fcfs", 10, prompt_len=3000)
packer = make_packer(scheduler, planned=True)
while True:
    schedule = scheduler.schedule()
    packer.newcomers(schedule)
    inputs = packer.pack(schedule)
    if schedule.num_decodes == 6:
        break
    scheduler.update(schedule, np.full(6, 9, np.int32))
layout = packer.layouts[inputs.bucket]
planner = layout.planners[None]
expected = planner.plan(schedule.q_lens, schedule.starts + schedule.q_lens + AHEAD, least_kv_lens=schedule.starts + schedule.q_lens)
found = layout.unpack(inputs.packed)["work_None"]
items = planner.shape.unpack(found)["cta_start"][-1]
print(np.array_equal(found, expected), items > 6 * 8, planner.shape.num_ctas)
"""


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, timeout=100)


def test_planned_steps_hold_the_work_list_of_their_attention():
    """Sequences of 3,000 tokens, so few of them that they are split: more items than pairs of sequence and KV head."""
    done = run("-c", PLANNED)
    assert done.stdout == "True True 132\n", done.stderr


@pytest.mark.parametrize("planners", [False, True])
def test_parts_add_up(planners):
    flags = ["--num_running=1,6", "--page_sizes=16", "--num_steps=20", "--json=-", *(["--planners"] if planners else [])]
    done = run("-m", "scripts.bench_scheduler", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(r["num_running"], r["prefix_caching"]) for r in result["results"]] == [(1, True), (6, True), (1, False), (6, False)]
    for r in result["results"]:
        parts = [r[f"{part}_min_us"] for part in ("schedule", "pack", "update")]
        assert min(parts) > 0 and sum(parts) <= r["total_min_us"] + 0.2  # rounded to 0.1 each
        assert r["total_min_us"] <= r["total_mean_us"]
        assert r.get("planning_share") == (0.1 if planners else None), "two of 20 steps: one of 17 plans, from the first decode on"
    assert result["planners"] == planners and result["prompt_len"] == 20 and result["revision"]
