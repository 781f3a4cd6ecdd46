"""Which card this is: what a verdict on our kernels holds for.

Owns the questions to NVIDIA's management library and driver, which answer before JAX has taken the device and its memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kernels

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")  # modules by which JAX reaches NVIDIA's GPUs, in its own order
PTXAS_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")  # distributions that bring ptxas
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


@dataclasses.dataclass(frozen=True)
class Card:
    """What the kernels' verdicts depend on; another driver, another JAX or another MIG slice is another card.

    plugin: JAX's for CUDA, with its version. ptxas: its version. num_sms: streaming multiprocessors, a MIG slice's where JAX has
    one; 0 where nothing says it. platform: as JAX calls it.
    """

    name: str
    compute_capability: str
    driver: str
    jax: str
    jaxlib: str
    kernels: str  # revision of their source
    plugin: str
    ptxas: str
    num_sms: int
    platform: str = "gpu"

    @property
    def key(self) -> str:
        """A name for files."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:24]

    def __str__(self) -> str:
        sms = f", {self.num_sms} SMs" if self.num_sms else ""
        return f"{self.name} (compute capability {self.compute_capability}, driver {self.driver}, jax {self.jax}{sms})"


def find_card(*, ask_jax: bool) -> Card | None:
    """The GPU that JAX uses by default; None where it uses none, or where that can't be said yet.

    ask_jax: the machine may have several kinds of GPU or of MIG slices, or lack the libraries that say so; then JAX says which one
    is its own, which makes it take the device. Without ask_jax JAX is left alone, and such a machine has no answer.
    """
    if not may_use_gpus():
        return None
    found, sizes = set(gpus()), set(sm_counts())
    if ask_jax:
        import jax

        device = jax.local_devices()[0]
        if device.platform != "gpu":
            return None
        if len(found) != 1:
            found = {(device.device_kind, str(getattr(device, "compute_capability", "unknown")))}
        if len(sizes) != 1:
            sizes = {int(getattr(device, "core_count", 0))}
    if len(found) != 1 or len(sizes) != 1:
        return None
    ((name, capability),), (num_sms,) = found, sizes
    return Card(name, capability, driver_version(), *versions(), revision(), plugin_version(), ptxas_version(), num_sms)


def may_use_gpus() -> bool:
    """Whether JAX has a way to NVIDIA's GPUs, and no setting keeps it from them. Starts no backend."""
    import jax

    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and platforms.split(",")[0] not in ("cuda", "gpu"):  # the first one is the default device's
        return False
    return any(importlib.util.find_spec(name) is not None for name in PLUGINS)


def versions() -> tuple[str, str]:
    """(jax's, jaxlib's)."""
    return importlib.metadata.version("jax"), importlib.metadata.version("jaxlib")


def plugin_version() -> str:
    """Name and version of JAX's plugin for CUDA; "unknown" where no distribution has it."""
    for name in PLUGINS:
        if importlib.util.find_spec(name) is not None:
            name = name.replace("_", "-")
            return f"{name} {_distribution_version(name) or 'unknown'}"
    return "unknown"


@functools.cache
def ptxas_version() -> str:
    """Of the assembler that JAX finds: in $CUDA_ROOT, in NVIDIA's wheel, or on PATH; "unknown" where there is none."""
    root = os.environ.get("CUDA_ROOT")
    found = [_distribution_version(name) for name in PTXAS_WHEELS] if root is None else []
    ptxas = shutil.which("ptxas", path=None if root is None else str(Path(root) / "bin"))
    return next(filter(None, found), None) or (None if ptxas is None else _version_said_by(ptxas)) or "unknown"


def _version_said_by(ptxas: str) -> str | None:
    """ "Cuda compilation tools, release 13.0, V13.0.88" -> "13.0.88"."""
    try:
        said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\bV(\d[\d.]*)", said)
    return None if version is None else version[1]


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def revision(folder: Path | None = None) -> str:
    """A hash of the kernels' source, and of their tuned sizes."""
    root = Path(kernels.__file__).parent if folder is None else folder
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def gpus() -> list[tuple[str, str]]:
    """(name, compute capability) of each GPU of this machine, from the management library; none without it."""
    library = _management_library()
    return [] if library is None else _asked(library, _list_gpus, [])


def sm_counts() -> list[int]:
    """Streaming multiprocessors of each GPU or MIG slice that this process may use, from the driver; none without it. No context is
    made, and no memory taken."""
    cuda = _driver_library()
    if cuda is None:
        return []
    try:
        _call(cuda.cuInit, ctypes.c_uint(0))
        return _list_sm_counts(cuda)
    except _RefusedError:
        return []


def _list_sm_counts(cuda: Any) -> list[int]:
    count, found = ctypes.c_int(), []
    _call(cuda.cuDeviceGetCount, ctypes.byref(count))
    for i in range(count.value):
        device, num_sms = ctypes.c_int(), ctypes.c_int()
        _call(cuda.cuDeviceGet, ctypes.byref(device), ctypes.c_int(i))
        _call(cuda.cuDeviceGetAttribute, ctypes.byref(num_sms), ctypes.c_int(_MULTIPROCESSOR_COUNT), device)
        found.append(num_sms.value)
    return found


def driver_version() -> str:
    """The driver's; "unknown" where nothing says it."""
    library = _management_library()
    if library is not None:
        return _asked(library, _driver, "unknown")
    try:  # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ..."
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
        return next(word for word in words if word[0].isdigit() and "." in word)
    except (OSError, IndexError, StopIteration):
        return "unknown"


def _management_library() -> Any:
    return _library("libnvidia-ml.so.1")


def _driver_library() -> Any:
    return _library("libcuda.so.1")


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _asked[Answer](library: Any, question: Any, otherwise: Answer) -> Answer:
    """What `question` gets from the library; `otherwise` if a call fails."""
    if library.nvmlInit_v2() != 0:
        return otherwise
    try:
        return question(library)
    except _RefusedError:
        return otherwise
    finally:
        library.nvmlShutdown()


class _RefusedError(Exception):
    pass


def _call(function: Any, *args: Any) -> None:
    if function(*args) != 0:
        raise _RefusedError


def _driver(library: Any) -> str:
    text = ctypes.create_string_buffer(96)
    _call(library.nvmlSystemGetDriverVersion, text, ctypes.c_uint(96))
    return text.value.decode()


def _list_gpus(library: Any) -> list[tuple[str, str]]:
    count, found = ctypes.c_uint(), []
    _call(library.nvmlDeviceGetCount_v2, ctypes.byref(count))
    for i in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        major, minor = ctypes.c_int(), ctypes.c_int()
        _call(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(i), ctypes.byref(handle))
        _call(library.nvmlDeviceGetName, handle, name, ctypes.c_uint(96))
        _call(library.nvmlDeviceGetCudaComputeCapability, handle, ctypes.byref(major), ctypes.byref(minor))
        found.append((name.value.decode(), f"{major.value}.{minor.value}"))
    return found
