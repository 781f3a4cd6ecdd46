"""What the wheel has beside its Python: the library of the kernels for CPUs, where this machine can compile it.

Then the wheel is one of its platform (Linux on x86-64, its C library no older than the builder's); else it is pure, as
`kernels/cpu/build.py` says on stderr, and XLA computes. An editable install compiles nothing: `scripts/bootstrap.sh` does.
"""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernels(BuildHookInterface):
    """hatchling's custom hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is put together. version: "standard" or "editable"."""
        if version == "editable":
            return
        spec = importlib.util.spec_from_file_location("build_cpu_kernels", Path(self.root) / "kernels/cpu/build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if module.build():
            build_data["artifacts"].append("/kernels/cpu/libjaxserve_cpu.so.1")
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
