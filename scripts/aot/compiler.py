"""Compiles JAX programs for a GPU (sm_80 to sm_120) on a machine without one, and reports what came out.

Owns the target descriptions (scripts/gpu/targets), the ptxas that notes what it says, and the dump folders. Needs the packages of
`bootstrap.sh aot`: jax's CUDA 13 plugin, and ptxas and libdevice from nvidia's wheels. Knows nothing of the engine.

What differs on a card: XLA's autotuner can't run here, so GEMM backends, split-K and the like are its defaults; with the compiler
options of jaxserve.execution.programs the sequence of commands should be the card's own, which `gpu_check --part=engine` compares.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.aot.compiled_report import CompiledReport, Kernel, parse_hlo, parse_mosaic_smem, parse_ptxas, parse_thunks
from scripts.aot.equal_bits import read_program
from scripts.aot.machine_code import parse_sass
from scripts.aot.roofline import Roofline, roofline
from scripts.aot.verdicts import LOADING_WARPGROUPS

TARGETS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "gpu" / "targets").glob("*.txtpb"))}


def target_fact(target: str, name: str) -> str:
    """One field of a target description, as written: target_fact("h100", "core_count") is "132"."""
    match = re.search(rf"^\s*{name}: (.*)$", TARGETS[target].read_text(), re.M)
    if match is None:
        raise ValueError(f"{TARGETS[target].name} has no field {name!r}")
    return match[1].strip().strip('"')


def device_of(target: str) -> Any:
    """What our kernels must know of a target: kernels.gpu.Device."""
    from kernels import gpu

    capability = re.search(r"cuda_compute_capability \{ major: (\d+) minor: (\d+)", TARGETS[target].read_text())
    if capability is None:
        raise ValueError(f"{TARGETS[target].name} has no cuda_compute_capability {{ major: .. minor: .. }}")
    return gpu.Device(int(target_fact(target, "core_count")), target_fact(target, "name"), (int(capability[1]), int(capability[2])))


def arch_of(target: str) -> str:
    """The architecture that Mosaic compiles for: from 9.0 on with what only this one has."""
    major, minor = device_of(target).capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def smem_limit_of(target: str) -> int:
    """Bytes of shared memory that a block may opt in to."""
    return int(target_fact(target, "shared_memory_per_block_optin"))


def target_of(device_kind: str) -> str:
    """The target that JAX names so. ValueError for a device that none describes."""
    kinds = {target_fact(target, "name"): target for target in TARGETS}
    if device_kind not in kinds:
        raise ValueError(f"{device_kind=} has no description in scripts/gpu/targets; there are {', '.join(kinds)}")
    return kinds[device_kind]


def use_no_device() -> None:
    """Call before jax is imported: its plugin then compiles for CUDA and looks for no driver."""
    os.environ["JAX_PLATFORMS"] = "cpu"


def find_cuda() -> Path:
    """The folder of ptxas and libdevice. FileNotFoundError names what to install."""
    from jax._src import lib

    candidates = [lib.cuda_path, os.environ.get("CUDA_ROOT"), "/usr/local/cuda"]
    for path in candidates:
        if path and (Path(path) / "bin/ptxas").exists():
            return Path(path)
    raise FileNotFoundError("no ptxas: run this in the environment that `make setup-aot` makes (it has nvidia-cuda-nvcc)")


def compilers() -> dict[str, str]:
    """Versions of the packages that compile for the GPU: XLA's and Mosaic's plugin, ptxas. One that is not there is left out."""
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    return {
        name: installed[name] for name in ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm") if name in installed
    }


def make_noting_cuda(root: Path, log: Path, *, disassembles: bool = True) -> None:
    """A CUDA folder whose ptxas writes the `-v` output of every call to a file of `log`, what it was
    given beside it, and is otherwise the real one. disassembles: if not, its nvdisasm says nothing."""
    real = find_cuda()
    (root / "bin").mkdir(parents=True)
    log.mkdir(parents=True)
    (root / "nvvm").symlink_to(real / "nvvm")
    for tool in ("nvlink", "fatbinary"):
        if (real / "bin" / tool).exists():
            (root / "bin" / tool).symlink_to(real / "bin" / tool)
    if not (real / "bin/nvdisasm").exists():
        raise FileNotFoundError(f"no nvdisasm in {real / 'bin'}, which Mosaic calls: run `make setup-aot`")
    if disassembles:
        (root / "bin/nvdisasm").symlink_to(real / "bin/nvdisasm")
    else:
        _write_script(root / "bin/nvdisasm", "#!/bin/sh\n")
    _write_script(
        root / "bin/ptxas",
        "#!/bin/bash\n"
        f"real='{real}/bin/ptxas'\n"
        'case "$1" in -*) exec "$real" "$@" ;; esac\n'  # asked for its version
        f"note=$(mktemp '{log}/XXXXXXXX')\n"
        'cp "$1" "$note.ptx"\n'
        '"$real" "$@" -v 2>"$note"\n'
        "status=$?\n"
        'cat "$note" >&2\n'
        'mv "$note" "$note.log"\n'
        "exit $status\n",
    )


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Compiler:
    """Compiles for one target, or for `num_devices` such that are joined by NVLink, in `num_stages` groups of as many; everything
    it dumps lies in `folder`, which outlives it. disassembles: whether Mosaic's machine code is dumped as text too."""

    def __init__(
        self,
        target: str = "h100",
        folder: Path | None = None,
        num_devices: int = 1,
        num_stages: int = 1,
        *,
        disassembles: bool = True,
    ):
        if target not in TARGETS:
            raise ValueError(f"{target=} must be one of {', '.join(TARGETS)}")
        self.target = target
        self.num_devices = num_devices
        self.num_stages = num_stages
        self.folder = folder or Path(tempfile.mkdtemp(prefix="jaxserve-aot-"))
        self.mosaic_kernels: list[Kernel] = []  # of all programs so far: a kernel is compiled once a process
        make_noting_cuda(self.folder / "cuda", self.folder / "ptxas", disassembles=disassembles)
        self.mosaic = self.folder / "mosaic"
        self.mosaic.mkdir()
        self._read: set[Path] = set()

    def fact(self, name: str) -> str:
        """One field of the target's description, as written."""
        return target_fact(self.target, name)

    @property
    def num_sms(self) -> int:
        return int(self.fact("core_count"))

    def remove(self) -> None:
        """Deletes the dumps."""
        shutil.rmtree(self.folder)

    @functools.cached_property
    def mesh(self) -> Any:
        """A mesh of such devices, which do not exist; of a pipeline with an axis "pp" before "tp"."""
        import jax
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import AxisType, Mesh

        jax.devices()  # registers the plugins
        config = TARGETS[self.target].read_text()
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=f"1x1x{self.num_devices}", target_config=config
        )
        devices, axes = np.array(topology.devices), ("tp",)
        if self.num_stages > 1:
            devices, axes = devices.reshape(self.num_stages, -1), ("pp", "tp")
        return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))

    def compile(
        self,
        name: str,
        function: Callable,
        args: Sequence[Any],
        *,
        donate: tuple[int, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> CompiledReport:
        """Compiles function(*args), args being ShapeDtypeStructs in any pytree; without a sharding every device has them whole.
        Those with a sharding share one mesh, for which it is compiled. Whatever the compiler raises passes."""
        start = time.perf_counter()
        return self.finish(name, self.lower(function, args, donate=donate), options=options, start=start)

    def lower(self, function: Callable, args: Sequence[Any], *, donate: tuple[int, ...] = ()) -> Any:
        """function(*args) traced and lowered for the target: jax's Lowered."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        from kernels import gpu

        # Now, because importing Mosaic sets the last of them.
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(self.mosaic)
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        os.environ["MOSAIC_GPU_DUMP_SASS_CTRL"] = "1"
        os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(self.folder / "cuda")
        mesh = next((x.sharding.mesh for x in jax.tree.leaves(tuple(args)) if x.sharding is not None), self.mesh)
        sharding = NamedSharding(mesh, PartitionSpec())
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or sharding), tuple(args))
        # The mesh is how Pallas learns what it compiles for, the SMs how our own kernels do.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), gpu.assume(device_of(self.target)):
            return jax.jit(function, donate_argnums=donate).trace(*args).lower(lowering_platforms=("cuda",))

    def build(self, lowered: Any, *, options: Mapping[str, Any] | None = None) -> tuple[Any, Path]:
        """Compiles what `lower` made, and reports nothing: jax's Compiled, and the folder of XLA's dump."""
        number = f"{len(list(self.folder.glob('hlo-*'))):03d}"
        dump = self.folder / f"hlo-{number}"
        dump.mkdir()
        compiled = lowered.compile(
            compiler_options={
                **(options or {}),
                "xla_gpu_cuda_data_dir": str(self.folder / "cuda"),
                "xla_dump_to": str(dump),
                "xla_dump_hlo_as_text": True,
            }
        )
        return compiled, dump

    def finish(
        self, name: str, lowered: Any, *, options: Mapping[str, Any] | None = None, start: float | None = None
    ) -> CompiledReport:
        """Compiles what `lower` made. start: when the work on it began, for the report's seconds."""
        start = time.perf_counter() if start is None else start
        compiled, dump = self.build(lowered, options=options)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None
        order = read_program(text, (path.read_text() for path in self._new_ptx()))
        kernels, rooflines = self._new_kernels()
        return CompiledReport(
            name=name,
            thunks=parse_thunks(thunk_text(dump)),
            instructions=parse_hlo(text),
            kernels=kernels,
            rooflines=rooflines,
            order=order,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            seconds=time.perf_counter() - start,
        )

    def _new_ptx(self) -> list[Path]:
        """What ptxas was given by XLA since the last call of _new_kernels."""
        return [path.with_suffix(".ptx") for path in sorted((self.folder / "ptxas").glob("*.log")) if path not in self._read]

    def _new_kernels(self) -> tuple[list[Kernel], list[Roofline]]:
        """What ptxas said since the last call, each kernel once; and the loops of Mosaic's."""
        kernels, rooflines = [], []
        for path in sorted((self.folder / "ptxas").glob("*.log")):
            if path not in self._read:
                self._read.add(path)
                kernels += parse_ptxas(path.read_text(), "xla")
        for path in sorted(self.mosaic.glob("*.ptxas")):
            if path not in self._read:
                self._read.add(path)
                smem = parse_mosaic_smem(path.with_suffix(".resources.txt").read_text())
                mosaic = parse_ptxas(path.read_text(), "mosaic", smem, path.with_suffix(".ptx").read_text())
                self.mosaic_kernels += mosaic
                kernels += mosaic
                (kernel,) = mosaic
                computing = kernel.warpgroups - LOADING_WARPGROUPS.get(kernel.name, 0)
                code = parse_sass(path.with_suffix(".sass_ctrl").read_text())
                rooflines.append(roofline(kernel.name, code, computing * kernel.blocks_per_sm))
        return list(dict.fromkeys(kernels)), rooflines


def thunk_text(dump: Path) -> str:
    """The thunk sequence of the module that was compiled. FileNotFoundError if XLA dumped none."""
    files = sorted(dump.glob("*thunk_sequence_after_thunk_passes.txt")) or sorted(dump.glob("*thunk_sequence.txt"))
    if not files:
        raise FileNotFoundError(f"XLA left no thunk sequence in {dump}; the dump's names have changed")
    return max(files, key=lambda path: path.stat().st_size).read_text()
