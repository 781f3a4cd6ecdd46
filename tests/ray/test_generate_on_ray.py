"""`jaxserve generate --ray`: results in order and as without Ray, runs that broke off, prompts that fail. Needs `jaxserve[ray]`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import alphabet_model
from tests.alphabet_model import after

pytest.importorskip("ray", reason="Ray is not installed: pip install 'jaxserve[ray]'")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENGINE = ("--page_size=4", "--num_pages=96", "--max_num_seqs=4", "--max_num_batched_tokens=32", "--noprogress")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return alphabet_model.save(tmp_path_factory.mktemp("alphabet"))


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "jaxserve", "generate", str(folder), *ENGINE, *flags]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command(folder, *flags), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def records(num: int) -> list[dict]:
    """Prompts with their own lengths, some that can't be run."""
    made = [{"prompt": chr(ord("!") + i % 50), "max_tokens": 1 + i % 9, "id": i} for i in range(num)]
    for i in range(7, num, 10):
        made[i] = {"prompt_token_ids": [5000], "id": i}
    return made


def test_results_are_those_of_one_engine_in_order(folder, tmp_path):
    import pyarrow  # pyright: ignore[reportMissingImports]
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    given = records(60)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in given))
    columns = dict.fromkeys(("prompt", "prompt_token_ids", "max_tokens", "id"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns | record for record in given]), tmp_path / "in.parquet")
    for source in ("in.jsonl", "in.parquet"):
        for name, flags in (("one", ()), ("two", ("--ray", "--replicas=2", "--ray_batch_size=7"))):
            done = run(folder, f"--prompts_file={tmp_path / source}", f"--output={tmp_path / name}", "--seed=3", *flags)
            assert done.returncode == 1 and "6 of 60 prompts failed" in done.stderr, done.stderr
        results = [json.loads(line) for line in (tmp_path / "two").read_text().splitlines()]
        assert results == [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]
        assert [result["id"] for result in results] == list(range(60))


def test_a_killed_run_goes_on_where_it_broke_off(folder, tmp_path):
    given = [{"prompt": chr(ord("!") + i % 50), "max_tokens": 30, "temperature": 0, "id": i} for i in range(1000)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in given))
    flags = (f"--prompts_file={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out'}", "--ray", "--ray_batch_size=32")
    running = subprocess.Popen(
        command(folder, *flags), cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "out").exists() or not (tmp_path / "out").stat().st_size:
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.02)
    running.kill()
    running.wait()
    num_done = (tmp_path / "out").read_bytes().count(b"\n")
    assert 0 < num_done < 1000
    done = run(folder, *flags, "--resume")
    assert done.returncode == 0 and "of 1000 prompts are done already" in done.stderr, done.stderr
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [result["id"] for result in results] == list(range(1000))
    assert [result["outputs"][0]["text"] for result in results] == [after(record["prompt"], 30) for record in given]


def test_many_prompts_come_back_in_order():
    """RAY_PROMPTS says how many. What they take beside their engines is printed."""
    num = int(os.environ.get("RAY_PROMPTS", "10000"))
    command = [sys.executable, "-m", "tests.ray.echoing", str(num)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["right"] == num


def test_mistakes_are_one_line(folder, tmp_path):
    done = run(folder, "--prompt=a", "--ray")
    assert done.returncode == 1 and "--ray needs --output" in done.stderr and "Traceback" not in done.stderr
    done = run(folder, "--prompt=a", "--ray", "--replicas=999", f"--output={tmp_path / 'out'}")
    assert done.returncode == 1 and "999 replicas of 1 CPU each need 999" in done.stderr and "Traceback" not in done.stderr
