"""The suites of the engine once more, every engine of theirs on two devices."""

import pytest

from tests.parallel.running import run_suites

SUITES = (
    "engine/test_engine_exactness",
    "engine/test_engine_lifecycle",
    "engine/test_engine_samples",
    "engine/test_engine_faults",
    "engine/test_beam_search",
    "speculative/test_engine_speculative",
    "structured/test_constrained_engine",
)


@pytest.mark.slow
def test_the_engines_suites_on_two_devices(request: pytest.FixtureRequest):
    run_suites(request, "on_two_devices", SUITES)
