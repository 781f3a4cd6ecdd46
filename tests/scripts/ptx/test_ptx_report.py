"""What has run before is not run again, and says the same."""

import pytest

from scripts.ptx.coverage import Coverage
from scripts.ptx.log import Log, digest_of
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
