"""Serving benchmark: an engine in process under an open loop of requests, with vLLM's metrics.

    python -m scripts.bench_serve --workload=random --num_prompts=64 --random_input_len=128 --random_output_len=32 --request_rate=4
    python -m scripts.bench_serve --workload=trace --dataset_path=trace.csv.gz --request_rate=1,2,4 --goodput=ttft:500,tpot:50 \
        --json=serve.json --plot=serve

TTFT, TPOT, ITL and E2EL in milliseconds, throughputs, goodput (requests a second that meet every --goodput objective), peak
concurrency, preemptions, prefix hits, padding. Requests count as arrived at the workload's time, however busy the engine is then.
With several rates, each is served in turn and --plot draws latency over throughput; all programs are compiled before the first.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from absl import app, flags
from tqdm import tqdm

from jaxserve.latency import METRICS, parse_objectives
from scripts.bench_models import bench_model
from scripts.engine_flags import define_engine_flags, engine_options, provenance, write_json
from scripts.traffic_flags import read_traffic

_RATE = flags.DEFINE_list("request_rate", ["inf"], "Requests a second, or several rates; inf sends all at once.")
_CONCURRENCY = flags.DEFINE_integer("max_concurrency", None, "Most requests at once (closed loop).", lower_bound=1)
_GOODPUT = flags.DEFINE_list("goodput", [], "Objectives in ms, such as ttft:500,tpot:50.")
_METRICS = flags.DEFINE_list("percentile_metrics", list(METRICS), "Which metrics to report.")
flags.register_validator("percentile_metrics", lambda given: set(given) <= set(METRICS), f"choose from {', '.join(METRICS)}")
_PERCENTILES = flags.DEFINE_list("metric_percentiles", ["50", "90", "99"], "Percentiles of each metric.")
_PLOT = flags.DEFINE_string("plot", None, "Prefix of the plots: PREFIX_steps.png, and PREFIX_rates.png with several rates.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="tiny-qwen3")


def make_engine() -> Any:
    """A warmed-up engine of the flags."""
    from jaxserve import Engine
    from jaxserve.llm import engine_config

    options = engine_options() | {"warm_up": "all"}
    model = bench_model(flags.FLAGS.model, str(options["dtype"]), flags.FLAGS.max_model_len)
    return Engine(model, engine_config(options), eos_token_ids=())


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    from scripts.open_loop import serve

    objectives = parse_objectives(_GOODPUT.value)
    percentiles = [float(p) for p in _PERCENTILES.value]
    name, limit, seed = flags.FLAGS.model, flags.FLAGS.max_model_len, flags.FLAGS.seed
    workloads = {float(r): read_traffic(name, limit, float(r), seed) for r in _RATE.value}  # before an engine is made
    engine = make_engine()
    print(engine.describe(), file=sys.stderr)
    results, run = [], None
    for i, (rate, workload) in enumerate(workloads.items()):
        with tqdm(total=len(workload.requests), desc=f"{rate:g} requests/s") as bar:
            run = serve(engine, workload, seed + i, max_concurrency=_CONCURRENCY.value, progress=bar)
        summary = run.times.summary(metrics=_METRICS.value, percentiles=percentiles, objectives=objectives)
        results.append({"request_rate": rate if math.isfinite(rate) else "inf", **summary, **run.counts})
        report(results[-1])
    if _PLOT.value and run is not None:
        from scripts.plots import latency_throughput, step_timeline

        step_timeline(run.steps, f"{_PLOT.value}_steps.png", f"{name}, {flags.FLAGS.workload}, {list(workloads)[-1]:g}/s")
        if len(results) > 1:
            finite = [r for r in results if r["request_rate"] != "inf"]
            latency_throughput(finite, f"{_PLOT.value}_rates.png", f"{name}, {flags.FLAGS.workload}")
    about = {"benchmark": "serve", "model": name, "workload": flags.FLAGS.workload, "goodput_config": objectives}
    write_json(_JSON.value, {**about, "results": results, **provenance()})


def report(r: dict[str, Any]) -> None:
    """One result for people."""
    goodput = "" if r["request_goodput"] is None else f", goodput {r['request_goodput']:.2f}/s"
    print(
        f"rate {r['request_rate']}: {r['request_throughput']:.2f} requests/s{goodput}, {r['output_throughput']:.0f} output "
        f"and {r['total_token_throughput']:.0f} total tok/s, peak {r['max_concurrent_requests']} requests, {r['num_preemptions']} "
        f"preemptions, prefix hits {100 * r['prefix_hit_share']:.0f}%, padding {100 * r['padding_share']:.1f}%"
    )
    for metric in _METRICS.value:
        values = {k.removesuffix(f"_{metric}_ms"): v for k, v in r.items() if k.endswith(f"_{metric}_ms") and v is not None}
        print(f"  {metric.upper():5} ms: " + ", ".join(f"{k} {v:.1f}" for k, v in values.items()))


if __name__ == "__main__":
    app.run(main)
