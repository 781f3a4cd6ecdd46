import json
import sys
from pathlib import Path

import pytest

from jaxserve.qualification.card import Card
from jaxserve.qualification.watch import Limits
from kernels.backends import ATTENTION, GROUPED_MATMUL
from kernels.qualification.plan import Ask, Plan
from tests.qualification import rows

CARD = Card("Fake 3000", "9.9", "1.2.3", "0.11.2", "0.11.2", "abc", "jax-cuda13-plugin 0.11.2", "13.0.88", 132, platform="cpu")
LIMITS = Limits(start=20, batch=20, whole=60, ending=5)
PLAN = Plan({"attention": Ask()}, platform="cpu", small=True)
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _two_more_rows(monkeypatch):
    for name, row in rows.ROWS.items():
        monkeypatch.setitem(ATTENTION.rows, name, row)
    for name, row in rows.GROUPED_ROWS.items():
        monkeypatch.setitem(GROUPED_MATMUL.rows, name, row)


@pytest.fixture
def fake(tmp_path):
    """Of behaviours, the command of a process that has them. It notes its starts in a file."""

    def make(**options) -> list[str]:
        options = {"log": str(tmp_path / "starts"), "pid": str(tmp_path / "pids")} | options
        return [sys.executable, str(HERE / "fake_child.py"), json.dumps(options)]

    return make


@pytest.fixture
def starts(tmp_path):
    """How often processes of `fake` were started."""
    log = tmp_path / "starts"
    return lambda: len(log.read_text().split()) if log.exists() else 0
