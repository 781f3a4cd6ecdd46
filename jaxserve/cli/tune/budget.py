r"""The largest token budget that keeps the time between tokens within an objective.

    jaxserve tune budget --step_times=steps.json --workload=trace --dataset_path=trace.csv.gz --request_rate=2 \
        --tbt_slo_ms=80 --json=budget.json

Each budget is served in virtual time by the real scheduler; the largest whose --quantile of the time between tokens meets
--tbt_slo_ms wins. Budgets are the plan's own sizes, since any other runs in a larger bucket than it fills: --budgets tries others,
and says what they pay for. --dynamic compares the best fixed budget with a dynamic one (the engine's options tbt_slo_ms and
step_times) over several seeds of arrivals; --measure serves the workload on a real engine with the budget chosen, and says whether
the objective holds there. --table writes what was found as Markdown.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import replace
from typing import Any

from absl import flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.plots import CAN_PLOT
from jaxserve.cli.common.provenance import provenance, write_json, write_text
from jaxserve.cli.common.simulated_machine import RATE, measure, plan_for, planning, read_machine
from jaxserve.cli.common.tables import table as markdown
from jaxserve.cli.common.traffic_flags import read_traffic

_QUANTILE = flags.DEFINE_float("quantile", 0.99, "Of the time between tokens, which must meet the objective.", 0.0, 1.0)
_BUDGETS = flags.DEFINE_list("budgets", [], "Budgets to try; by default the plan's mixed sizes above max_num_seqs.")
flags.register_validator("budgets", lambda given: all(b.isdecimal() and int(b) for b in given), "must be numbers, 1 or more")
_DYNAMIC = flags.DEFINE_integer("dynamic", 0, "Compare with a dynamic budget over so many seeds of arrivals.", lower_bound=0)
_MEASURE = flags.DEFINE_bool("measure", False, "Serve the workload on a real engine with the budget chosen.")
_PLOT = flags.DEFINE_string("plot", None, "Draw time between tokens and TTFT over budgets to this PNG.")
flags.register_validator("plot", *CAN_PLOT)
_TABLE = flags.DEFINE_string("table", None, "Write budgets, and fixed beside dynamic ones, as Markdown tables to this file.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="tiny-qwen3")


def row_of(choice: Any) -> dict[str, float]:
    """What is reported of a budget."""
    summary = choice.replay.times.summary(percentiles=(99,))
    names = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "output_throughput", "mean_e2el_ms")
    return {"budget": choice.budget, "gap_ms": 1e3 * choice.gap, **{name: summary[name] for name in names}}


def quantisation(machine: Any, plan: Any, budgets: list[int], kv_tokens: float) -> list[str]:
    """What budgets that are no bucket's size pay for: full steps run in a larger bucket."""
    from jaxserve.simulation.tuning import padded_budget, step_seconds

    notes, seqs = [], machine.limits.max_num_seqs
    decodes = seqs // 2
    for budget in budgets:
        padded = padded_budget(plan, budget, seqs)
        if padded > budget:
            now, full = (1e3 * step_seconds(machine, plan, t, decodes, int(decodes * kv_tokens)) for t in (budget, padded))
            notes.append(
                f"budget {budget} runs in the bucket of {padded}: {now:.1f} ms a full step, {full:.1f} ms for {padded} tokens"
            )
    return notes


