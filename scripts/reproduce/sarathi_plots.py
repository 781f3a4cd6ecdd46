"""The plots of reproduce_sarathi."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.cli.common.plots import figure, save


def lines(
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    path: str | Path,
    xlabel: str,
    ylabel: str,
    title: str,
    *,
    log: bool = False,
) -> None:
    """Curves over one x; log: both axes. Where few points are measured, they are what the x axis is marked at."""
    made, axes = figure()
    for name, y in curves.items():
        axes[0][0].plot(x, y, marker="o" if len(x) < 20 else None, markersize=3, label=name)
    axes[0][0].set(xlabel=xlabel, ylabel=ylabel, title=title)
    if log:
        axes[0][0].set(xscale="log", yscale="log")
    if log and len(x) < 10:
        axes[0][0].set_xticks(x, [f"{value:g}" for value in x])
        axes[0][0].set_xticks([], minor=True)
    axes[0][0].legend(fontsize=7)
    save(made, path)


def bars(panels: Mapping[str, Mapping[str, Mapping[str, Any]]], path: str | Path, ylabel: str) -> None:
    """A panel each: groups of bars, {panel: {group: {bar: Spread}}}, with 95% intervals where there are any."""
    made, axes = figure(-(-len(panels) // 2), min(2, len(panels)))
    for axis, (title, groups) in zip(axes.flat, panels.items(), strict=False):
        names = list(dict.fromkeys(name for group in groups.values() for name in group))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            at = [j + (i - (len(names) - 1) / 2) * width for j, group in enumerate(groups.values()) if name in group]
            spreads = [group[name] for group in groups.values() if name in group]
            errors = [s.half_width for s in spreads]
            given = {} if np.isnan(errors).all() else {"yerr": errors, "capsize": 2}
            axis.bar(at, [s.mean for s in spreads], width, label=name, **given)
        axis.set(xticks=range(len(groups)), xticklabels=list(groups), xlabel="objective", ylabel=ylabel, title=title)
        axis.legend(fontsize=7)
    save(made, path)


def stall_timeline(runs: Mapping[str, Any], path: str | Path, title: str, seconds: float = 60.0) -> None:
    """Output tokens over time of each Replay, for `seconds` in the middle of its arrivals: a stall is a flat piece."""
    made, axes = figure()
    for name, run in runs.items():
        ends, middle = run.starts + run.seconds, run.times.arrivals.max() / 2
        shown = (ends >= middle) & (ends <= middle + seconds)
        axes[0][0].step(ends[shown] - middle, run.demands.samples[shown].cumsum(), where="post", label=name, linewidth=1)
    axes[0][0].set(xlabel="time (s)", ylabel="output tokens", title=title)
    axes[0][0].legend()
    save(made, path)
