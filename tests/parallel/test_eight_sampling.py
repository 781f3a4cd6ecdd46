import pytest

from tests.parallel.running import run_on_eight_devices


def test_sampling_on_eight_devices(request: pytest.FixtureRequest):
    run_on_eight_devices(request, "sampling")
