"""Successive halving: the best of many settings, most of which are tried on little work only.

Owns the rungs. What a setting is, and how well one does on how much work, are the caller's.

Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization" (AISTATS 2016), with rungs of fixed
sizes: each keeps the best 1 / `factor` of the settings and gives them `factor` times as much work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rung[Setting]:
    """What was tried on `size` units of work: (setting, score), the best first; equal scores in the order given."""

    size: int
    scores: tuple[tuple[Setting, float], ...]


def widths(num_settings: int, factor: int, finalists: int) -> list[int]:
    """How many settings each rung tries."""
    keep = [num_settings]
    while keep[-1] > finalists:
        keep.append(max(finalists, -(-keep[-1] // factor)))
    return keep


def successive_halving[Setting](
    settings: Sequence[Setting],
    score: Callable[[Setting, int], float],
    size: int,
    *,
    factor: int = 3,
    finalists: int = 3,
    least: int = 1,
) -> list[Rung[Setting]]:
    """Rungs, the last of which tries at most `finalists` settings on all `size` units of work; its first is the winner.

    score: (setting, units of work) -> what is to be large; -inf for a setting that can't do it. least: units of the smallest rung.

    Raises:
      ValueError: no settings, or numbers that make no rungs.
    """
    if not settings or factor < 2 or finalists < 1 or not 1 <= least <= size:
        raise ValueError(f"no rungs: {len(settings)} settings, {factor=} (>= 2), {finalists=} (>= 1), {least=} in 1 to {size=}")
    keep = widths(len(settings), factor, finalists)
    rungs, left = [], list(settings)
    for i, count in enumerate(keep):
        left = left[:count]
        work = max(least, size // factor ** (len(keep) - 1 - i))
        scored = [(setting, score(setting, work)) for setting in left]
        scored.sort(key=lambda pair: -pair[1])  # stable
        rungs.append(Rung(work, tuple(scored)))
        left = [setting for setting, _ in scored]
    return rungs
