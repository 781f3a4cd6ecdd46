"""The matmuls on AMX's tiles, as a program: with the instructions where the CPU has them, in software (amx_model.h) anywhere."""

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


def run_program(folder: Path, *flags: str) -> None:
    program = folder / "amx_test"
    common = ["-DJAXSERVE_ISA=amx", "-std=c++17", "-ffp-contract=off", "-Wno-psabi", "-g", "-pthread", "-I", str(ROOT)]
    subprocess.run([build.compiler() or "", *common, *flags, *(str(ROOT / path) for path in SOURCES), "-o", program], check=True)
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
