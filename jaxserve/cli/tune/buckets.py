"""Fits a bucket plan to a workload: which (tokens, sequences) shapes to compile.

    jaxserve tune buckets --step_times=steps.json --workload=trace --dataset_path=trace.csv.gz --output=plan.json
    jaxserve generate --bucket_plan=plan.json ...

The workload is served in virtual time by the real scheduler, with step times from `jaxserve tune profile`; the plan that would
have served it fastest, within --max_programs, is searched and replayed until nothing improves. Two plans of powers of two with at
most as many programs stand beside it: the engine's default rule's (which may leave a few over), and the best among powers of two.
--measure serves the workload with each on a real engine. Nothing but --measure needs a device. --measured takes the runs of an
earlier result (--json) of the same plans in its place. --table writes what was found as a Markdown table. A plan in --config's
file is not looked at: this makes another.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.buckets.plan import MAX_PROGRAMS
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options, refuse_flags
from jaxserve.cli.common.plots import CAN_PLOT
from jaxserve.cli.common.provenance import provenance, write_json, write_text
from jaxserve.cli.common.simulated_machine import RATE, measure, planning, read_machine
from jaxserve.cli.common.tables import table as markdown
from jaxserve.cli.common.traffic_flags import read_traffic

_OUTPUT = flags.DEFINE_string("output", "plan.json", "Where the plan is written.")
_PROGRAMS = flags.DEFINE_integer("max_programs", MAX_PROGRAMS, "Most programs of the plan, heads and all others included.")
_COMPILE = flags.DEFINE_float("max_compile_seconds", None, "Most seconds that the bodies may take to compile, one after another.")
_TEMP = flags.DEFINE_float("max_temp_mib", None, "Most temporary memory of a program, MiB.")
_MEASURE = flags.DEFINE_integer("measure", 0, "Serve the workload so many times with each plan on a real engine.", lower_bound=0)
_MEASURED = flags.DEFINE_string("measured", None, "Measure nothing: take the runs of this earlier result of the same plans.")
_PLOT = flags.DEFINE_string("plot", None, "Draw demand, buckets, padding and times to this PNG.")
flags.register_validator("plot", *CAN_PLOT)
_TABLE = flags.DEFINE_string("table", None, "Write the plans as a Markdown table to this file.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="tiny-qwen3")


def compare(tuned: Any, runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """A plan's name -> what is predicted, and measured, of it."""
    from jaxserve.simulation.tuning import cost

    rows = {}
    for name, plan, replayed in (
        ("default", tuned.default_plan, tuned.default_replay),
        ("powers", tuned.powers_plan, tuned.powers_replay),
        ("tuned", tuned.plan, tuned.replay),
    ):
        rows[name] = {
            "plan": str(plan),
            "num_programs": plan.num_programs,
            "tokens": sorted(b.tokens for b in plan.buckets),
            "padding_share": replayed.padding.padding_share,
            "cost_seconds": cost(replayed),
            "busy_seconds": float(replayed.seconds.sum()),
            "predicted": replayed.times.summary(),
            "predicted_gain": tuned.gain(replayed),
            "measured": runs.get(name, []),
        }
    if runs:
        at_once = tuned.at_once
        seconds = {n: [r["duration"] if at_once else r["mean_e2el_ms"] / 1e3 for r in runs[n]] for n in runs}
        for name, row in rows.items():
            gains = [theirs / ours for theirs, ours in zip(seconds[name], seconds["tuned"], strict=True)]  # of each turn
            row["measured_seconds"] = statistics.median(seconds[name])
            row |= {"measured_gain": statistics.median(gains), "measured_gains": gains}
    return rows


def runs_of(path: str, workload: str, plans: dict[str, Any]) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """(the measured runs of an earlier result by plan, its provenance). ValueError if it is of another workload, rate or plan, or
    holds none."""
    earlier = json.loads(Path(path).read_text())
    asked = {"workload": workload, "request_rate": str(RATE.value)} | {name: str(plan) for name, plan in plans.items()}
    try:
        found = {name: earlier[name] for name in ("workload", "request_rate")}
        found |= {name: earlier["plans"][name]["plan"] for name in plans}
        runs = {name: earlier["plans"][name]["measured"] for name in plans}
        about = {name: value for name, value in earlier.items() if name not in ("benchmark", "planning", "search", "plans")}
    except (KeyError, TypeError) as error:
        raise ValueError(f"--measured={path} is no result of `jaxserve tune buckets` ({error!r})") from None
    for name, value in asked.items():
        if found[name] != value:
            raise ValueError(f"--measured={path} is of another {name}: {found[name]}, not {value}")
    if not all(runs.values()):
        raise ValueError(f"--measured={path} holds no measured run")
    return runs, about


