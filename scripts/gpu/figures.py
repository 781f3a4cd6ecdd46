"""Figures of a check on a card: recorded one by one as they come, so that a crash costs only those not yet printed; and the clock.

Owns the record (a JSON line a figure), the guard around a step of a section, and how a call is timed. Imports neither jax nor
torch: sections of both kinds use it.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RESERVE = 6.0  # seconds before the end in which nothing new is begun


class Figures:
    """Collects the figures of one section, which has `cap` seconds from now. What an earlier run left in its file is not measured
    again.

    dry_run: sections then take tiny shapes; the figures mean nothing and say so in the file's name.
    """

    def __init__(self, section: str, path: Path | None, cap: float, dry_run: bool):
        self.section, self.dry_run = section, dry_run
        self._path, self._end = path, time.perf_counter() + cap
        self.rows: list[dict[str, Any]] = [] if path is None else read_rows(path)
        self._known = {row["name"] for row in self.rows}

    @property
    def seconds_left(self) -> float:
        return self._end - time.perf_counter()

    def record(self, name: str, value: Any, unit: str = "", **details: Any) -> None:
        """One figure: printed, and appended to the section's file."""
        row = {"section": self.section, "name": name, "value": value, "unit": unit, **details}
        self.rows.append(row)
        shown = f"{value:.4g}" if isinstance(value, float) else value
        extra = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in details.items() if k != "traceback")
        print(f"[{self.section}] {name}: {shown} {unit}  {extra}".rstrip(), flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def attempt(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """function(...), or None: what it raises becomes a figure with its traceback, and so does a lack of time. A figure of this
        name that an earlier run left stands."""
        if name in self._known:
            return None
        if self.seconds_left < _RESERVE:
            self.record(name, None, "skipped", why="out of time")
            return None
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            self.record(name, None, "unsupported", why=" ".join(str(error).split())[:300])
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            self.record(name, None, "error", why=why, traceback=traceback.format_exc())
        return None

    def seconds_per_call(
        self, call: Callable[[int], Any], wait: Callable[[Any], Any], *, calls: int = 0, batches: int = 7, spend: float = 0.06
    ) -> float:
        """Median over batches of back-to-back calls with one wait at the end of each: the device's time, unless the host is slower.

        call(i) enqueues the i-th call of a batch and returns what `wait` waits for. calls: a batch's (0: as many as take `spend`
        seconds). Never a profiler's figure: that would switch CUDA graphs off.
        """
        for i in range(3):
            wait(call(i))
        if self.dry_run:
            calls, batches = 2, 2
        elif not calls:
            start = time.perf_counter()
            wait(call(0))
            calls = max(3, min(100, int(spend / (time.perf_counter() - start))))
        times = []
        for _ in range(batches):
            start = time.perf_counter()
            last = None
            for i in range(calls):
                last = call(i)
            wait(last)
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The figures of a section's file; a line that a crash cut short is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """A section's file with these figures."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def is_bad(row: dict[str, Any]) -> bool:
    """A check that did not pass, an error, or a process that did not end well."""
    return row.get("verdict") == "FAIL" or is_unfinished(row) and not is_skipped(row)


def is_skipped(row: dict[str, Any]) -> bool:
    """There was no time for it."""
    return "skipped" in (row["unit"], row["value"])


def is_unfinished(row: dict[str, Any]) -> bool:
    """It says of something that it has yet to be measured."""
    return is_skipped(row) or row["unit"] == "error" or row["name"] == "status" and row["value"] != "done"


def value_of(rows: list[dict[str, Any]], name: str) -> Any:
    """The last value recorded under a name; None if there is none."""
    return next((row["value"] for row in reversed(rows) if row["name"] == name), None)
