"""What ptx_check ran, kept as lines of JSON, so that a run which was interrupted goes on; and what tells two runs apart."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import kernels
from scripts.ptx.compiled import Kernel
from scripts.ptx.program import Program

# Modules of the kernels that make the batches of cases, and their work lists. The rest of a kernel is in its PTX.
BATCHES = (
    *("cases.py", "reference.py"),
    *("work_list.py", "work_planner.py", "planner.py", "tiles.py", "logits.py"),
    *("layout.py", "mosaic_layout.py"),
)


class Log:
    """What was tried, as lines of JSON. A file that is there already is continued: what it has is not run again."""

    def __init__(self, path: str | None):
        self._path = Path(path) if path else None
        self._known: dict[str, dict[str, Any]] = {}
        text = self._path.read_text() if self._path and self._path.exists() else ""
        self._begun = "" if text.endswith("\n") or not text else "\n"  # behind half a line of a run that was killed
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                self._known[entry["key"]] = entry

    def find(self, key: str) -> dict[str, Any] | None:
        """What was noted of this; None if nothing."""
        return self._known.get(key)

    def add(self, key: str, **noted: Any) -> dict[str, Any]:
        """Notes it, and returns the whole entry."""
        entry = self._known[key] = {"key": key, **noted}
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(self._begun + json.dumps(entry) + "\n")
            self._begun = ""
        return entry


def text_of(program: Program) -> str:
    """Everything of a kernel's PTX that is run: neither which architecture it was compiled for, nor where its lines come from."""
    return "\n".join(
        [*(i.text for i in program.instructions), repr(sorted(program.labels.items())), repr(program.params), str(program.threads)]
    )


def digest_of(launched: dict[str, Kernel]) -> str:
    """A hash of what is launched: of each kernel its PTX, its grid and its descriptors. Equal on two architectures: one program."""
    found = [[name, text_of(kernel.program), repr(kernel.launch)] for name, kernel in sorted(launched.items())]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


@functools.cache
def batch_makers(folder: Path = Path(kernels.__file__).parent) -> str:
    """A hash of the source of what makes batches. folder: of the kernels."""
    paths = sorted(path for path in folder.rglob("*.py") if path.name in BATCHES)
    return hashlib.sha256("\0".join(path.read_text() for path in paths).encode()).hexdigest()[:16]


def interpreter(aside: Collection[str]) -> str:
    """A hash of the interpreter's source. aside: files that leave what a run finds as it is."""
    files = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name not in aside)
    return hashlib.sha256("\n".join(path.read_text() for path in files).encode()).hexdigest()[:16]
