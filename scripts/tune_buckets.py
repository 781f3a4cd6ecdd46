"""Fits a bucket plan to a workload: which (tokens, sequences) shapes to compile.

    python -m scripts.tune_buckets --step_times=steps.json --workload=trace --dataset_path=trace.csv.gz --output=plan.json
    python -m scripts.generate --bucket_plan=plan.json ...

The workload is served in virtual time by the real scheduler, with step times from scripts.profile_steps; the plan that would have
served it fastest, within --max_programs, is searched and replayed until nothing improves. Two plans of powers of two with as many
programs stand beside it: the engine's default rule's, and the best among powers of two. --measure serves the workload with each on
a real engine. Nothing but --measure needs a device.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from absl import app, flags

from scripts.engine_flags import define_engine_flags, provenance, write_json
from scripts.simulated_machine import RATE, measure, read_machine
from scripts.traffic_flags import read_traffic

_OUTPUT = flags.DEFINE_string("output", "plan.json", "Where the plan is written.")
_PROGRAMS = flags.DEFINE_integer("max_programs", 24, "Most programs of the plan, heads and all others included.")
_COMPILE = flags.DEFINE_float("max_compile_seconds", None, "Most seconds that the bodies may take to compile, one after another.")
_TEMP = flags.DEFINE_float("max_temp_mib", None, "Most temporary memory of a program, MiB.")
_MEASURE = flags.DEFINE_integer("measure", 0, "Serve the workload so many times with each plan on a real engine.", lower_bound=0)
_PLOT = flags.DEFINE_string("plot", None, "Draw demand, buckets, padding and times to this PNG.")
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
        seconds = {n: min(r["duration"] if at_once else r["mean_e2el_ms"] / 1e3 for r in runs[n]) for n in runs}
        for name, row in rows.items():
            row["measured_seconds"] = seconds[name]
            row["measured_gain"] = seconds[name] / seconds["tuned"]
    return rows


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    from jaxserve.simulation.bucket_search import Caps
    from jaxserve.simulation.tuning import tune_plan
    from jaxserve.traffic import describe

    machine = read_machine()
    workload = read_traffic(flags.FLAGS.model, machine.limits.max_model_len, RATE.value, flags.FLAGS.seed)
    print(describe(workload), file=sys.stderr)
    start, cpu = time.perf_counter(), time.process_time()
    caps = Caps(_PROGRAMS.value, _COMPILE.value, None if _TEMP.value is None else int(_TEMP.value * 2**20))
    tuned = tune_plan(workload, machine, caps)
    planning = {"wall_seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    plans = {"default": tuned.default_plan, "powers": tuned.powers_plan, "tuned": tuned.plan}
    tuned.plan.save(_OUTPUT.value, workload=workload.name, step_times=flags.FLAGS.step_times, **made_by())
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in plans} if _MEASURE.value else {}
    for repeat in range(_MEASURE.value):  # by turns, so that a slow minute falls on all
        for name, plan in plans.items():
            run = measure(machine, plan, workload, repeat, f"{name}, run {repeat + 1}")
            runs[name].append({**run.times.summary(), **run.counts})
    rows = compare(tuned, runs)
    report(tuned, rows, planning)
    if _PLOT.value:
        from scripts.plots import plan_comparison

        shown = {n: {**r, "seconds": r["cost_seconds"]} for n, r in rows.items()}
        plan_comparison(tuned.replay.demands.tokens, shown, _PLOT.value, workload.name)
    about = {
        "benchmark": "tune_buckets",
        "model": flags.FLAGS.model,
        "workload": describe(workload),
        "request_rate": str(RATE.value),
    }
    search = {"gap": tuned.search.gap, "num_candidates": tuned.search.num_candidates, "rounds": tuned.rounds}
    search |= {
        "predicted_seconds": tuned.search.seconds,
        "predicted_cost": tuned.search.cost,
        "ladder_cost": tuned.search.ladder_cost,
        "bound": tuned.search.bound,
    }
    search |= {"fixed_log_gain": tuned.fixed_log_gain, "held_out_error": machine.step_times.about.get("held_out_error")}
    write_json(_JSON.value, {**about, "planning": planning, "search": search, "plans": rows, **provenance()})


def made_by() -> dict[str, Any]:
    """What a plan's file says of its making; planning itself touches no device."""
    from scripts.engine_flags import revision

    return {"revision": revision(), "seed": flags.FLAGS.seed, "max_programs": _PROGRAMS.value}


def report(tuned: Any, rows: dict[str, dict[str, Any]], planning: dict[str, float]) -> None:
    """The result for people."""
    unit = "s" if tuned.at_once else "s a request"
    print(f"{'plan':8} {'programs':>8} {'padding':>8} {'predicted':>16} {'gain':>6} {'measured':>16} {'gain':>6}")
    for name, r in rows.items():
        measured = f"{r['measured_seconds']:.1f} {unit:11} {r['measured_gain']:>6.2f}" if "measured_seconds" in r else ""
        print(
            f"{name:8} {r['num_programs']:>8} {100 * r['padding_share']:>7.1f}% {r['cost_seconds']:>10.1f} {unit:11} "
            f"{r['predicted_gain']:>6.2f} {measured}"
        )
    for name, r in rows.items():
        print(f"{name}: {r['plan']}")
    s = tuned.search
    print(
        f"the pairs found lie at most {100 * s.gap:.2f}% above the best set of {s.num_candidates} candidates "
        f"(with max_num_seqs sequences in each: {s.ladder_cost:.1f} s, exact, against {s.cost:.1f} s; a price of padding included)"
    )
    print(
        f"the default plan's demand log alone promises {tuned.fixed_log_gain:.2f}x over the default, the scheduler in the loop "
        f"{tuned.gain(tuned.default_replay):.2f}x ({tuned.rounds} rounds)"
    )
    print(f"planned in {planning['wall_seconds']:.1f} s ({planning['cpu_seconds']:.1f} s of CPU): {_OUTPUT.value}")


if __name__ == "__main__":
    app.run(main)
