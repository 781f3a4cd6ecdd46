"""What has run before is not run again, and says the same."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from kernels.fused_matmul import cases as fused_cases
from kernels.grouped_matmul import cases as experts_cases
from kernels.grouped_matmul import mosaic_layout
from kernels.grouped_matmul.layout import lay_out
from kernels.ragged_paged_attention import cases as attention_cases
from kernels.ragged_paged_attention.mosaic_portable.tiles import PortablePlanner
from kernels.ragged_paged_attention.mosaic_sm90.planner import Planner
from kernels.ragged_paged_attention.mosaic_sm90.tiles import choose_tiles
from kernels.ragged_paged_attention.work_list import WorkShape
from kernels.ragged_paged_attention.work_planner import WorkPlanner
from kernels.rotary_write import cases as rotary_cases
from scripts.ptx import report as report_module
from scripts.ptx.coverage import Coverage
from scripts.ptx.log import BATCHES, Log, batch_makers, digest_of
from scripts.ptx.report import Report, check_program
from tests.scripts.ptx.test_ptx_survivors import READ, WRITE, suite

BARRIER = WRITE + "bar.sync 0;" + READ
ELSEWHERE = BARRIER.replace("[%rd2+-128]", "[%rd1]")


def checked(program, log, *, seeds=2, target="a100") -> tuple[Report, Coverage]:
    report, coverage = Report(target, log), Coverage()
    check_program(program, seeds, coverage, report)
    return report, coverage


@pytest.mark.parametrize(
    ("body", "want", "fault"),
    [
        (BARRIER, 32, None),
        (WRITE + READ, 32, "unordered with"),
        (ELSEWHERE, 32, "31 values are wrong"),
    ],
)
def test_a_run_that_goes_on_finds_what_the_first_one_found(tmp_path, body, want, fault):
    path = str(tmp_path / "log")
    first, lines = checked(suite(body, want, calls=(calls := [])), Log(path))
    assert [fault in text for text in first.faults] == [True] if fault else first.faults == []
    program = suite(body, want, calls=(again := []))
    second, same_lines = checked(program, Log(path), target="l40s")
    assert calls and again == []
    assert second.faults == first.faults and same_lines.summary() == lines.summary()
    (row,) = second.programs
    assert row == first.programs[0] and row["ran_for"] == ["a100"] and row["ptx"] == digest_of(program.kernels)


@pytest.mark.parametrize(("body", "faults"), [(BARRIER, 0), (ELSEWHERE, 7)])
def test_by_turns_the_first_batch_runs_in_all_schedules_and_each_other_in_one_of_five_kinds(body, faults):
    """Values are looked at in whichever comes first."""
    program, report = suite(body, calls=(calls := [])), Report("a100", Log(None))
    (run,) = program.runs
    program = dataclasses.replace(program, runs=tuple(dataclasses.replace(run, name=f"{run.name} {i}") for i in range(7)))
    check_program(program, 2, Coverage(), report, by_turns=True)
    assert calls == [0, 1, 1, 2, 3, 4, 0, 1] and len(report.faults) == faults


def test_more_schedules_run_those_that_are_new(tmp_path):
    path = str(tmp_path / "log")
    checked(suite(BARRIER), Log(path))
    report, _ = checked(suite(BARRIER, calls=(calls := [])), Log(path), seeds=4, target="h100")
    assert calls == [2, 3] and report.programs[0]["ran_for"] == ["a100", "h100"]


def test_other_ptx_or_another_launch_is_run(tmp_path):
    path = str(tmp_path / "log")
    checked(suite(BARRIER), Log(path))
    checked(suite(BARRIER.replace("%r5", "%r9"), calls=(calls := [])), Log(path))
    assert calls == [0, 1]


def test_batches_made_in_another_way_are_run(tmp_path, monkeypatch):
    path = str(tmp_path / "log")
    checked(suite(BARRIER), Log(path))
    monkeypatch.setattr(report_module, "batch_makers", lambda: "of another tree")
    checked(suite(BARRIER, calls=(calls := [])), Log(path))
    assert calls == [0, 1]


MAKERS = (
    *(cases.build for cases in (attention_cases, experts_cases, fused_cases, rotary_cases)),
    *(choose_tiles, PortablePlanner, Planner, WorkPlanner, WorkShape, lay_out, mosaic_layout.inputs),
)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: f"{maker.__module__}.{maker.__name__}")
def test_what_makes_batches_is_known(maker):
    assert Path(inspect.getfile(maker)).name in BATCHES


def test_a_hash_of_what_makes_batches_and_of_nothing_else(tmp_path):
    def written(folder: str, **files: str) -> str:
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / f"{name}.py").write_text(text)
        return batch_makers(tmp_path / folder)

    first = written("first", tiles="chunk = 512", kernel="one")
    assert written("same", tiles="chunk = 512", kernel="another") == first
    assert written("other", tiles="chunk = 64", kernel="one") != first


def test_outputs_that_differ_between_schedules_are_a_fault_of_a_run_that_goes_on_too(tmp_path):
    path = str(tmp_path / "log")
    program = suite(BARRIER)
    checked(program, Log(path), seeds=1)
    (run,) = program.runs
    log = Log(path)
    (entry,) = log._known.values()
    entry["output"] = "that of another run"
    report, _ = checked(program, log)
    assert report.faults == [f"{run.name}: 2 different outputs in 2 schedules"]
