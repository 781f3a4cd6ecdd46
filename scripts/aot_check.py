"""Will this model, plan and dtype compile for a GPU, such as an H100 or an A100, and fit it? Answered without one.

    make aot-check                                                    our kernels' cases, Qwen3-0.6B, 8B and 30B-A3B, on both
    python -m scripts.aot_check --model=qwen3-0.6b --target=h100      one model, its smallest decode and largest mixed bucket
    python -m scripts.aot_check --model=FOLDER --bucket_plan=plan.json --buckets=all --max_model_len=8192
    python -m scripts.aot_check --kernels=few --target=a100,l40s,rtx4090,b200      kernels that need no Hopper GPU
    python -m scripts.aot_check --kernels=none --speculative_config='{"num_speculative_tokens": 4}'      drafting heads too
    python -m scripts.aot_check --kernels=none --model=qwen3-8b --speculative_config='{"method": "eagle3", "model": "target"}'

Runs in the environment that `make setup-aot` makes (.venv-aot: jax's CUDA plugin and ptxas, no driver). Compiles our Mosaic
kernels and the engine's own programs from shapes alone, in a process for each architecture. Faults are listed, and the exit status
is then 1:
register spills or too much shared memory in our kernels, or local memory or an emptied L1 cache in a loop of theirs; kernels that
must agree in every bit and do other float operations; a body that does not run the fast attention kernel once a layer; a body
or head that is not one CUDA graph; a copy of KV pages; more temporary memory than the plan sets aside; a pool that does not fit.
With --tensor_parallel_size also a body that does not sum over the devices twice a layer; programs are one graph with
--graph_collectives, and many without. With --pipeline_parallel_size the programs of the first stage, of one in the middle
and of the last one are held to this, each with its own layers, and the memory line says which stage bounds the pool. With
--deterministic=always also a matmul in another tile than the others, with a split K or in cuBLAS, and a sum of floats whose
operations differ between bodies, or between heads.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import run_command
from scripts.aot.compiled_report import CompiledReport, Kernel
from scripts.aot.compiler import TARGETS, Compiler, arch_of, compilers, smem_limit_of, use_no_device
from scripts.aot.roofline import Roofline, main_loop
from scripts.aot.verdicts import (
    ATTENTION,
    EXPERTS,
    FUSED_MATMUL,
    PORTABLE_ATTENTION,
    bits_faults,
    gib,
    kernel_faults,
    loop_faults,
    mib,
    variant_faults,
)

_MODELS = flags.DEFINE_list(
    "model",
    ["qwen3-0.6b"],
    "Presets of bench_models.RANDOM, or folders with a config.json, each perhaps with its own memory_fraction: "
    "qwen3-30b-a3b@0.92; empty: none.",
)
_TARGETS = flags.DEFINE_list("target", ["h100"], f"Which GPUs, of {', '.join(TARGETS)}.")
_BUCKETS = flags.DEFINE_list("buckets", [], "Buckets to compile: 8 (decode), 256x128 (mixed), or all; default: two of the plan.")
_KERNELS = flags.DEFINE_enum(
    "kernels",
    "all",
    ["none", "few", "attention", "others", "all"],
    "Which cases of our own kernels to compile too; attention: those of the attention that the target runs by itself; others: all "
    "but these.",
)
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "bfloat16", "float16", "float32"], "Of weights and activations.")
_BACKEND = flags.DEFINE_enum(
    "attention_backend",
    None,
    ["auto", "mosaic_sm90", "mosaic_portable", "xla"],
    "Which attention the step runs; default: mosaic_sm90 on Hopper, else mosaic_portable.",
)
_DEVICES = flags.DEFINE_integer("tensor_parallel_size", 1, "Devices that share a model; figures are of one of them.", lower_bound=1)
_STAGES = flags.DEFINE_integer(
    "pipeline_parallel_size",
    1,
    "Stages of a pipeline, of --tensor_parallel_size devices each: the first, one between and the last are compiled.",
    lower_bound=1,
)
_GROUPS = flags.DEFINE_integer(
    "attention_groups", 1, "As of an engine: groups in which the devices attend, each with a pool of its own.", lower_bound=1
)
_GRAPH_COLLECTIVES = flags.DEFINE_bool(
    "graph_collectives", False, "As of an engine: sums over devices are in the CUDA graphs, and a program must be one."
)
_ALL_REDUCE = flags.DEFINE_enum("all_reduce_backend", "auto", ["auto", "xla", "mosaic"], "As of an engine of several devices.")
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", None, "Most tokens of a request; default: the model's.", lower_bound=1)
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", None, "Most sequences at once (default 128).", lower_bound=1)
_BUDGET = flags.DEFINE_integer("max_num_batched_tokens", None, "Token budget of a step (default 2048).", lower_bound=1)
_PAGE_SIZE = flags.DEFINE_integer("page_size", None, "Tokens a KV page (default 64).", lower_bound=1)
_DETERMINISTIC = flags.DEFINE_enum(
    "deterministic",
    "auto",
    ["auto", "bucket", "always"],
    "As of an engine; always: matmuls and sums in one order in all buckets too.",
)
_PLAN = flags.DEFINE_string("bucket_plan", None, "A bucket plan's JSON file.")
_SPECULATION = flags.DEFINE_string(
    "speculative_config",
    None,
    'Heads that draft too, and a draft bucket: \'{"method": "ngram", "num_speculative_tokens": 4}\'. A draft\'s "model" is a '
    'preset, a folder with a config.json, or "target" for heads of its own sizes.',
)
_UTILIZATION = flags.DEFINE_float("gpu_memory_utilization", 0.9, "Share of the process's memory that the engine takes.")
_FRACTION = flags.DEFINE_float(
    "memory_fraction", 0.75, "Share of the device that the process may allocate: XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 unless set."
)
_VERBOSE = flags.DEFINE_bool("verbose", False, "List every kernel of every program, with counts and registers.")
_DUMP = flags.DEFINE_string("dump", None, "Keep XLA's and Mosaic's dumps in this new folder.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

# Of the options, what a result says.
OF_RESULT = (
    *("tensor_parallel_size", "pipeline_parallel_size", "attention_groups"),
    *("graph_collectives", "all_reduce_backend", "deterministic"),
)


def is_hopper(target: str) -> bool:
    return arch_of(target) == "sm_90a"


def describe(report: CompiledReport, num_layers: int | None = None) -> str:
    """A program in a line."""
    graph = f"{report.num_graphs} graph{'s' if report.num_graphs != 1 else ''} of {len(report.graph_commands)} commands"
    if num_layers and report.mosaic_calls:
        graph += f" ({len(report.graph_commands) / num_layers:.1f} a layer)"
    outside = ", ".join(f"{n} {kind}" for kind, n in report.outside.items()) or "nothing"
    ours = f"; {len(report.mosaic_calls)} Mosaic calls" if report.mosaic_calls else ""
    return f"{report.name}: {graph}, outside {outside}{ours}; temp {mib(report.temp_bytes)}; {report.seconds:.1f} s"


def figures(k: Kernel) -> str:
    return f"{k.registers:4d} registers {k.smem:7d} B smem  spills {k.spill_stores}/{k.spill_loads}"


def table(report: CompiledReport) -> str:
    """Every kind of command: count, name, registers, shared memory, spills; then our own kernels, which a command doesn't name."""
    rows = [f"    {count:5d} x {name:52s} {figures(k) if k else ''}".rstrip() for count, name, k in report.launches()]
    rows += [f"    Mosaic: {k.name:52s} {figures(k)}" for k in report.kernels if k.source == "mosaic"]
    return "\n".join(rows)