def search_of(tuned: Any) -> dict[str, Any]:
    """What is known of the search, for the JSON file."""
    s = tuned.search
    found = {"gap": s.gap, "num_candidates": s.num_candidates, "rounds": tuned.rounds, "capped": s.capped}
    found |= {"predicted_seconds": s.seconds, "predicted_cost": s.cost, "ladder_cost": s.ladder_cost, "bound": s.bound}
    return found | {"fixed_log_gain": tuned.fixed_log_gain, "in_loop_gain": tuned.in_loop_gain}


@refuse_bad_input()
def main() -> None:
    refuse_flags("a plan is made here; the ones beside it are the engine's default and the best of powers of two", "bucket_plan")
    if _MEASURED.value is not None:
        refuse_flags("nothing is measured with --measured", "measure")
    from jaxserve.simulation.bucket_search import Caps
    from jaxserve.simulation.tuning import tune_plan
    from jaxserve.workloads.traffic import describe

    machine = read_machine()
    workload = read_traffic(flags.FLAGS.model, machine.limits.max_model_len, RATE.value, engine_options()["seed"])
    print(describe(workload), file=sys.stderr)
    start, cpu = time.perf_counter(), time.process_time()
    caps = Caps(_PROGRAMS.value, _COMPILE.value, None if _TEMP.value is None else int(_TEMP.value * 2**20))
    with planning("planning") as bar:
        tuned = tune_plan(workload, machine, caps, progress=bar.update)
    took = {"wall_seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    plans = {"default": tuned.default_plan, "powers": tuned.powers_plan, "tuned": tuned.plan}
    about = {"workload": describe(workload), "step_times": str(engine_options()["step_times"]), "max_programs": _PROGRAMS.value}
    if machine.objective is not None:
        warn_if_missed(machine, tuned.plan)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in plans} if _MEASURE.value else {}
    earlier: dict[str, Any] | None = None
    if _MEASURED.value is not None:
        runs, earlier = runs_of(_MEASURED.value, describe(workload), plans)
    tuned.plan.save(_OUTPUT.value, **about, **provenance())
    for repeat in range(_MEASURE.value):  # by turns, so that a slow minute falls on all
        for name, plan in plans.items():
            run = measure(machine, plan, workload, repeat, f"{name}, run {repeat + 1}")
            runs[name].append({**run.times.summary(), **run.counts})
    rows = compare(tuned, runs)
    error = machine.step_times.about.get("held_out_error")
    report(tuned, rows, took, error)
    about = {
        "benchmark": "tune_buckets",
        "model": flags.FLAGS.model,
        "workload": describe(workload),
        "request_rate": str(RATE.value),
    }
    search = search_of(tuned) | {"held_out_error": error}
    about |= {"planning": took, "search": search, "plans": rows} | ({"measured": earlier} if earlier else {})
    write_json(_JSON.value, {**about, **provenance()})
    write_text(_TABLE.value, table(tuned, rows))
    if _PLOT.value:
        rate = ", all at once" if tuned.at_once else "" if math.isinf(RATE.value) else f", {RATE.value:g}/s"
        draw(tuned, rows, f"{workload.name}, {len(workload.requests)} requests{rate}")


def warn_if_missed(machine: Any, plan: Any) -> None:
    """The engine's warning, if no step with this plan meets --tbt_slo_ms."""
    from jaxserve.engine.resolution import warn_of_objective
    from jaxserve.scheduling.step_budget import StepBudget

    limits = machine.limits
    warn_of_objective(StepBudget(machine.step_times, plan, machine.objective, limits.max_num_seqs, limits.max_num_batched_tokens))


def draw(tuned: Any, rows: dict[str, dict[str, Any]], title: str) -> None:
    from jaxserve.cli.common.plots import plan_comparison

    shown = {n: {**r, "seconds": r["cost_seconds"]} for n, r in rows.items()}
    seconds = "time to serve" if tuned.at_once else "mean end-to-end latency"
    plan_comparison(tuned.replay.demands.tokens, shown, str(_PLOT.value), title, seconds)


