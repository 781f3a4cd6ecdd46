"""Compiles the kernels for CPUs into one shared library beside this file: `python kernels/cpu/build.py`, in seconds.

Owns the compiler's flags. With nothing changed it returns at once. Where the platform, a compiler or jaxlib's headers are missing,
it says so and builds nothing: the "xla" backends run then. Imports nothing of jaxserve or JAX.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
KERNELS = FOLDER.parent
LIBRARY = FOLDER / "libjaxserve_cpu.so.1"

AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma")
AMX = ("-mamx-tile", "-mamx-bf16")
ISAS = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": AVX512,
    "avx512bf16": (*AVX512, "-mavx512bf16"),
    "amx": (*AVX512, "-mavx512bf16", *AMX),
}
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
)
SHARED_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")


def sources() -> list[Path]:
    """Everything that the library is made from."""
    return sorted([*KERNELS.glob("*/*.cc"), *KERNELS.glob("*/*.h"), Path(__file__).resolve()])


def headers() -> Path | None:
    """jaxlib's folder of headers; None where jaxlib is not installed."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "include"
    return folder if (folder / "xla/ffi/api/ffi.h").is_file() else None


def ffi_minor() -> int:
    """The version of XLA's interface to foreign functions (of major 0) that jaxlib has here, as its headers say."""
    folder = headers()
    assert folder is not None
    found = re.search(r"define XLA_FFI_API_MINOR (\d+)", (folder / "xla/ffi/api/c_api.h").read_text())
    assert found is not None
    return int(found[1])


def compiler() -> str | None:
    """$CXX, or the first of g++ and clang++ that there is."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def missing() -> str | None:
    """What keeps the library from being built here, in words; None if nothing does."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"Linux on x86-64, found {sys.platform} on {platform.machine()}"
    if compiler() is None:
        return "a C++ compiler (Debian, Ubuntu: apt install g++)"
    return None if headers() is not None else "jaxlib, for its headers"


def is_too_old() -> bool:
    """Whether the compiler says that it does not know the newest of the instruction sets: g++ before 11, clang++ before 12."""
    command = [compiler() or "", *AMX, "-fsyntax-only", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode != 0 and "amx" in done.stderr


def fingerprint() -> str:
    """Of what the library would be made from now: the one of its sources, then that of headers and compiler."""
    version = subprocess.run([compiler() or "", "--version"], capture_output=True, check=True).stdout
    tools = _digest(sorted((headers() or FOLDER).glob("xla/ffi/api/*.h")), version)
    return f"{sources_fingerprint()}:{tools}"


def sources_fingerprint() -> str:
    """Of the sources alone, which a machine without a compiler can compare too."""
    return _digest(sources())


def _digest(paths: list[Path], more: bytes = b"") -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashlib.sha256(digest.digest() + more).hexdigest()


def is_stale(library: Path) -> bool:
    """Whether a library was made from other sources than those here."""
    return sources_fingerprint().encode() not in library.read_bytes()


def compile_library(output: Path, *extra: str, isas: Mapping[str, tuple[str, ...]] = ISAS) -> None:
    """Compiles and links. extra: more flags of both, such as those of a sanitizer. isas: what each instruction set is compiled
    with. Raises RuntimeError with what the compiler said."""
    include, cxx = headers(), compiler()
    assert include is not None and cxx is not None
    define = f'-DJAXSERVE_FINGERPRINT="{fingerprint()}"'
    root = ("-I", str(KERNELS.parent), "-isystem", str(include))
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for source in sorted(KERNELS.glob("*/cpu.cc")):
            for isa, flags in isas.items():
                target = Path(folder) / f"{source.parent.name}_{isa}.o"
                jobs.append([*FLAGS, *flags, f"-DJAXSERVE_ISA={isa}", *root, *extra, "-c", str(source), "-o", str(target)])
        for source in sorted(FOLDER.glob("*.cc")):
            jobs.append([*SHARED_FLAGS, define, *root, *extra, "-c", str(source), "-o", str(Path(folder) / f"{source.stem}.o")])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _run(cxx, *job), jobs))
        objects = sorted(map(str, Path(folder).glob("*.o")))
        unfinished = output.with_suffix(f".{os.getpid()}.tmp")
        _run(cxx, "-shared", "-pthread", *extra, *objects, "-o", str(unfinished))
        unfinished.replace(output)  # another process may have the old one open


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def build() -> bool:
    """Makes the library what its sources say. Whether there is one now."""
    lacking = missing() or ("g++ 11, clang++ 12 or newer" if is_too_old() else None)
    if lacking is not None:
        print(f"jaxserve: no kernels for CPUs are built: that needs {lacking}", file=sys.stderr)
        return False
    wanted = fingerprint()
    if not (LIBRARY.is_file() and wanted.encode() in LIBRARY.read_bytes()):
        compile_library(LIBRARY)
    return True


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.parse_args()
    build()


if __name__ == "__main__":
    main()
