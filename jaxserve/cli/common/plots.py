"""The plots of benchmarks and tuning, as PNG files. Needs matplotlib (pip install '.[plots]'), imported when a plot is drawn."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.lazy_names import Late

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")  # the commands' --help reads CAN_PLOT


INSTALL = "plots need matplotlib: pip install -c constraints/jax.txt -e '.[plots]'"


def figure(num_rows: int = 1, num_columns: int = 1) -> tuple[Any, Any]:
    """(figure, axes). RuntimeError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  (optional)
    except ImportError:
        raise RuntimeError(INSTALL) from None
    made = Figure(figsize=(6 * num_columns, 3.6 * num_rows), dpi=120, layout="constrained")
    return made, made.subplots(num_rows, num_columns, squeeze=False)


def can_plot(path: str | None) -> bool:
    """Whether a plot that a flag asks for, if it does, can be drawn here: known before what it shows is measured."""
    return path is None or importlib.util.find_spec("matplotlib") is not None


CAN_PLOT = can_plot, INSTALL  # a flag's validator, and what it says


def save(made: Any, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path)


def latency_throughput(results: Sequence[Mapping[str, Any]], path: str | Path, title: str) -> None:
    """Curves over request rates: two metrics, TTFT and TPOT where they were asked for, against output throughput; of each its
    median and its highest percentile. ValueError if no metric was."""
    order = sorted(results, key=lambda r: r["output_throughput"])
    metrics = [m for m in ("ttft", "tpot", "itl", "e2el") if all(r.get(f"median_{m}_ms") is not None for r in order)][:2]
    if not metrics:
        raise ValueError("no metric of the results can be drawn over their rates; ask for ttft, tpot, itl or e2el")
    made, axes = figure(1, len(metrics))
    x = [r["output_throughput"] for r in order]
    for axis, metric in zip(axes[0], metrics, strict=True):
        asked = [m[1] for name in order[0] if (m := re.fullmatch(rf"p([\d.]+)_{metric}_ms", name))]
        for name in ("median", *(f"p{p}" for p in sorted(asked, key=float)[-1:])):
            axis.plot(x, [r[f"{name}_{metric}_ms"] for r in order], marker="o", label=name)
        for r in order:
            axis.annotate(f"{r['request_rate']:g}/s", (r["output_throughput"], r[f"median_{metric}_ms"]), fontsize=7)
        axis.set(xlabel="output tokens a second", ylabel=f"{metric.upper()} (ms)", yscale="log", title=f"{title}: {metric.upper()}")
        axis.legend()
    save(made, path)