def compare_dynamic(machine: Any, plan: Any, objective: float, seeds: int, budgets: list[int] | None) -> list[dict[str, Any]]:
    """Over seeds of arrivals: the fixed one of `budgets` (None: the plan's) that serves that seed fastest (least mean E2EL) of
    those within the objective, and the dynamic one, each with its latencies."""
    from jaxserve.simulation.tuning import tune_budget

    rows, bar = [], planning(f"{seeds} seeds")
    for seed in range(seeds):
        workload = read_traffic(flags.FLAGS.model, machine.limits.max_model_len, RATE.value, seed)
        row: dict[str, Any] = {"seed": seed}
        try:
            _, tried = tune_budget(workload, machine, plan, objective, _QUANTILE.value, budgets, bar.update)
            fixed = [row_of(choice) for choice in tried if choice.gap <= objective]
            row["fixed"] = min(fixed, key=lambda r: r["mean_e2el_ms"])
        except ValueError as error:
            row["fixed"] = None
            print(f"seed {seed}: {error}", file=sys.stderr)
        run = replace(machine, objective=objective).run(workload, plan, bar.update)
        summary = run.times.summary()
        row["dynamic"] = {"gap_ms": 1e3 * run.times.gap_quantile(_QUANTILE.value)}
        row["dynamic"] |= {n: summary[n] for n in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")}
        rows.append(row)
    bar.close()
    return rows


@refuse_bad_input()
def main() -> None:
    from jaxserve.simulation.tuning import mean_kv_tokens, tune_budget, with_budget

    slo_ms = engine_options()["tbt_slo_ms"]
    if slo_ms is None:
        raise ValueError("give --tbt_slo_ms, the objective in milliseconds")
    if not 0 < slo_ms < math.inf:
        raise ValueError(f"tbt_slo_ms={slo_ms:g} must be milliseconds above 0")
    if _DYNAMIC.value > 1 and math.isinf(RATE.value):
        raise ValueError(
            f"--dynamic={_DYNAMIC.value} compares seeds of arrivals, and these are the same for each: give --request_rate, or "
            "--dynamic=1"
        )
    machine = replace(read_machine(), objective=None)
    limits = machine.limits
    plan = plan_for(limits, machine.multiple)
    workload = read_traffic(flags.FLAGS.model, limits.max_model_len, RATE.value, engine_options()["seed"])
    budgets = [int(b) for b in _BUDGETS.value] or None
    with planning("budgets") as bar:
        best, tried = tune_budget(workload, machine, plan, slo_ms / 1e3, _QUANTILE.value, budgets, bar.update)
    rows = [row_of(choice) for choice in tried]
    label = f"P{100 * _QUANTILE.value:g} TBT"
    report(rows, best, label)
    for note in quantisation(machine, plan, [c.budget for c in tried], mean_kv_tokens(best.replay)):
        print(note)
    result: dict[str, Any] = {"benchmark": "tune_budget", "tbt_slo_ms": slo_ms, "quantile": _QUANTILE.value}
    result |= {"budget": best.budget, "tried": rows, "plan": str(plan)}
    print(f"max_num_batched_tokens={best.budget} keeps {label} within {slo_ms:g} ms (predicted {1e3 * best.gap:.1f})")
    if _DYNAMIC.value:
        result["dynamic"] = compare_dynamic(machine, plan, slo_ms / 1e3, _DYNAMIC.value, budgets)
        report_dynamic(result["dynamic"], label)
    if _MEASURE.value:
        run = measure(*with_budget(machine, plan, best.budget), workload, engine_options()["seed"], "measured")
        gap_ms = 1e3 * run.times.gap_quantile(_QUANTILE.value)
        result["measured"] = {"gap_ms": gap_ms, "holds": gap_ms <= slo_ms, **run.times.summary(), **run.counts}
        print(measured_line(result, label))
    write_json(_JSON.value, {**result, **provenance()})
    write_text(_TABLE.value, tables(result, label))
    if _PLOT.value:
        from jaxserve.cli.common.plots import budgets as plot_budgets

        rate = "" if math.isinf(RATE.value) else f", {RATE.value:g}/s"
        plot_budgets(rows, slo_ms, _PLOT.value, f"{workload.name}, {len(workload.requests)} requests{rate}: {label}")


def report(rows: list[dict[str, float]], best: Any, label: str) -> None:
    """Every budget tried, the chosen one marked."""
    for r in rows:
        mark = "*" if r["budget"] == best.budget else " "
        print(
            f"{mark} budget {r['budget']:>6}: {label} {r['gap_ms']:>8.1f} ms, mean TTFT {r['mean_ttft_ms']:>9.1f} ms, "
            f"mean TPOT {r['mean_tpot_ms']:>7.1f} ms, {r['output_throughput']:.0f} output tok/s"
        )


def measured_line(result: dict[str, Any], label: str) -> str:
    """Whether the objective holds on the engine."""
    found, slo_ms = result["measured"], result["tbt_slo_ms"]
    verdict = "holds" if found["holds"] else "does NOT hold"
    return (
        f"Measured with a budget of {result['budget']}: {label} {found['gap_ms']:.1f} ms, so the objective of {slo_ms:g} ms "
        f"{verdict}; mean TTFT {found['mean_ttft_ms']:.1f} ms"
    )


def tables(result: dict[str, Any], label: str) -> str:
    """What was tried, measured and compared, as Markdown."""
    head = [label, "mean TTFT", "mean TPOT", "mean E2EL"]

    def cells(row: dict[str, Any]) -> list[str]:
        found = (row[name] for name in ("gap_ms", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"))
        return ["-" if value is None else f"{value:.1f}" for value in found]

    marks = {result["budget"]: " (chosen)"}
    tried = [[f"{r['budget']}{marks.get(r['budget'], '')}", *cells(r), f"{r['output_throughput']:.0f}"] for r in result["tried"]]
    text = f"Times in ms, predicted; the objective is {label} within {result['tbt_slo_ms']:g} ms.\n\n"
    text += markdown(["budget", *head, "output tok/s"], tried)
    if "measured" in result:
        text += f"\n{measured_line(result, label)}.\n"
    if "dynamic" in result:
        rows = []
        for row in result["dynamic"]:
            fixed = row["fixed"]
            rows.append(
                [row["seed"], f"fixed, {fixed['budget']}", *cells(fixed)] if fixed else [row["seed"], "none holds", *["-"] * 4]
            )
            rows.append([row["seed"], "dynamic", *cells(row["dynamic"])])
        text += "\n" + markdown(["seed", "budget", *head], rows)
    return text


def report_dynamic(rows: list[dict[str, Any]], label: str) -> None:
    """Dynamic against the best fixed budget of each seed, and the median ratio of their TTFT and E2EL."""
    for row in rows:
        texts = []
        for name, r in (("fixed", row["fixed"]), ("dynamic", row["dynamic"])):
            what = f"fixed {r['budget']}" if r and name == "fixed" else name
            shown = "no budget holds"
            if r:
                shown = f"{label} {r['gap_ms']:.1f}, mean TTFT {r['mean_ttft_ms']:.0f}, E2EL {r['mean_e2el_ms']:.0f} ms"
            texts.append(f"{what}: {shown}")
        print(f"seed {row['seed']}: {' | '.join(texts)}")
    both = [row for row in rows if row["fixed"]]
    if both:
        for metric in ("mean_ttft_ms", "mean_e2el_ms"):
            ratios = [row["dynamic"][metric] / row["fixed"][metric] for row in both]
            print(f"dynamic over fixed, {metric}: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    run_command(main)
