"""What every test shares."""

import os
import shutil
import tempfile

import pytest

# Before anything imports jax. JAX_PLATFORMS=cuda pytest tests/kernels runs the kernels on a GPU instead.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Most of a run is XLA's compiling. Few tests ask how good its code is, or what its bits are: those set OPTIMISED in their module.
# JAX_DISABLE_MOST_OPTIMIZATIONS=0 optimises for all; JAX_COMPILATION_CACHE_DIR=<folder> keeps what was compiled for the next run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config):
    """One compilation cache for the processes of a run, those that tests start included."""
    if hasattr(config, "workerinput"):
        return
    if CACHE not in os.environ:
        os.environ[CACHE] = config.stash[FOLDER] = tempfile.mkdtemp(prefix="jaxserve-tests-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_unconfigure(config):
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)
        os.environ.pop(CACHE)


FOLDER = pytest.StashKey[str]()


@pytest.fixture(autouse=True, scope="module")
def _optimised(request):
    """Modules with OPTIMISED = True compile as users do."""
    if not getattr(request.module, "OPTIMISED", False):
        yield
        return
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_terminal_summary(terminalreporter):
    """What tests counted (`record_property("counted", text)`): pytest shows no prints of a test that passes, nor of a worker."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    counted = [text for report in reports if report.when == "call" for name, text in report.user_properties if name == "counted"]
    if counted:
        terminalreporter.section("counted")
        for text in counted:
            terminalreporter.line(text)
