"""The history of the quick figures: what a line is, what is made of a broken file, and that reading it never fails a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.history import MACHINE, Line, append, compared, draw, read

ROOT = Path(__file__).parents[2]
HERE = {"cpu": "one", "cpu_cores": 2}


def line(figures, revision: str | None = "abc", machine=HERE):
    return Line("2026-11-24T18:00:00+00:00", revision, machine, figures)


def test_lines_come_back(tmp_path):
    path = tmp_path / "folder" / "history.jsonl"
    ours = [line({"a": 1.5, "b": 0}), line({"a": 2}, revision=None)]
    for each in ours:
        append(path, each)
    assert read(path) == (ours, [])
    assert [set(json.loads(text)) for text in path.read_text().splitlines()] == [{"date", "revision", "machine", "figures"}] * 2


@pytest.mark.parametrize("figures", [{}, {"a": float("nan")}, {"a": "1"}, {"a": True}, {"a": None}, [1]])
def test_a_line_refuses_what_is_no_number(figures):
    with pytest.raises(ValueError, match=r"figure"):
        line(figures)


def test_a_broken_file_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "history.jsonl"
    assert read(path) == ([], [])
    assert read(tmp_path) == ([], [f"{tmp_path}: Is a directory"])
    good = line({"a": 4.0})
    path.write_bytes(b'\xff\xfe{"date"\n' + good.to_json().encode() + b'\n[]\n{"figures": {"a": 1}}\n{"cut": ')
    lines, faults = read(path)
    assert lines == [good]
    assert [fault.split(":")[0].split(", ")[1] for fault in faults] == ["line 1", "line 3", "line 4", "line 5"]
    append(path, line({"a": 5.0}))  # after a line that was cut
    assert [each.figures["a"] for each in read(path)[0]] == [4.0, 5.0]


def test_ratios_are_to_the_last_line_that_has_the_figure():
    before = [line({"a": 1.0, "b": 8.0, "zero": 0}), line({"a": 2.0}, revision="def", machine=HERE | {"cpu": "other"})]
    texts = compared(line({"a": 3.0, "b": 4.0, "zero": 0, "new": 7.0}), before)
    assert texts == [
        "a 3, 1.500 times that of 2026-11-24 (def, on another processor)",
        "b 4, 0.500 times that of 2026-11-24 (abc)",
        "zero 0, equal to that of 2026-11-24 (abc)",
        "new 7, the first of its kind",
    ]
    assert compared(line({"zero": 1}), before) == ["zero 1, not that of 2026-11-24 (abc)"]


def test_the_committed_history_is_whole():
    """Every line can be read, and says of its machine what a result may say: no host, no path."""
    path = ROOT / "benchmarks" / "history.jsonl"
    lines, faults = read(path)
    assert lines and not faults
    assert all(set(each.machine) == set(MACHINE) and each.revision for each in lines)
    assert "/home" not in path.read_text()


@pytest.mark.slow
def test_the_plot(tmp_path):
    lines = [line({"a_us": 1.0, "b": 2.0}), line({"a_us": 2.0})]
    draw(lines, {"a_us": "first", "b": "second"}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_fails_for_no_history(tmp_path):
    """Absent, or rubbish: figures are printed and the exit is 0. A line is added of all figures only."""

    def run(*given):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "scripts.figures", *given]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)

    path = tmp_path / "history.jsonl"
    done = run("--only=padding", f"--history={path}")
    assert done.returncode == 0 and "padding_equal_size_percent 0, the first of its kind" in done.stdout
    path.write_text("rubbish\n" + line({"padding_random_percent": 1.0}).to_json())
    done = run("--only=padding", f"--history={path}")
    assert done.returncode == 0 and f"{path}, line 1: " in done.stdout
    assert "padding_random_percent" in done.stdout and "times that of 2026-11-24 (abc, on another processor)" in done.stdout
    before = path.read_text()
    done = run("--only=padding", "--append", f"--history={path}")
    assert done.returncode != 0 and "leave --only out" in done.stdout + done.stderr
    assert run("--only=nothing").returncode != 0 and path.read_text() == before
