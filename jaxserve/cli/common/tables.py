"""Markdown of a reproduction: tables, and whether ours agrees with what was published. Knows nothing of what is compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; floats with three digits."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(text(cell) for cell in line) + " |" for line in lines) + "\n"


def text(cell: Any) -> str:
    if cell is None:
        return "none given"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def agreement(published: float | None, ours: float | None) -> str:
    """Of two ratios: "agrees" where ours is above 1 by what the published one is, within a quarter; "same sign" where both lie on
    one side of 1; else "contradicts". Ours is None where a capacity is 0: "no rate". Nothing published: ""."""
    if published is None:
        return ""
    if ours is None:
        return "no rate"
    if abs(ours - published) <= 0.25 * abs(published - 1):
        return "agrees"
    return "same sign" if (ours > 1) == (published > 1) else "contradicts"
