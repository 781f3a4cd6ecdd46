"""Runs the PTX of our kernels on a CPU, without a GPU: their cases, in several schedules, against float64.

    make ptx-check                                              every case, 5 schedules
    python -m scripts.ptx_check --cases=few                     thirteen cases: a minute of a core
    python -m scripts.ptx_check --cases=gpu-mixed-8b --seeds=8
    python -m scripts.ptx_check --cases=agreements              no case: programs whose outputs must be equal in every bit
    python -m scripts.ptx_check --target=a100                   the portable kernels, as they are for sm_80
    python -m scripts.ptx_check --log=FILE                      goes on where a run with the same FILE was interrupted
    python -m scripts.ptx_check --mutations --log=FILE          takes out each synchronising instruction in turn

Runs in the environment that `make setup-aot` makes. The kernels are compiled for `--target` as `aot_check` compiles them;
scripts/ptx runs what Mosaic made. On a target that is no Hopper GPU these are the portable kernels alone. Faults are listed, and
the exit status is then 1: a value that is wrong; a race on shared memory; an access by the async proxy with no proxy fence before;
a register that is used while a wgmma has it; an mbarrier's phase that is skipped; a hang; outputs whose bits depend on the
schedule, or on the program where they must not; an instruction that is not known.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import run_command
from scripts.aot.compiler import TARGETS, Compiler, arch_of, compilers, use_no_device
from scripts.ptx.log import Log
from scripts.ptx.report import Report, check_program

_CASES = flags.DEFINE_list(
    "cases",
    ["all"],
    "all, few, agreements (only outputs that must be equal in every bit), or names of cases (kernels/*/cases.py); of the portable "
    "kernels they begin with 'portable '.",
)
_SEEDS = flags.DEFINE_integer("seeds", None, "Schedules of each batch; default: 5, or 2 with --cases=few.", lower_bound=1)
_MUTATIONS = flags.DEFINE_bool(
    "mutations", False, "Instead: take out each synchronising instruction; one that nobody misses is listed."
)
_LOG = flags.DEFINE_string("log", None, "Lines of JSON: batches in a schedule, mutations. What this file has is not run again.")
_TARGET = flags.DEFINE_enum("target", "h100", sorted(TARGETS), "Which GPU to compile for.")
_VERBOSE = flags.DEFINE_bool("verbose", False, "List every line that no case reaches, and every mutation.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")


def show_coverage(coverage: Any, *, demanded: bool, report: Report) -> dict[str, Any]:
    """Prints it; lines that no case reaches are faults where all cases ran."""
    result = {}
    for kernel, (ran, lines) in coverage.summary().items():
        missing = coverage.missing(kernel)
        print(f"{kernel}: {ran} of {lines} lines of PTX ran ({ran / max(lines, 1):.2%})", flush=True)
        for i in missing if _VERBOSE.value or demanded else []:
            print(f"    not reached: {i}", flush=True)
        if missing and demanded:
            report.fault(f"{kernel}: no case reaches {len(missing)} lines of its PTX")
        result[kernel] = {"ran": ran, "lines": lines, "not_reached": [str(i) for i in missing]}
    return result


def check_agreements(compiler: Any, *, few: bool, report: Report) -> list[dict[str, Any]]:
    """Outputs of different programs that must be equal in every bit."""
    from scripts.ptx.agreement import agreements

    found = []
    for agreement in agreements(compiler, few=few):
        programs = [output.program for output in agreement.outputs]
        print(f"equal bits, {agreement.name}: {', '.join(programs)}: {'no' if agreement.faults else 'yes'}", flush=True)
        for fault in agreement.faults:
            report.fault(fault)
        found.append({"name": agreement.name, "programs": programs, "ptx": [output.ptx for output in agreement.outputs]})
    return found


def check_mutations(compiler: Any, report: Report) -> list[dict[str, Any]]:
    """The table of mutations; a survivor without a reason is a fault."""
    from scripts.ptx import survivors

    table = []
    cases = None if _CASES.value == ["all"] else _CASES.value
    for kernel, ptx, outcomes in survivors.outcomes(compiler, cases, report.log):
        print(survivors.summary(kernel, outcomes), flush=True)
        for outcome in outcomes:
            if _VERBOSE.value and outcome.caught is None:
                print(f"    {outcome.kind}: {outcome.line}: {outcome.reason}", flush=True)
            if outcome.caught is None and outcome.reason is None:
                report.fault(f"{kernel}: nothing misses {outcome.kind}: {outcome.line}")
        table += [{"kernel": kernel, "ptx": ptx, **dataclasses.asdict(outcome)} for outcome in outcomes]
    return table


def check_cases(compiler: Any, report: Report) -> dict[str, Any]:
    """Programs, coverage, agreements."""
    from scripts.ptx.coverage import Coverage
    from scripts.ptx.suite import programs

    few, all_cases, alone = (_CASES.value == [name] for name in ("few", "all", "agreements"))
    coverage = Coverage()
    for program in programs(compiler, names=None if all_cases else _CASES.value):
        check_program(program, _SEEDS.value or (2 if few else 5), coverage, report, by_turns=few)
    lines = show_coverage(coverage, demanded=all_cases, report=report)
    agreed = check_agreements(compiler, few=few, report=report) if few or all_cases or alone else []
    return {"programs": report.programs, "coverage": lines, "equal_bits": agreed}


def main() -> None:
    use_no_device()
    from jaxserve.cli.common.provenance import provenance, write_json
    from scripts.ptx.compiled import KernelCompiler
    from scripts.ptx.suite import case_names
    from scripts.ptx.survivors import subjects

    hopper = arch_of(_TARGET.value) == "sm_90a"
    names, sets = case_names(hopper=hopper), {"all", "few", "agreements"}
    if _MUTATIONS.value:
        names, sets = list(dict.fromkeys(case for _, case in subjects(hopper=hopper))), {"all"}
    if set(_CASES.value) - sets - {*names} or len(_CASES.value) > 1 and sets & set(_CASES.value):
        raise app.UsageError(f"--cases={','.join(_CASES.value)}: must be {', '.join(sorted(sets))}, or of {', '.join(names)}")
    start, report = time.perf_counter(), Report(_TARGET.value, Log(_LOG.value))
    compiler = Compiler(_TARGET.value, disassembles=False)  # PTX is all that is read
    try:
        kernels = KernelCompiler(compiler)
        result = {"mutations": check_mutations(kernels, report)} if _MUTATIONS.value else check_cases(kernels, report)
    finally:
        compiler.remove()
    result |= {"check": "ptx", "target": _TARGET.value, "faults": report.faults, "seconds": round(time.perf_counter() - start)}
    write_json(_JSON.value, {**result, **compilers(), **provenance()})
    what = f"{len(result['mutations'])} mutations" if _MUTATIONS.value else f"{len(report.programs)} programs"
    if _CASES.value == ["agreements"]:
        what = f"{len(result['equal_bits'])} agreements"
    print(f"ptx_check: {what} for {_TARGET.value}, {result['seconds']} s: {len(report.faults)} faults", flush=True)
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    run_command(main)
