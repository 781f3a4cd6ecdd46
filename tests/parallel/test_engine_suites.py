"""The suites of the engine once more, on two devices, on two stages and in two groups, in processes of their own."""

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

ON_STAGES = (  # drafts are refused there, and nothing runs ahead of its tokens
    "engine/test_engine_exactness",
    "engine/test_engine_lifecycle",
    "engine/test_engine_samples",
    "engine/test_beam_search",
    "structured/test_constrained_engine",
)
IN_GROUPS = (
    "engine/test_engine_exactness",
    "engine/test_engine_lifecycle",
    "engine/test_engine_samples",
    "structured/test_constrained_engine",
)
# Left out: prompts that are not chunked, drafts, budgets that are odd, what a schedule of one group would have covered, and samples
# that are all in one group.
NOT_IN_GROUPS = " and ".join(
    f"not {name}"
    for name in (
        *("with_drafts", "whole_prompts", "orca-", "prefill_first", "request_level"),
        *("chunks_of_any_size", "separate_steps", "hits_of_every_length", "share_their_prompts_full_pages"),
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_an_engines_suite_on_two_devices(suite: str, request: pytest.FixtureRequest):
    run_tests(request, suite, "-p", "tests.parallel.on_two_devices", f"tests/{suite}.py")


@pytest.mark.slow
@pytest.mark.parametrize("suite", ON_STAGES)
def test_an_engines_suite_on_two_stages(suite: str, request: pytest.FixtureRequest):
    run_tests(request, suite, "-p", "tests.parallel.on_two_stages", "-k", "not with_drafts", f"tests/{suite}.py")


@pytest.mark.slow
@pytest.mark.parametrize("suite", IN_GROUPS)
def test_an_engines_suite_on_two_groups(suite: str, request: pytest.FixtureRequest):
    run_tests(request, suite, "-p", "tests.parallel.on_two_groups", "-k", NOT_IN_GROUPS, f"tests/{suite}.py")
