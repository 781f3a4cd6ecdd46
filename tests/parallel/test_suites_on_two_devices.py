"""The suites of the engine once more, every engine of theirs on two devices."""

import pytest

from tests.parallel.running import run_tests

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
@pytest.mark.parametrize("suite", SUITES)
def test_an_engines_suite_on_two_devices(suite: str, request: pytest.FixtureRequest):
    run_tests(request, suite, "-p", "tests.parallel.on_two_devices", f"tests/{suite}.py")
