"""What tests of the kernels for CPUs share: the marks, and each instruction set that this machine has."""

from contextlib import AbstractContextManager

import pytest

from kernels.cpu import library

AUTO: str = "xla" if library.load() is None else "cpu"  # what "auto" is on this machine without a GPU

needs_library = pytest.mark.skipif(
    library.load() is None, reason="needs the library of kernels for CPUs (a C++ compiler; kernels/cpu/build.py)"
)


def at_level(name: str) -> AbstractContextManager[None]:
    """Kernels on this instruction set; skips the test where the CPU lacks it."""
    if library.LEVELS.index(name) > library.LEVELS.index(library.level()):
        pytest.skip(f"needs {name}, this CPU has {library.level()}")
    return library.use_level(name)
