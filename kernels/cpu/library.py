"""The library of the kernels for CPUs, as `build` makes it: loaded and registered with JAX when a kernel is first asked for.

Owns the loading, the registration and the number of threads, which are the process's. A missing library is said once in the log.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

logger: logging.Logger = logging.getLogger("jaxserve")

PATH: Path = Path(__file__).parent / "libjaxserve_cpu.so.1"
QUOTA: Path = Path("/sys/fs/cgroup/cpu.max")  # of this process's control group, as a container sees it
LEVELS: tuple[str, ...] = ("none", "avx2", "avx512", "avx512bf16")  # instruction sets that kernels are compiled for
TARGETS: tuple[str, ...] = ("fused_matmul", "grouped_matmul", "attend", "rotary_write")


@functools.cache
def load() -> Any:
    """The library, its functions registered as foreign functions `jaxserve_cpu_<kernel>`. None where there is none, or this CPU
    can't run it, which is logged once."""
    if not PATH.is_file():
        logger.info("no kernels for CPUs: %s is not there, which `python kernels/cpu/build.py` makes; XLA computes", PATH)
        return None
    library = ctypes.CDLL(str(PATH))
    if library.jaxserve_cpu_level() == 0:
        logger.info("no kernels for CPUs: they need AVX2 and FMA, which this one lacks; XLA computes")
        return None
    for name in TARGETS:
        handler = getattr(library, f"jaxserve_cpu_{name}")
        jax.ffi.register_ffi_target(f"jaxserve_cpu_{name}", jax.ffi.pycapsule(handler), platform="cpu")
    library.jaxserve_cpu_set_num_threads(available_threads())
    return library


def lacks() -> str | None:
    """What this process lacks for any kernel for CPUs, in words; None if nothing. Loads the library."""
    from kernels.backends import current_platform

    if current_platform() != "cpu":
        return f"a device: it needs a CPU, found {current_platform()}"
    return None if load() is not None else "a machine: it needs the library that kernels/cpu/build.py makes, and AVX2"


def level() -> str:
    """The instruction set that kernels use, one of LEVELS; "none" without a library."""
    library = load()
    return LEVELS[0 if library is None else library.jaxserve_cpu_level()]


@contextmanager
def use_level(name: str) -> Iterator[None]:
    """For tests: kernels use this instruction set meanwhile. Raises ValueError if it is not one of this CPU's."""
    use = getattr(load(), "jaxserve_cpu_use_level", None)
    before = use(LEVELS.index(name)) if use is not None and name in LEVELS else -1
    if use is None or before < 0:
        raise ValueError(f"{name=} must be one of {', '.join(LEVELS[1:])} that this CPU has")
    try:
        yield
    finally:
        use(before)


def set_num_threads(num_threads: int | None) -> None:
    """How many threads compute a kernel, of all engines of this process. None: as many as this process may use.

    Raises ValueError if it is less than 1. Without a library nothing happens: XLA's threads are not ours to count.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"{num_threads=} must be at least 1, or None")
    library = load()
    if library is not None:
        library.jaxserve_cpu_set_num_threads(num_threads or available_threads())


def available_threads() -> int:
    """CPUs that this process may use: those that it may run on, and no more than its control group's quota pays for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, math.ceil(int(quota) / int(period))))