def step_timeline(
    steps: np.ndarray,  # f64[m, 4]: beginning and end in seconds, prompt tokens, output tokens
    path: str | Path,
    title: str,
    seconds: float = 20.0,
) -> None:
    """Each call's duration over time, the prompt tokens of the step that it waited for as colour, for `seconds` in the middle of
    the run: decodes that stall behind a prompt stand out. Time between calls, with nothing to serve, is no step's."""
    middle = steps[len(steps) // 2, 1]
    shown = steps[(steps[:, 1] >= middle - seconds / 2) & (steps[:, 1] <= middle + seconds / 2)]
    made, axes = figure(2, 1)
    begins, ends, num_prompt, num_output = shown.T
    dots = axes[0][0].scatter(ends, 1e3 * (ends - begins), c=num_prompt, s=8, cmap="viridis")
    made.colorbar(dots, ax=axes[0][0], label="prompt tokens of the step waited for")
    axes[0][0].set(xlabel="time (s)", ylabel="step (ms)", title=f"{title}: steps")
    axes[1][0].step(ends, num_output, where="post", linewidth=0.8)
    axes[1][0].set(xlabel="time (s)", ylabel="output tokens a step")
    save(made, path)


def plan_comparison(
    demand_tokens: np.ndarray,  # i64[steps]
    plans: Mapping[str, Mapping[str, Any]],  # by name: tokens (bucket sizes), padding_share, seconds, measured_seconds or None
    path: str | Path,
    title: str,
    seconds_of: str = "time to serve",
) -> None:
    """What steps ask for with each plan's buckets, padding, and times. seconds_of: what the seconds are."""
    made, axes = figure(1, 3)
    axes[0][0].hist(demand_tokens, bins=np.geomspace(1, max(2, demand_tokens.max()), 60).tolist(), color="0.7")
    for i, (name, plan) in enumerate(plans.items()):
        for j, tokens in enumerate(plan["tokens"]):
            axes[0][0].axvline(
                tokens, color=f"C{i}", linewidth=1, ymin=0.33 * i, ymax=0.33 * i + 0.3, label=name if not j else None
            )
    axes[0][0].set(xscale="log", xlabel="tokens of a step", ylabel="steps", title="demand and buckets")
    made.suptitle(title)
    axes[0][0].legend(fontsize=7)
    names = list(plans)
    axes[0][1].bar(names, [100 * plans[n]["padding_share"] for n in names], color=[f"C{i}" for i in range(len(names))])
    axes[0][1].set(ylabel="padding (% of tokens run)", xlabel="plan", title="padding")
    x = np.arange(len(names))
    axes[0][2].bar(x - 0.2, [plans[n]["seconds"] for n in names], 0.4, label="predicted", color="0.4")
    measured = [plans[n].get("measured_seconds") for n in names]
    if any(m is not None for m in measured):
        axes[0][2].bar(x + 0.2, [m or 0.0 for m in measured], 0.4, label="measured", color="0.7")
    axes[0][2].set(xticks=x, xticklabels=names, ylabel=f"{seconds_of} (s)", xlabel="plan", title=seconds_of)
    made.legend(*axes[0][2].get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=7)
    save(made, path)


def budgets(rows: Sequence[Mapping[str, float]], objective_ms: float, path: str | Path, title: str) -> None:
    """Time between tokens and throughput against the token budget."""
    made, axes = figure(1, 2)
    x = [r["budget"] for r in rows]
    axes[0][0].plot(x, [r["gap_ms"] for r in rows], marker="o")
    axes[0][0].axhline(objective_ms, color="C3", linestyle="--", label="objective")
    axes[0][0].set(
        xlabel="token budget (tokens a step)", ylabel="time between tokens at the quantile (ms)", title=title, xscale="log"
    )
    axes[0][0].legend()
    axes[0][1].plot(x, [r["mean_ttft_ms"] for r in rows], marker="o")
    axes[0][1].set(xlabel="token budget (tokens a step)", ylabel="mean TTFT (ms)", xscale="log", yscale="log")
    save(made, path)


def capacities(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str) -> None:
    """Bars of capacity (mean; half_width, where it is not nan) by objective (slo_ms), a colour a policy."""
    made, axes = figure()
    axis, objectives, policies = axes[0][0], sorted({r["slo_ms"] for r in rows}), list(dict.fromkeys(r["policy"] for r in rows))
    width = 0.8 / len(policies)
    for i, policy in enumerate(policies):
        ours = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["slo_ms"])
        at = np.arange(len(ours)) + (i - (len(policies) - 1) / 2) * width
        errors = [r["half_width"] for r in ours]
        given = {} if np.isnan(errors).all() else {"yerr": errors, "capsize": 2}
        axis.bar(at, [r["mean"] for r in ours], width, label=policy, **given)
    axis.set(xticks=range(len(objectives)), xticklabels=[f"{ms:g} ms" for ms in objectives], title=title)
    axis.set(xlabel="objective for the P99 time between tokens", ylabel="capacity (requests a second)")
    axis.legend(fontsize=7)
    save(made, path)


def policies(results: Mapping[str, Mapping[str, Mapping[str, float]]], metrics: Sequence[str], path: str | Path) -> None:
    """A panel a metric: bars by case, a colour a setting. results: {case: {setting: {metric: value}}}."""
    made, axes = figure(1, len(metrics))
    names = list(next(iter(results.values())))
    for axis, metric in zip(axes[0], metrics, strict=True):
        for i, name in enumerate(names):
            at = np.arange(len(results)) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
            axis.bar(at, [found[name][metric] for found in results.values()], 0.8 / len(names), label=name)
        axis.set(xticks=range(len(results)), xlabel="workload, most requests at a time", ylabel=metric, title=metric)
        axis.set_xticklabels(list(results), rotation=20, fontsize=7)
        axis.legend(fontsize=7)
    save(made, path)
