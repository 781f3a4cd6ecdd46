"""What ptx_check found so far, and how it comes by it: every batch of a program in every schedule."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from typing import Any

import numpy as np

from scripts.ptx.log import Log, batch_makers, digest_of, interpreter
from scripts.ptx.machine import SCHEDULES
from scripts.ptx.program import PtxError

# Files of this package that leave what a batch's run finds as it is.
_ASIDE = {"survivors.py", "agreement.py", "contraction.py", "coverage.py", "mutations.py", "trial.py", "suite.py"}


@dataclasses.dataclass
class Report:
    """What was found so far. target: which GPU the programs are compiled for. log: what has run, here or in a run before."""

    target: str = ""
    log: Log = dataclasses.field(default_factory=lambda: Log(None))
    faults: list[str] = dataclasses.field(default_factory=list)
    programs: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print(f"FAULT {text}", flush=True)


def check_program(program: Any, seeds: int, coverage: Any, report: Report, *, by_turns: bool = False) -> None:
    """Every batch of a program in so many schedules. by_turns: but for the first one each in one alone, of all kinds by turns. What
    the report's log has of the same PTX is not run again."""
    before, ran = len(report.faults), []
    for i, run in enumerate(program.runs):
        outputs, chosen = set(), [i % len(SCHEDULES)] if by_turns and i else range(seeds)
        for seed in chosen:
            entry = _entry(program, run, seed, report, looks=seed == chosen[0])
            ran.append(entry)
            for fault in entry["faults"]:
                report.fault(fault)
            if entry["output"] is None:
                break
            outputs.add(entry["output"])
            for kernel, lines in entry["lines"].items():
                demanded = kernel in program.demanded
                coverage.add(kernel, program.kernels[kernel].program, _unpacked(lines), demanded=demanded)
        if len(outputs) > 1:
            report.fault(f"{run.name}: {len(outputs)} different outputs in {seeds} schedules")
    seconds, faults = sum(entry["seconds"] for entry in ran), len(report.faults) - before
    targets = sorted({entry["target"] for entry in ran})
    where = f" (the same PTX, for {', '.join(targets)})" if targets != [report.target] else ""
    how = f"{len(ran)} runs" if by_turns else f"{seeds} schedules each"
    print(f"{program.name}: {len(program.runs)} batches, {how}: {faults} faults; {seconds:.1f} s{where}", flush=True)
    result = {"name": program.name, "batches": [run.name for run in program.runs], "seeds": seeds, "by_turns": by_turns}
    result |= {"faults": faults}
    report.programs.append({**result, "ptx": digest_of(program.kernels), "ran_for": targets, "seconds": round(seconds, 1)})


def _entry(program: Any, run: Any, seed: int, report: Report, *, looks: bool) -> dict[str, Any]:
    """One batch in one schedule: what is wrong, a hash of the output (None: it came to no end), the lines of each kernel that ran.
    looks: at values, which is done in a batch's first schedule: others must have the same bits."""
    what = [
        batch_makers(),
        interpreter(_ASIDE),
        digest_of(program.kernels),
        run.name,
        seed,
        *(["values"] if looks and seed else []),
    ]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
    if (entry := report.log.find(key)) is not None:
        return entry
    start, output, lines = time.perf_counter(), None, {}
    try:
        out, covered = run.run(seed)
    except PtxError as error:
        faults = [f"{run.name}: {error}"]
    else:
        faults, output = run.faults(out) if looks else [], hashlib.sha256(out.tobytes()).hexdigest()
        lines = {kernel: _packed(reached) for kernel, reached in covered.items()}
    seconds = round(time.perf_counter() - start, 2)
    noted = {"batch": run.name, "seed": seed, "target": report.target, "faults": faults, "output": output, "lines": lines}
    return report.log.add(key, **noted, seconds=seconds)


def _packed(reached: np.ndarray) -> list[Any]:
    """bool[n] as (n, hexadecimal)."""
    return [len(reached), np.packbits(reached).tobytes().hex()]


def _unpacked(lines: list[Any]) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(lines[1]), np.uint8), count=lines[0]).astype(bool)
