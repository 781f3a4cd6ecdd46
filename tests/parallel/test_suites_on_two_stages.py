"""The suites of the engine once more, every engine of theirs on two stages."""

import pytest

from tests.parallel.running import run_tests

SUITES = (  # drafts are refused there, and nothing runs ahead of its tokens
    "engine/test_engine_exactness",
    "engine/test_engine_lifecycle",
    "engine/test_engine_samples",
    "engine/test_beam_search",
    "structured/test_constrained_engine",
)


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_an_engines_suite_on_two_stages(suite: str, request: pytest.FixtureRequest):
    run_tests(request, suite, "-p", "tests.parallel.on_two_stages", "-k", "not with_drafts", f"tests/{suite}.py")
