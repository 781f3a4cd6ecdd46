"""What scripts.bench_ray makes of processes and rounds: the memory of a server's processes, medians and what is more than plain."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from pathlib import Path

FIGURES = ("start_seconds", "request_ms", "p90_request_ms", "memory_mib")


def processes_of(pid: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for above in found:
        found += parents.get(above, [])
    return found


def memory_of(pids: list[int]) -> int:
    """Bytes: the sum of these processes' proportional set sizes. Those that have ended count nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(2**10 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def summary(rounds: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of the rounds of each server, and what it has more than the plain one."""
    found = {name: {f: statistics.median(r[f] for r in of) for f in FIGURES} for name, of in rounds.items()}
    plain = found.get("plain")
    if plain is None:
        return found
    return {name: row | {f"more_{f}": row[f] - plain[f] for f in FIGURES} for name, row in found.items()}
