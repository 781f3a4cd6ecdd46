"""The history of the quick figures: a line of JSON a run, compared and drawn.

Owns what a line holds and how one is read. What is measured is scripts/figures.py's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Of provenance.versions, so that there is no host and no path; and how many processes wanted to run, over the last minute.
MACHINE = ("cpu", "cpu_cores", "platform", "python", "jax", "jaxlib", "flax", "load")


@dataclass(frozen=True)
class Line:
    """One run. date: ISO 8601, UTC. revision: of the checkout, "+" where it was changed; None outside of one. machine: MACHINE's
    values. figures: name -> number.

    Raises:
      ValueError: no figures, or one that is no finite number; no machine.
    """

    date: str
    revision: str | None
    machine: dict[str, Any]
    figures: dict[str, float]

    def __post_init__(self) -> None:
        if not isinstance(self.machine, dict) or not isinstance(self.figures, dict) or not self.figures:
            raise ValueError("a line has a machine and figures, both by name")
        for name, value in self.figures.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"figure {name!r} is no finite number: {value!r}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read(path: Path) -> tuple[list[Line], list[str]]:
    """(the lines, what could not be read of the file and why). A file that is not there has no lines. Never raises for what a file
    holds."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{path}: {error.strerror}"]
    lines, faults = [], []
    for number, each in enumerate(text.splitlines(), 1):
        try:
            lines.append(Line(**json.loads(each)))
        except (ValueError, TypeError) as error:
            faults.append(f"{path}, line {number}: {error}")
    return lines, faults


def append(path: Path, line: Line) -> None:
    """Adds a line; where the file's last one is cut, it stays as it is and ends there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * cut + line.to_json() + "\n")


def compared(line: Line, lines: Sequence[Line]) -> list[str]:
    """Each figure as text, and its ratio to that of the last line that has it. A figure of another processor is said to be one."""
    texts = []
    for name, value in line.figures.items():
        text = f"{name} {value:.4g}"
        if (before := next((old for old in reversed(lines) if name in old.figures), None)) is None:
            texts.append(f"{text}, the first of its kind")
            continue
        old = before.figures[name]
        ratio = f"{value / old:.3f} times" if old else "equal to" if value == old else "not"
        other = "" if before.machine.get("cpu") == line.machine.get("cpu") else ", on another processor"
        texts.append(f"{text}, {ratio} that of {before.date[:10]} ({before.revision}{other})")
    return texts


def draw(lines: Sequence[Line], titles: Mapping[str, str], path: Path) -> None:
    """A panel a title, its figures over the lines. titles: figure -> title. Needs matplotlib: RuntimeError without."""
    from jaxserve.cli.common.plots import figure, save

    panels = list(dict.fromkeys(titles.values()))
    made, axes = figure(-(-len(panels) // 2), 2)
    labels = [f"{line.date[5:10]}\n{(line.revision or 'none')[:7]}" for line in lines]
    for axis, title in zip(axes.flat, panels, strict=False):
        for name in (name for name, of in titles.items() if of == title):
            at = [i for i, line in enumerate(lines) if name in line.figures]
            axis.plot(at, [lines[i].figures[name] for i in at], marker="o", markersize=3, label=name)
        axis.set(title=title, ylim=(0, None), xticks=range(len(lines)))
        axis.set_xticklabels(labels, fontsize=6)
        axis.legend(fontsize=6)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    save(made, path)