def tpot(summary: dict[str, Any]) -> str:
    return "-" if summary["mean_tpot_ms"] is None else f"{summary['mean_tpot_ms']:.1f} ms"


def columns(tuned: Any, rows: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """What is shown of each plan, by heading: gains are the plan's seconds over the tuned plan's; over time, requests a second and
    TPOT too. Of several runs each figure is the median; a gain that of the turns' own gains, with the least and the most."""
    unit = "s" if tuned.at_once else "s a request"
    shown = []
    for name, r in rows.items():
        row = {"plan": name, "programs": str(r["num_programs"]), "padding": f"{100 * r['padding_share']:.1f}%"}
        row |= {"predicted": f"{r['cost_seconds']:.2f} {unit}", "predicted gain": f"{r['predicted_gain']:.2f}"}
        if not tuned.at_once:
            row |= {"predicted requests/s": f"{r['predicted']['request_throughput']:.2f}", "predicted TPOT": tpot(r["predicted"])}
        if r["measured"]:
            gain, gains = r["measured_gain"], r["measured_gains"]
            spread = f" ({min(gains):.2f} to {max(gains):.2f})" if min(gains) < max(gains) else ""
            row |= {"measured": f"{r['measured_seconds']:.2f} {unit}", "measured gain": f"{gain:.2f}{spread}"}
            row |= {"over predicted gain": "-" if name == "tuned" else f"{gain / r['predicted_gain'] - 1:+.0%}"}
            if not tuned.at_once:
                rate = statistics.median(run["request_throughput"] for run in r["measured"])
                tpots = [run["mean_tpot_ms"] for run in r["measured"]]  # None in all or in none
                middle = {"mean_tpot_ms": None if None in tpots else statistics.median(tpots)}
                row |= {"measured requests/s": f"{rate:.2f}", "measured TPOT": tpot(middle)}
        shown.append(row)
    return shown


def misprediction(tuned: Any) -> str:
    """A sentence: what a fixed demand log says of the first plan found, and what becomes of it in the loop."""
    return (
        f"Device time with the default plan over that with the first plan found: {tuned.fixed_log_gain:.3f} by the default's "
        f"demand log alone, {tuned.in_loop_gain:.3f} with the scheduler in the loop; the fixed log is off by "
        f"{tuned.fixed_log_gain / tuned.in_loop_gain - 1:+.1%}."
    )


def bound(search: Any) -> str:
    """A sentence: how far the plan found may be from the best."""
    exact = "of as many programs" if search.capped else "exact"
    return (
        f"The pairs found lie at most {100 * search.gap:.2f}% above the best set of {search.num_candidates} candidates (with "
        f"max_num_seqs sequences in each: {search.ladder_cost:.1f} s, {exact}, against {search.cost:.1f} s; prices of padding "
        "included)."
    )


def table(tuned: Any, rows: dict[str, dict[str, Any]]) -> str:
    """The plans as Markdown, the search's bound, and by how much a fixed log mispredicts."""
    shown = columns(tuned, rows)
    text = markdown(list(shown[0]), [list(row.values()) for row in shown])
    return f"{text}\n{misprediction(tuned)}\n\n{bound(tuned.search)}\n"


def report(tuned: Any, rows: dict[str, dict[str, Any]], took: dict[str, float], error: dict[str, float] | None) -> None:
    """The result for people. error: the profile's on held-out steps."""
    shown = columns(tuned, rows)
    widths = {name: max(len(name), *(len(row[name]) for row in shown)) for name in shown[0]}
    for row in ({name: name for name in widths}, *shown):
        print("  ".join(f"{text:>{widths[name]}}" for name, text in row.items()))
    for name, r in rows.items():
        print(f"{name}: {r['plan']}")
    print(bound(tuned.search))
    if tuned.search.capped:
        print("--max_compile_seconds took programs away: a plan of more of them, which compile faster, may be better")
    print(f"{misprediction(tuned)} Searched {tuned.rounds} logs.")
    if error:
        print(f"the profile's error on held-out steps: median {error['median']:.1%}, P90 {error['p90']:.1%}")
    print(f"planned in {took['wall_seconds']:.1f} s ({took['cpu_seconds']:.1f} s of CPU): {_OUTPUT.value}")


if __name__ == "__main__":
    run_command(main)
