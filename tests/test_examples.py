"""examples/: each runs to its end without a warning, in seconds, and says what its page promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PROFILE = str(ROOT / "benchmarks" / "buckets" / "steps_tiny_qwen3.json")


def run(name: str, *arguments: str, folder: Path) -> str:
    """What an example prints."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_chat(tmp_path):
    out = run("chat.py", folder=tmp_path)
    assert out.count("> ") == 2 and re.search(r"^4 messages, \d+ steps$", out, re.MULTILINE)


@pytest.mark.slow
def test_messages(tmp_path):
    pytest.importorskip("anthropic")
    out = run("messages.py", folder=tmp_path)
    assert re.search(r"^24 tokens, max_tokens$", out, re.MULTILINE)
    assert re.search(r"^weather\(\{'city': '(Rome|Oslo)'\}\)$", out, re.MULTILINE) and re.search(
        r"^\d+ tokens of prompt$", out, re.MULTILINE
    )


@pytest.mark.slow
def test_responses(tmp_path):
    out = run("responses.py", folder=tmp_path)
    found = re.findall(r"(\d+) tokens of prompt", out)
    assert len(found) == 2 and int(found[1]) > int(found[0]) and re.search(r"^Cat\(tame=(True|False)\)$", out, re.MULTILINE)


@pytest.mark.slow
def test_batch_scoring(tmp_path):
    out = run("batch_scoring.py", folder=tmp_path)
    assert len(re.findall(r"-\d+\.\d\d", out)) == 9  # a score an answer
    assert re.search(r"accuracy [01]\.\d\d of 3 questions", out)


@pytest.mark.slow
def test_rl_loop(tmp_path):
    """The reward rises, and no update compiles anything."""
    out = run("rl_loop.py", folder=tmp_path)
    (found,) = re.findall(r"reward (\S+) -> (\S+), (\d+) programs compiled", out)
    assert float(found[0]) < 0.6 and float(found[1]) > float(found[0]) + 0.2
    assert int(found[2]) <= 5


def test_tune_buckets(tmp_path):
    """A trace of our own: the plan that was searched is the fastest of the three."""
    lines = ["num_prefill_tokens,num_decode_tokens"] + [f"{100 + 7 * i % 150},{8 + i % 5}" for i in range(120)]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    out = run("tune_buckets.py", PROFILE, str(tmp_path / "trace.csv"), folder=tmp_path)
    seconds = [float(s) for s in re.findall(r"(\d+\.\d\d) s, padding", out)]
    assert len(seconds) == 3 and seconds[2] <= min(seconds) and "the tuned plan: " in out


def test_read_profile(tmp_path):
    out = run("read_profile.py", PROFILE, folder=tmp_path)
    assert "60 buckets" in out and "median 8.1%" in out and "the machine was not quiet" in out
    rows = re.findall(r"^ +(\w+\(\d+,\d+\)) +\S+ +\S+ +\S+ +\S+ +\S+$", out, re.MULTILINE)
    assert len(rows) == 60


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "tiny.py"))
def test_every_example_is_listed(name):
    assert f"[{name}]({name})" in (EXAMPLES / "README.md").read_text()
    assert f"def test_{name.removesuffix('.py')}(" in Path(__file__).read_text()
