"""The matmuls on AMX's tiles, as a program. Where the CPU has none, tiles are computed in software (amx_model.h): in place of the
intrinsics, or of the instructions, which trap (amx_traps.cc)."""

import subprocess
from pathlib import Path

import pytest

from kernels.cpu import build, library
from tests.kernels.cpu_levels import AMX_MODEL, model_flags, needs_library, needs_sanitizer

ROOT = Path(__file__).parents[2]
SOURCES = (
    "tests/kernels/cpu_amx_test.cc",
    "kernels/cpu/isa.cc",
    "kernels/cpu/pool.cc",
    "kernels/fused_matmul/cpu.cc",
    "kernels/grouped_matmul/cpu.cc",
)


def run_program(folder: Path, *flags: str, more: tuple[str, ...] = ()) -> None:
    program = folder / "amx_test"
    common = ["-DJAXSERVE_ISA=amx", "-std=c++17", "-ffp-contract=off", "-Wno-psabi", "-g", "-pthread", "-I", str(ROOT)]
    sources = [str(ROOT / path) for path in (*SOURCES, *more)]
    subprocess.run([build.compiler() or "", *common, *flags, *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "right\n", done.stdout + done.stderr[-3000:]


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize(("sanitizers", "runtime"), [("address,undefined", "libasan.so"), ("thread", "libtsan.so")])
def test_tiles_in_software_compute_what_the_reference_does(tmp_path, sanitizers, runtime):
    """Values, Intel's order of a sum, equal bits over numbers of rows and threads; tiles are configured where they are used, and
    released; no memory but their own."""
    needs_sanitizer(runtime)
    run_program(tmp_path, *model_flags(), *AMX_MODEL, "-O1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")


@needs_library
@pytest.mark.slow
@pytest.mark.skipif("amx" in library.levels(), reason="needs a CPU without AMX: on one with it, not every tile instruction traps")
def test_the_instructions_as_they_are_compiled_do_the_same(tmp_path):
    """Optimised as in the library: each tile instruction traps, is decoded from its bytes, and is computed in software."""
    if build.missing():
        pytest.skip(f"needs {build.missing()}")
    run_program(tmp_path, *model_flags(), "-DJAXSERVE_AMX_MODEL", "-O3", more=("tests/kernels/amx_traps.cc",))


@pytest.mark.slow
@pytest.mark.skipif("amx" not in library.levels(), reason="needs a CPU with AMX")
def test_tiles_of_the_cpu_do_the_same(tmp_path):
    run_program(tmp_path, *build.ISAS["amx"], "-O3")


@needs_library
def test_an_instruction_set_that_is_not_there_is_refused():
    assert library.level() == library.levels()[-1] and library.levels()[0] == "avx2"
    for name in set(library.LEVELS) - set(library.levels()):
        said = f"name='{name}' must be one of those that this machine has: avx2"
        with pytest.raises(ValueError, match=said), library.use_level(name):
            pass
