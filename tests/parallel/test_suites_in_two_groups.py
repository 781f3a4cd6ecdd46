"""The suites of the engine once more, every engine of theirs with attention in two groups."""

import pytest

from tests.parallel.running import run_suites

SUITES = (
    "engine/test_engine_exactness",
    "engine/test_engine_lifecycle",
    "engine/test_engine_samples",
    "structured/test_constrained_engine",
)
# Left out: prompts that are not chunked, drafts, budgets that are odd, what a schedule of one group would have covered, and samples
# that are all in one group.
LEFT_OUT = (
    *("with_drafts", "whole_prompts", "orca-", "prefill_first", "request_level"),
    *("chunks_of_any_size", "separate_steps", "hits_of_every_length", "share_their_prompts_full_pages"),
)


@pytest.mark.slow
def test_the_engines_suites_in_two_groups(request: pytest.FixtureRequest):
    run_suites(request, "on_two_groups", SUITES, LEFT_OUT)
