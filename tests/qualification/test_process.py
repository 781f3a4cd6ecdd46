"""What `python -m kernels.qualification` reports, and when it leaves the rest to another process."""

import pytest

from kernels.qualification import __main__ as process
from kernels.qualification import checks
from kernels.qualification.plan import CRASHED, ERROR, PASSED, WRONG, Plan, Verdict
from tests.qualification.conftest import PLAN


@pytest.fixture
def tried(monkeypatch):
    """Of the result of each backend, the lines that are reported."""

    def run(known=None, plan=PLAN, **results):
        def run_unit(plan, unit, begin):
            begin("a batch")
            return Verdict(unit.kernel, unit.backend, results[unit.backend])

        lines = []
        monkeypatch.setattr(checks, "run_unit", run_unit)
        status = process._try_all(plan.to_json(known or {}), lambda **line: lines.append(line))
        return status, lines

    return run


def test_each_unit_is_reported(tried):
    status, lines = tried(bent=WRONG, right=PASSED)
    assert status == 0 and [next(iter(line)) for line in lines] == ["begin", "case", "unit"] * 2 + ["end"]
    assert [line["begin"] for line in lines if "begin" in line] == ["attention bent", "attention right"]
    assert lines[2]["verdict"] == {"kernel": "attention", "backend": "bent", "result": WRONG, "reason": "", "seconds": 0.0}


def test_after_an_error_the_device_is_not_used_again(tried):
    status, lines = tried(bent=ERROR, right=PASSED)
    assert status == 0 and [next(iter(line)) for line in lines] == ["begin", "case", "unit"]


def test_it_goes_on_where_another_process_ended(tried):
    known = {"attention bent": Verdict("attention", "bent", CRASHED)}
    _, lines = tried(known, right=PASSED)
    assert lines[0] == {"begin": "attention right"} and "end" in lines[-1]


def test_without_a_gpu_a_plan_for_one_is_refused(tried, capsys):
    status, lines = tried(plan=Plan(PLAN.asks, platform="gpu"))
    assert status == 1 and not lines and "JAX has no GPU here" in capsys.readouterr().err
