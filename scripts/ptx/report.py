"""What ptx_check found so far, and how it comes by it: every batch of a program in every schedule."""

from __future__ import annotations

import dataclasses
import time
from typing import Any


@dataclasses.dataclass
class Report:
    """What was found so far."""

    faults: list[str] = dataclasses.field(default_factory=list)
    programs: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print(f"FAULT {text}", flush=True)


def check_program(program: Any, seeds: int, coverage: Any, report: Report) -> None:
    """Every batch of a program in every schedule."""
    from scripts.ptx.program import PtxError

    start, before = time.perf_counter(), len(report.faults)
    for run in program.runs:
        outputs = set()
        for seed in range(seeds):
            try:
                out, covered = run.run(seed)
            except PtxError as error:
                report.fault(f"{run.name}: {error}")
                break
            outputs.add(out.tobytes())
            for kernel, lines in covered.items():
                demanded = kernel in program.demanded
                coverage.add(kernel, program.kernels[kernel].program, lines, demanded=demanded)
            if seed == 0:
                for fault in run.faults(out):
                    report.fault(fault)
        if len(outputs) > 1:
            report.fault(f"{run.name}: {len(outputs)} different outputs in {seeds} schedules")
    seconds, faults = time.perf_counter() - start, len(report.faults) - before
    print(f"{program.name}: {len(program.runs)} batches, {seeds} schedules each: {faults} faults; {seconds:.1f} s", flush=True)
    result = {"name": program.name, "batches": [run.name for run in program.runs], "seeds": seeds, "faults": faults}
    report.programs.append({**result, "seconds": round(seconds, 1)})
