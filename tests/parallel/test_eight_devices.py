"""The tests of eight_devices/, in processes of their own."""

from pathlib import Path

import pytest

from tests.parallel.running import run_tests

FOLDER = Path(__file__).parent / "eight_devices"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_on_eight_devices(name: str, request: pytest.FixtureRequest):
    run_tests(request, name, str(FOLDER / f"{name}.py"))
