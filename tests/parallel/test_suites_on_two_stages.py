"""The suites of the engine once more, every engine of theirs on two stages."""

import pytest

from tests.parallel.running import run_suites

SUITES = (  # drafts are refused there, and nothing runs ahead of its tokens
    "engine/test_engine_exactness",
    "engine/test_engine_lifecycle",
    "engine/test_engine_samples",
    "engine/test_beam_search",
    "structured/test_constrained_engine",
)


@pytest.mark.slow
def test_the_engines_suites_on_two_stages(request: pytest.FixtureRequest):
    run_suites(request, "on_two_stages", SUITES, ("with_drafts",))
