"""The library of the kernels for CPUs, as `build` makes it: loaded and registered with JAX when a kernel is first asked for.

Owns the loading, the registration and the number of threads, which are the process's. A library that is missing or was
compiled from something else is said once in the log: a warning where there is a compiler.
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

from kernels.cpu import build

logger: logging.Logger = logging.getLogger("jaxserve")

PATH: Path = Path(__file__).parent / "libjaxserve_cpu.so.1"
CGROUPS: Path = Path("/sys/fs/cgroup")  # where control groups are mounted
OWN_CGROUPS: Path = Path("/proc/self/cgroup")  # which of them this process is in
LEVELS: tuple[str, ...] = ("none", "avx2", "avx512", "avx512bf16", "amx")  # instruction sets that kernels are compiled for
TARGETS: tuple[str, ...] = ("fused_matmul", "grouped_matmul", "attend", "rotary_write")


@functools.cache
def load() -> Any:
    """The library, its functions registered as foreign functions `jaxserve_cpu_<kernel>`. None where there is none, or this CPU
    can't run it, which is logged once."""
    fault, lacking = _fault(), build.missing()
    if fault is not None:
        if lacking is None:
            logger.warning("no kernels for CPUs: %s; XLA computes, which is slower: run `python %s`", fault, build.__file__)
        else:
            logger.info("no kernels for CPUs: %s; XLA computes. `python %s` needs %s", fault, build.__file__, lacking)
        return None
    library = find()
    if library.jaxserve_cpu_level() == 0:
        logger.info("no kernels for CPUs: they need AVX2 and FMA, which this one lacks; XLA computes")
        return None
    for name in TARGETS:
        handler = getattr(library, f"jaxserve_cpu_{name}")
        jax.ffi.register_ffi_target(f"jaxserve_cpu_{name}", jax.ffi.pycapsule(handler), platform="cpu")
    library.jaxserve_cpu_set_num_threads(available_threads())
    return library


@functools.cache
def find() -> Any:
    """The library, nothing of it registered, for what needs neither JAX nor AVX2. None where there is none; nothing is said."""
    return None if _fault() is not None else ctypes.CDLL(str(PATH))


def levels() -> tuple[str, ...]:
    """The instruction sets of LEVELS that this CPU has and the system lets this process use; none without a library."""
    library = load()
    return () if library is None else tuple(name for i, name in enumerate(LEVELS) if library.jaxserve_cpu_has_level(i))


def _fault() -> str | None:
    """Why the library must be compiled before it can be used, in words; None if it need not be."""
    if not PATH.is_file():
        return f"{PATH.name} has not been compiled"
    if build.is_stale(PATH):
        return f"{PATH.name} was compiled from other sources than these"
    if build.headers() is not None and ctypes.CDLL(str(PATH)).jaxserve_cpu_ffi_minor() > build.ffi_minor():
        return f"{PATH.name} was compiled with a later jaxlib than this one"
    return None


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
    """For tests: kernels use this instruction set meanwhile. Raises ValueError if it is not one of `levels`."""
    if name not in levels():
        raise ValueError(f"{name=} must be one of those that this machine has: {', '.join(levels()) or 'none'}")
    use = load().jaxserve_cpu_use_level
    before = use(LEVELS.index(name))
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
    """CPUs that this process may use: those that it may run on, and no more than the quotas of its control groups pay for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas())]))


def _quotas() -> Iterator[float]:
    """CPUs that each of this process's control groups is granted, from its own to the outermost that is mounted; those without a
    limit are left out. A container's mount often begins at its own group, of which the host's path names nothing there."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:  # "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = Path(path.lstrip("/"))
        for mount in (CGROUPS / controllers, CGROUPS / ("cpu" if controllers else "unified")):
            for group in (own, *own.parents):
                if (quota := _quota(mount / group)) is not None:
                    yield quota


def _quota(group: Path) -> float | None:
    """CPUs that a control group is granted; None without a limit, or where no such group lies here."""
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None
