"""What the wheel has beside its Python: the library of the kernels for CPUs, where this machine can compile it.

Then the wheel is one of its platform (Linux on x86-64, its C library no older than the builder's); else it is pure, as
`kernels/cpu/build.py` says on stderr, and XLA computes. An editable install compiles the library into the checkout, and succeeds
without it too: pip shows nothing of a build that succeeds, so the engine warns where the library could be built and is not.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernels(BuildHookInterface):
    """hatchling's custom hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is put together. version: "standard" or "editable"."""
        spec = importlib.util.spec_from_file_location("build_cpu_kernels", Path(self.root) / "kernels/cpu/build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if version == "editable":
            try:
                module.build()
            except RuntimeError as error:
                print(f"jaxserve: no kernels for CPUs are built: {error}", file=sys.stderr)
        elif module.build():
            build_data["artifacts"].append("/kernels/cpu/libjaxserve_cpu.so.1")
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
