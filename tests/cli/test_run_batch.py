"""`jaxserve run-batch` as a user runs it, on a tiny checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import BucketPlan
from tests import alphabet_model
from tests.alphabet_model import after

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(*flags): the finished process, in `run.folder`."""
    work = tmp_path_factory.mktemp("batch")
    alphabet_model.save(work / "model")
    BucketPlan(mixed=((32, 4),), head_rows=(4,)).save(work / "plan.json")
    environment = os.environ | {"JAXSERVE_CACHE": str(work / "cache"), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    def run(*given: str) -> subprocess.CompletedProcess:
        limits = ["--bucket_plan=plan.json", "--num-pages=64", "--served-model-name=alphabet"]
        command = [sys.executable, "-W", "error", "-m", "jaxserve", "run-batch", "model", *limits, *given]
        return subprocess.run(command, capture_output=True, text=True, cwd=work, env=environment, timeout=300)

    run.folder = work
    return run


def request(i: int, **body) -> str:
    given = {"model": "alphabet", "prompt": "a", "max_tokens": 1 + i % 7, "temperature": 0} | body
    return json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": given}) + "\n"


@pytest.mark.slow
def test_a_batch_breaks_off_and_goes_on(run):
    path = run.folder / "out.jsonl"
    lines = [request(i) for i in range(12)]
    (run.folder / "in.jsonl").write_text("".join(lines))
    done = run("-i", "in.jsonl", "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    whole = path.read_text().splitlines(keepends=True)
    found = [json.loads(result) for result in whole]
    assert [result["custom_id"] for result in found] == [f"r{i}" for i in range(12)]
    assert [r["response"]["body"]["choices"][0]["text"] for r in found] == [after("a", 1 + i % 7) for i in range(12)]
    path.write_text("".join(whole[:5]) + whole[5][:40])
    done = run("-i", "in.jsonl", "-o", "out.jsonl", "--resume")
    assert done.returncode == 0 and "5 of 12 requests are done already" in done.stderr
    again = path.read_text().splitlines(keepends=True)
    assert again[:5] == whole[:5] and [json.loads(result)["custom_id"] for result in again] == [f"r{i}" for i in range(12)]
    assert run("-i", "in.jsonl", "-o", "out.jsonl", "--resume").returncode == 0 and path.read_text() == "".join(again)
    (run.folder / "in.jsonl").write_text("".join(lines[1:]))
    other = run("-i", "in.jsonl", "-o", "out.jsonl", "--resume")
    assert other.returncode == 1 and "out.jsonl: its line 1 is not the result of that request" in other.stderr


@pytest.mark.slow
def test_what_fails_is_counted(run):
    (run.folder / "bad.jsonl").write_text(request(0, model="other") + request(1))
    done = run("-i", "bad.jsonl", "-o", "bad.out")
    assert done.returncode == 1 and "1 of 2 requests failed" in done.stderr
    refused, fine = [json.loads(result) for result in (run.folder / "bad.out").read_text().splitlines()]
    assert refused["error"]["code"] == "model_not_found" and fine["error"] is None


def test_no_requests_have_no_results(run):
    (run.folder / "empty.jsonl").write_text("\n")
    (run.folder / "empty.out").write_text("results of another run\n")
    assert run("-i", "empty.jsonl", "-o", "empty.out").returncode == 0 and (run.folder / "empty.out").read_text() == ""


@pytest.mark.parametrize(
    "flags, said",
    [
        (["-i", "in.jsonl"], "give --output_file"),
        (["-i", "none.jsonl", "-o", "x"], "No such file"),
    ],
)
def test_mistakes(run, flags, said):
    done = run(*flags)
    assert done.returncode == 1 and said in done.stderr and not (run.folder / "x").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "field"), [("deepseek_r1", "reasoning"), ("none", "content")])
def test_a_parser_cuts_what_the_model_thinks_from_what_it_says(run, parser, field):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0}
    line = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (run.folder / "chat.jsonl").write_text(json.dumps(line) + "\n")
    done = run("-i", "chat.jsonl", "-o", "chat.out", f"--reasoning-parser={parser}", "--enable-auto-tool-choice")
    assert done.returncode == 0, done.stderr
    message = json.loads((run.folder / "chat.out").read_text())["response"]["body"]["choices"][0]["message"]
    assert message[field] == after("A", 3)