def check_kernels(compiler: Compiler) -> dict[str, Any]:
    """Compiles the cases of our kernels."""
    from jaxserve.execution.programs import GPU_COMPILER_OPTIONS
    from scripts.aot.kernels import few_cases, few_portable_cases, kernel_cases, portable_cases

    faults, results = [], []
    same_bits: dict[str, dict[str, Roofline]] = defaultdict(dict)
    few = _KERNELS.value == "few"
    cases = (few_portable_cases if few else portable_cases)(compiler.target)
    if is_hopper(compiler.target):
        cases = (few_cases if few else kernel_cases)(compiler.num_sms, compiler.fact("name")) + cases
    if _KERNELS.value in ("attention", "others"):
        attention = ATTENTION if is_hopper(compiler.target) else PORTABLE_ATTENTION
        cases = [case for case in cases if (attention in case.kernels) == (_KERNELS.value == "attention")]
    for case in cases:
        try:
            report = compiler.compile(case.name, case.function, case.args, options=GPU_COMPILER_OPTIONS)
        except Exception as error:  # one case's failure is a fault to list, not the end of the check
            faults.append(f"{case.name}: does not compile: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
            continue
        ours = [k for k in report.kernels if k.source == "mosaic"]
        faults += case.faults(report) + variant_faults(report, compiler.mosaic_kernels)
        faults += kernel_faults(ours, smem_limit=smem_limit_of(compiler.target), where=case.name, arch=arch_of(compiler.target))
        print(f"{case.name}: {report.seconds:.1f} s", flush=True)
        for k in ours:
            print(f"    {k.name:48s} {figures(k)}  {', '.join(k.uses)}", flush=True)
        faults += loop_faults(report.rooflines, case.name)
        for r in report.rooflines:
            print(main_loop(r), flush=True)
            if case.same_bits and r.kernel in (ATTENTION, EXPERTS, FUSED_MATMUL):
                same_bits[case.same_bits][case.name] = r
        results.append(report.as_json())
    faults += [fault for rooflines in same_bits.values() for fault in bits_faults(rooflines)]
    return {"faults": faults, "programs": results}


def check_model(name: str, memory_fraction: float, compiler: Compiler) -> dict[str, Any]:
    """Compiles one model's step and shares out the memory."""
    from scripts.aot.step import AbstractStep, check_step, read_config

    options = {
        "dtype": _DTYPE.value,
        "max_model_len": _MAX_MODEL_LEN.value,
        "max_num_seqs": _MAX_NUM_SEQS.value,
        "max_num_batched_tokens": _BUDGET.value,
        "page_size": _PAGE_SIZE.value,
        "bucket_plan": _PLAN.value,
        "gpu_memory_utilization": _UTILIZATION.value,
        "attention_backend": _BACKEND.value or ("mosaic_sm90" if is_hopper(compiler.target) else "mosaic_portable"),
        "speculative_config": _SPECULATION.value,
        "deterministic": _DETERMINISTIC.value,
        "tensor_parallel_size": _DEVICES.value,
        "pipeline_parallel_size": _STAGES.value,
        "attention_groups": _GROUPS.value,
        "graph_collectives": _GRAPH_COLLECTIVES.value,
        "all_reduce_backend": _ALL_REDUCE.value,
    }
    try:
        mesh = compiler.mesh if compiler.num_devices > 1 else None
        step = AbstractStep.make(read_config(name), options, compiler.target, memory_fraction, mesh)
        buckets = step.select(_BUCKETS.value) if _BUCKETS.value else step.default_buckets()
    except (ValueError, NotImplementedError) as error:  # the answer to the question, in the engine's own words
        return {"model": name, "faults": [str(error)], "programs": []}
    weights, backend = gib(max(stage.functions.num_bytes for stage in step.stages)), step.config.attention_backend
    print(f"-- {name} on {compiler.target}, attention on {backend}: weights {weights}, {step.config.plan}", flush=True)

    def show(report: CompiledReport, num_layers: int) -> None:
        print(describe(report, num_layers), flush=True)
        if _VERBOSE.value:
            print(table(report), flush=True)

    try:
        result = check_step(step, compiler, buckets, show)
        result.faults += [fault for report in result.reports for fault in loop_faults(report.rooflines, report.name)]
    except Exception as error:  # one model's failure is a fault to list, not the end of the check
        fault = f"does not compile: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return {"model": name, "faults": [fault], "programs": []}
    if result.fit is not None:
        print(result.fit, flush=True)
    return {
        "model": name,
        **{option: options[option] for option in OF_RESULT},
        "faults": result.faults,
        "memory": None if result.fit is None else dataclasses.asdict(result.fit),
        "num_layers": step.config.model.num_layers,
        "programs": [report.as_json() for report in result.reports],
    }


def check_target(target: str, models: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Kernels and models on one target."""
    folder = Path(_DUMP.value) / target if _DUMP.value else None
    compiler = Compiler(target, folder, _DEVICES.value * _STAGES.value, _STAGES.value)
    results = [{"target": target, **check_kernels(compiler)}] if _KERNELS.value != "none" else []
    results += [{"target": target, **check_model(*model, compiler)} for model in models]
    if not _DUMP.value:
        compiler.remove()
    return results


def in_own_process(targets: list[str]) -> list[dict[str, Any]]:
    """`check_target` of targets of one architecture, in a process of their own: what JAX keeps of a traced kernel doesn't say
    which architecture it is for. A process that ends without a result is a fault of its targets."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        arguments = [f"--target={','.join(targets)}", f"--json={path}"]
        status = subprocess.run([sys.executable, "-m", "scripts.aot_check", *sys.argv[1:], *arguments], stderr=None).returncode
        if path.exists():
            return json.loads(path.read_text())["results"]
    return [{"target": target, "faults": [f"its process ended with {status} and no result"], "programs": []} for target in targets]


def main() -> None:
    unknown = [target for target in _TARGETS.value if target not in TARGETS]
    if unknown:
        raise app.UsageError(f"--target={','.join(unknown)}: must be of {', '.join(TARGETS)}")
    use_no_device()
    from jaxserve.cli.common.provenance import provenance, write_json
    from scripts.aot.step import split_fraction

    try:
        models = [split_fraction(model, _FRACTION.value) for model in _MODELS.value]
    except ValueError as error:
        raise app.UsageError(f"--model, --memory_fraction: {error}") from None
    by_arch: dict[str, list[str]] = defaultdict(list)
    for target in _TARGETS.value:
        by_arch[arch_of(target)].append(target)
    if len(by_arch) > 1:
        results = [result for targets in by_arch.values() for result in in_own_process(targets)]
    else:
        results = [result for target in _TARGETS.value for result in check_target(target, models)]
    faults = [f"{r['target']} {r.get('model', 'kernels')}: {fault}" for r in results for fault in r["faults"]]
    write_json(_JSON.value, {"check": "aot", "results": results, "faults": faults, **compilers(), **provenance()})
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    checked = sum(len(r["programs"]) for r in results)
    print(f"aot_check: {checked} programs for {', '.join(_TARGETS.value)}: {len(faults)} faults", flush=True)
    sys.exit(1 if faults or not checked else 0)


if __name__ == "__main__":
    run_command(main)
