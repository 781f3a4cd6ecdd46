"""What tests of the kernels for CPUs share: the marks, each instruction set that this machine has, AMX in software, sanitizers."""

import os
import shutil
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kernels.cpu import build, library

AUTO: str = "xla" if library.load() is None else "cpu"  # what "auto" is on this machine without a GPU

needs_library = pytest.mark.skipif(
    library.load() is None, reason="needs the library of kernels for CPUs (a C++ compiler; kernels/cpu/build.py)"
)

AMX_MODEL: tuple[str, ...] = ("-include", str(Path(__file__).with_name("amx_model.h")))  # flags of a compiler


def model_flags() -> tuple[str, ...]:
    """What the kernels for AMX are compiled with beside AMX_MODEL: beside the tiles, the best that this machine has."""
    return (*build.ISAS[library.level()], *build.AMX)


def needs_sanitizer(name: str) -> str:
    """The path of a sanitizer's runtime; skips where there is none."""
    if build.missing() or shutil.which("g++") is None:
        pytest.skip(f"needs {build.missing() or 'g++'}")
    path = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    return path if os.path.isabs(path) else pytest.skip(f"needs {name}")


def at_level(name: str) -> AbstractContextManager[None]:
    """Kernels on this instruction set; skips the test where the CPU lacks it."""
    if name not in library.levels():
        pytest.skip(f"needs {name}, this machine has {library.level()}")
    return library.use_level(name)
