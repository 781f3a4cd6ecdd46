"""The tests of eight_devices/ in processes of their own, as JAX must be told of virtual devices before it starts; and the suites of
the engine once more, on two devices, on two stages and in two groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "eight_devices"
ROOT = Path(__file__).parents[2]
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


def run(request: pytest.FixtureRequest, name: str, *args: str) -> None:
    """pytest in a process with eight devices, of the tests that this run wants."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    marks = request.config.option.markexpr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *args]
    done = subprocess.run([*command, "-m", marks] if marks else command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    request.node.user_properties.append(("counted", f"{name}: {done.stdout.strip().splitlines()[-1]}"))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_on_eight_devices(name: str, request: pytest.FixtureRequest):
    run(request, name, str(FOLDER / f"{name}.py"))


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_an_engines_suite_on_two_devices(suite: str, request: pytest.FixtureRequest):
    run(request, suite, "-p", "tests.parallel.on_two_devices", f"tests/{suite}.py")


@pytest.mark.slow
@pytest.mark.parametrize("suite", ON_STAGES)
def test_an_engines_suite_on_two_stages(suite: str, request: pytest.FixtureRequest):
    run(request, suite, "-p", "tests.parallel.on_two_stages", "-k", "not with_drafts", f"tests/{suite}.py")


@pytest.mark.slow
@pytest.mark.parametrize("suite", IN_GROUPS)
def test_an_engines_suite_on_two_groups(suite: str, request: pytest.FixtureRequest):
    run(request, suite, "-p", "tests.parallel.on_two_groups", "-k", NOT_IN_GROUPS, f"tests/{suite}.py")
