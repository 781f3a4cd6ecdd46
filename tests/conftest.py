"""What every test shares."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

# Before anything imports jax. JAX_PLATFORMS=cuda pytest tests/kernels runs the kernels on a GPU instead.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Most of a run is XLA's compiling. Few tests ask how good its code is, or what its bits are: those set OPTIMISED in their module.
# JAX_DISABLE_MOST_OPTIMIZATIONS=0 optimises for all. XLA for GPUs has no code that is not optimised.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# One compilation cache for the processes of a run, those that tests start included. It lies in a folder of the run's own, or in
# $TESTS_CACHE, which is kept for the next run: programs are found there by all that they are made from.
# JAX_COMPILATION_CACHE_DIR=<folder> is used as it is. Here and not in a hook: conftest.py of a folder may import jax before hooks
# are called.
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": "",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
FOLDER = None  # the cache's, of the process that made it, if it is not kept
if not CACHE.keys() & os.environ.keys():
    kept = os.environ.get("TESTS_CACHE")
    FOLDER = None if kept else tempfile.mkdtemp(prefix="jaxserve-tests-")
    os.environ.update(CACHE | {"JAX_COMPILATION_CACHE_DIR": FOLDER or str(Path(kept or "").absolute())})


def pytest_collection_modifyitems(items):
    """Files of engines in processes of their own first: they are the longest, most of them have a test or two, and no process of a
    run should wait at its end for another one's last file. `--dist=loadfile` needs `--no-loadscope-reorder` for it."""
    first = [ROOT / "parallel", ROOT / "hosts"]
    items.sort(key=lambda item: item.path.parent not in first)


def pytest_unconfigure():
    if FOLDER is not None:
        shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _optimised(request):
    """Modules with OPTIMISED = True compile as users do, where slow tests run too: `make test` does not wait for LLVM."""
    if request.config.option.markexpr == "not slow" or not getattr(request.module, "OPTIMISED", False):
        yield
        return
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    forget()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    forget()


def forget():
    """Programs, and answers of theirs, that modules share: those of optimised code are not to the bit those of the other."""
    for name in ("tests.dummy", "tests.workload"):
        if name in sys.modules:
            sys.modules[name].forget()


def pytest_terminal_summary(terminalreporter):
    """What tests counted (`record_property("counted", text)`): pytest shows no prints of a test that passes, nor of a worker."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    counted = [text for report in reports if report.when == "call" for name, text in report.user_properties if name == "counted"]
    if counted:
        terminalreporter.section("counted")
        for text in counted:
            terminalreporter.line(text)
