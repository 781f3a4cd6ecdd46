"""scripts.bench_kv_store runs, its two engines answer alike, and second turns hit. How fast they are is no test's business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # a command; tests/engine/test_stored_pages.py has the store


def test_second_turns_hit(tmp_path):
    flags = [
        "--rounds=2",
        "--conversations=4",
        "--turn=96",
        "--page_size=16",
        "--max_num_batched_tokens=64",
        "--max_num_seqs=2",
        "--unhit_rounds=3",
    ]
    environment = os.environ | {"JAXSERVE_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "scripts.bench_kv_store", *flags, "--kv_store=host:64MiB", f"--json={tmp_path / 'out.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["num_hit_tokens"] > 3 * 4 * 48 and result["tiers"][0]["pages_read"] * 16 == result["num_hit_tokens"]
    assert [len(seconds) for seconds in result["ttft_second_turns"]["on"]] == [4, 4] and result["ttft_ratio"] > 0
    off, on = (result["seconds_batch"][name] for name in ("off", "on"))
    assert len(off) == len(on) == 2 and result["batch_ratio"] == pytest.approx(sum(b / a for a, b in zip(off, on, strict=True)) / 2)
    assert len(result["unhit_shares"]) == len(result["seconds_unhit_first"]["on"]) == 3
    assert result["unhit_first_interval"] is None and result["unhit_first_ratio"] > 0, "three rounds are too few"
    pages = sum(tier["pages_written"] for tier in result["unhit_tiers"]) + result["unhit_skipped_tokens"] // 16
    assert pages >= 3 * (4 * 6 + 8 * 3), "each full page of a prompt is saved or counted as left out"
