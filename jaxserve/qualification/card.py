"""Which card this is: what a verdict on our kernels holds for.

Owns the questions to NVIDIA's management library, which answers before JAX has taken the device and its memory.
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
from pathlib import Path
from typing import Any

import kernels

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # modules by which JAX reaches NVIDIA's GPUs


@dataclasses.dataclass(frozen=True)
class Card:
    """What the kernels' verdicts depend on; another driver or another JAX is another card. platform: as JAX calls it."""

    name: str
    compute_capability: str
    driver: str
    jax: str
    jaxlib: str
    kernels: str  # revision of their source
    platform: str = "gpu"

    @property
    def key(self) -> str:
        """A name for files."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:24]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.compute_capability}, driver {self.driver}, jax {self.jax})"


def find_card(*, ask_jax: bool) -> Card | None:
    """The GPU that JAX uses by default; None where it uses none, or where that can't be said yet.

    ask_jax: the library may have several kinds of GPU, or be missing; then JAX says which one is its own, which makes it take the
    device. Without ask_jax JAX is left alone, and such a machine has no answer.
    """
    if not may_use_gpus():
        return None
    found = {(name, capability) for name, capability in gpus()}
    if ask_jax:
        import jax

        device = jax.devices()[0]
        if device.platform != "gpu":
            return None
        if len(found) != 1:
            found = {(device.device_kind, str(getattr(device, "compute_capability", "unknown")))}
    if len(found) != 1:
        return None
    ((name, capability),) = found
    return Card(name, capability, driver_version(), *versions(), revision())


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
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
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
