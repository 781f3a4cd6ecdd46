"""What tests of the kernels for CPUs share: the marks, and each instruction set that this machine has."""

from contextlib import AbstractContextManager

import pytest

from kernels.cpu import library

needs_library = pytest.mark.skipif(
    not library.PATH.is_file(), reason="needs the library of kernels for CPUs (a C++ compiler; kernels/cpu/build.py)"
)


def at_level(name: str) -> AbstractContextManager[None]:
    """Kernels on this instruction set; skips the test where the CPU lacks it."""
    if library.LEVELS.index(name) > library.LEVELS.index(library.level()):
        pytest.skip(f"needs {name}, this CPU has {library.level()}")
    return library.use_level(name)
