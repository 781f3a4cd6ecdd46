"""What a card is asked: a plan of units, each a backend of a kernel on one list of batches, and the verdicts on them.

Owns the order, which is that of "auto": the preferred backend first, and the next one only where it failed. Imports the standard
library and the table of backends, so that who asks needs no jax.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from kernels.backends import ATTENTION, FUSED_MATMUL, GROUPED_MATMUL, ROTARY_WRITE, Backend, Backends

TABLES: dict[str, Backends] = {
    "attention": ATTENTION,
    "rotary_write": ROTARY_WRITE,
    "fused_matmul": FUSED_MATMUL,
    "grouped_matmul": GROUPED_MATMUL,
}

PASSED = "passed"
NOT_MEANT = "not meant"  # the backend lacks something for this device or these shapes: "auto" passes it over by itself
WRONG, DIFFERS, UNCOMPILED, ERROR = "wrong values", "bits differ", "does not compile", "error"
CRASHED, HUNG = "crashed", "hung"  # only who watches the process can say these
NO_MEMORY, NOT_TRIED = "no memory", "not tried"  # says nothing of the kernel, and is not kept
FAILED = (WRONG, DIFFERS, UNCOMPILED, ERROR, CRASHED, HUNG)
KEPT = (PASSED, NOT_MEANT, *FAILED)


@dataclasses.dataclass(frozen=True)
class Unit:
    """A backend of a kernel, on the batches that every card is asked, or on those of one model's shapes."""

    kernel: str  # of TABLES
    backend: str
    shapes: Mapping[str, Any] | None = None  # as the kernel's own module reads them; None: the batches that every card is asked

    @property
    def name(self) -> str:
        """By which verdicts know it."""
        own = "" if self.shapes is None else " " + " ".join(f"{k}={_plain(v)}" for k, v in sorted(self.shapes.items()))
        return f"{self.kernel} {self.backend}{own}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a unit. reason: what failed where, or what the backend lacks. seconds: it took."""

    kernel: str
    backend: str
    result: str  # one of KEPT, NO_MEMORY or NOT_TRIED
    reason: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.result in FAILED

    def __str__(self) -> str:
        return f"{self.kernel} {self.backend}: {self.result}" + (f" ({self.reason})" if self.reason else "")


Verdicts = Mapping[str, Verdict]  # by the unit's name


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is wanted of one kernel: the backend as the user named it, and the shapes of the model that will run."""

    backend: str = "auto"
    shapes: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to try.

    asks: by kernel, of TABLES. platform: JAX's, on which "auto" chooses. every: also the backends that "auto" would not come to.
    small: batches that an interpreter runs in seconds. interpreted: kernels run in Pallas' interpreter.
    """

    asks: Mapping[str, Ask]
    platform: str = "gpu"
    every: bool = False
    small: bool = False
    interpreted: bool = False

    def to_json(self, known: Verdicts) -> str:
        """One line, with the verdicts that are there already."""
        return json.dumps(dataclasses.asdict(self) | {"known": {name: dataclasses.asdict(v) for name, v in known.items()}})

    @classmethod
    def from_json(cls, text: str) -> tuple[Plan, dict[str, Verdict]]:
        """The plan and the verdicts that `to_json` wrote."""
        read = json.loads(text)
        known = {name: Verdict(**verdict) for name, verdict in read.pop("known").items()}
        return cls(**read | {"asks": {kernel: Ask(**ask) for kernel, ask in read["asks"].items()}}), known

    def next_unit(self, verdicts: Verdicts) -> Unit | None:
        """The first unit that has no verdict and is needed; None where nothing is left to try."""
        for kernel in self.asks:
            for row in self.rows(kernel):
                unit = self._first_not_passed(kernel, row, verdicts)
                if unit is not None and unit.name not in verdicts:
                    return unit
                if unit is None and not self.every:
                    break
        return None

    def _first_not_passed(self, kernel: str, row: Backend, verdicts: Verdicts) -> Unit | None:
        """The first of a backend's units that failed or has no verdict; those after it are not needed. None: it has passed."""
        return next((u for u in self.units(kernel, row) if u.name not in verdicts or verdicts[u.name].result != PASSED), None)

    def rows(self, kernel: str) -> Iterator[Backend]:
        """The backends that may be tried, the preferred one first: those of "auto" before the first that is plain XLA, or the one
        that the user named."""
        table, name = TABLES[kernel], self.asks[kernel].backend
        for row in table.automatic(self.platform) if name == "auto" else [table[name]]:
            if row.plain_xla:
                return
            if not row.for_host:
                yield row

    def units(self, kernel: str, row: Backend) -> Iterator[Unit]:
        """What a backend must pass."""
        yield Unit(kernel, row.name)
        shapes = self.asks[kernel].shapes
        if shapes is not None:
            yield Unit(kernel, row.name, shapes)

    @property
    def all_units(self) -> list[Unit]:
        """Of all kernels and backends, in the order in which they are tried."""
        return [unit for kernel in self.asks for row in self.rows(kernel) for unit in self.units(kernel, row)]

    def left_out(self, kernel: str, verdicts: Verdicts) -> dict[str, str]:
        """Backends that "auto" must not take, and why: those that failed, and before it comes to one that has passed, those that
        could not be tried. Not those that say themselves what they lack."""
        found: dict[str, str] = {}
        has_passed = False
        for row in self.rows(kernel):
            unit = self._first_not_passed(kernel, row, verdicts)
            if unit is None:
                has_passed = True
                continue
            why = verdicts.get(unit.name, Verdict(kernel, row.name, NOT_TRIED))
            if why.failed or why.result != NOT_MEANT and not has_passed:
                found[row.name] = why.result + (f": {why.reason}" if why.reason else "")
        return found

    def passed(self, kernel: str, verdicts: Verdicts) -> list[str]:
        """Backends that have passed all of their units."""
        return [row.name for row in self.rows(kernel) if self._first_not_passed(kernel, row, verdicts) is None]


def _plain(value: Any) -> str:
    """Of a JSON value, tuples as lists, with no spaces."""
    return json.dumps(value, separators=(",", ":")).replace('"', "")
