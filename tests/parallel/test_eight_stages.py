import pytest

from tests.parallel.running import run_on_eight_devices


@pytest.mark.slow
def test_stages_on_eight_devices(request: pytest.FixtureRequest):
    run_on_eight_devices(request, "stages")
