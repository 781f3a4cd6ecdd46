r"""Serving benchmark: an engine in process, or a server, under an open loop of requests, with vLLM's metrics.

    jaxserve bench serve --workload=random --num_prompts=64 --random_input_len=128 --request_rate=4
    jaxserve bench serve --workload=trace --dataset_path=trace.csv.gz --request_rate=1,2,4 --goodput=ttft:500,tpot:50 \
        --json=serve.json --plot=serve
    jaxserve bench serve --base_url=http://127.0.0.1:8000 --workload=random --request_rate=4
    jaxserve bench serve --base_url=https://HOST/PATH --vocab_size=32000 --workload=random --max_model_len=4096
    jaxserve bench serve --model=FOLDER --against_server --rounds=3 --workload=eight

TTFT, TPOT, ITL and E2EL in milliseconds, throughputs, goodput (requests a second that meet every --goodput objective), peak
concurrency, preemptions, prefix hits, padding. Requests count as arrived at the workload's time, however busy the engine is then.
With several rates, each is served in turn and --plot draws latency over throughput; all programs are compiled before the first.
--base_url takes any OpenAI-compatible server of completions that knows ignore_eos; the first model that it lists is asked. Where it
does not tell its vocabulary at /tokenizer_info, --vocab_size says how many token ids prompts are drawn from. Of the engine's flags
it heeds --max_model_len (longer requests are left out) and --seed; --model is whose tokenizer counts ShareGPT's texts.
--against_server starts `jaxserve serve` with the same flags, gives the workload to the engine in process and to that server by
turns, --rounds times after one that is not counted, and prints the share of the engine's throughput that HTTP leaves (the median).
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from typing import TYPE_CHECKING, Any

from absl import app, flags

from jaxserve.cli.common.bench_models import bench_model
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_flags, engine_options, refuse_flags
from jaxserve.cli.common.plots import CAN_PLOT
from jaxserve.cli.common.provenance import provenance, write_json
from jaxserve.cli.common.timed_run import check_fits
from jaxserve.cli.common.traffic_flags import read_traffic
from jaxserve.workloads.latency import METRICS, ServedTimes, parse_objectives
from jaxserve.workloads.workload import Workload

if TYPE_CHECKING:
    from jaxserve.cli.common.http_load import Target


def _is_percentile(text: str) -> bool:
    try:
        return 0 <= float(text) <= 100
    except ValueError:
        return False


def _is_rate(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


_RATE = flags.DEFINE_list("request_rate", ["inf"], "Requests a second, or several rates; inf sends all at once.")
flags.register_validator("request_rate", lambda given: all(map(_is_rate, given)), "must be numbers above 0, or inf")
_CONCURRENCY = flags.DEFINE_integer("max_concurrency", None, "Most requests at once (closed loop).", lower_bound=1)
_GOODPUT = flags.DEFINE_list("goodput", [], "Objectives in ms, such as ttft:500,tpot:50.")
_METRICS = flags.DEFINE_list("percentile_metrics", list(METRICS), "Which metrics to report.")
flags.register_validator("percentile_metrics", lambda given: set(given) <= set(METRICS), f"choose from {', '.join(METRICS)}")
_PERCENTILES = flags.DEFINE_list("metric_percentiles", ["50", "90", "99"], "Percentiles of each metric.")
flags.register_validator("metric_percentiles", lambda given: all(map(_is_percentile, given)), "must be numbers from 0 to 100")
_URL = flags.DEFINE_string("base_url", None, "Load this server, and make no engine.")
_API_KEY = flags.DEFINE_string("api_key", None, "Its key; by default JAXSERVE_API_KEY.")
_VOCABULARY = flags.DEFINE_integer("vocab_size", None, "Token ids that it knows, where it does not say.", lower_bound=1)
_AGAINST = flags.DEFINE_bool("against_server", False, "Serve in process and over HTTP by turns.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds of --against_server.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Prefix of the plots: PREFIX_steps.png, and PREFIX_rates.png with several rates.")
flags.register_validator("plot", *CAN_PLOT)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="tiny-qwen3", warm_up="all")


def make_engine() -> Any:
    """A warmed-up engine of the flags."""
    from jaxserve import Engine
    from jaxserve.config import engine_config

    options: dict[str, Any] = engine_options() | {"warm_up": "all"}
    model = bench_model(flags.FLAGS.model, str(options["dtype"]), options["max_model_len"])
    return Engine(model, engine_config(options), eos_token_ids=())


def in_process(workloads: dict[float, Workload], seed: int) -> tuple[list[dict[str, Any]], Any]:
    """(a result for each rate, from an engine of the flags; the steps of the last, as ServedRun has them)."""
    from tqdm import tqdm

    from jaxserve.cli.common.open_loop import serve

    engine = make_engine()
    print(engine.describe(), file=sys.stderr)
    for workload in workloads.values():
        check_fits(workload, engine)
    results, steps = [], None
    for i, (rate, workload) in enumerate(workloads.items()):
        with tqdm(total=len(workload.requests), desc=f"{rate:g} requests/s") as bar:
            run = serve(engine, workload, seed + i, max_concurrency=_CONCURRENCY.value, progress=bar)
        results.append(summary(rate, run.times) | run.counts)
        report(results[-1])
        steps = run.steps
    return results, steps


def draw(results: list[dict[str, Any]], steps: Any, workload: str) -> None:
    """The timeline of the last rate's steps, and, of several rates, latency over throughput."""
    from jaxserve.cli.common.plots import latency_throughput, step_timeline

    name = f"{flags.FLAGS.model}, {workload}"
    step_timeline(steps, f"{_PLOT.value}_steps.png", f"{name}, {float(results[-1]['request_rate']):g}/s")
    if len(results) > 1:
        latency_throughput([r for r in results if r["request_rate"] != "inf"], f"{_PLOT.value}_rates.png", name)


def over_http(target: Target, workload: Workload, vocab_size: int, seed: int) -> ServedTimes:
    import asyncio

    from tqdm import tqdm

    from jaxserve.cli.common.http_load import serve_at

    with tqdm(total=len(workload.requests), desc=target.url) as bar:
        return asyncio.run(serve_at(target, workload, vocab_size, seed, max_concurrency=_CONCURRENCY.value, progress=bar))


def told_vocabulary(target: Target) -> int:
    """Token ids that the server says it knows. ValueError where it does not."""
    import urllib.error

    try:
        size = target.get_json("/tokenizer_info").get("vocab_size")
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        size = None
    if not isinstance(size, int):
        raise ValueError(f"{target.url} does not say at /tokenizer_info how many token ids it knows: give --vocab_size")
    return size


def at_url(workloads: dict[float, Workload], seed: int) -> list[dict[str, Any]]:
    """A result for each rate, from the server at --base_url and the first model that it lists."""
    from jaxserve.cli.common.http_load import Target

    target = Target(str(_URL.value), _API_KEY.value or os.environ.get("JAXSERVE_API_KEY"))
    models = target.get_json("/v1/models")["data"]
    if not models:
        raise ValueError(f"{target.url} lists no model at /v1/models")
    target.model = models[0]["id"]
    vocab_size, results = _VOCABULARY.value or told_vocabulary(target), []
    for i, (rate, workload) in enumerate(workloads.items()):
        results.append({"model_id": target.model, **summary(rate, over_http(target, workload, vocab_size, seed + i))})
        report(results[-1])
    return results


def server_flags() -> list[str]:
    """The flags given that a server takes too: the model, the engine's options, the file of them."""
    ours = [name for name in ("model", "config", *engine_options()) if name in flags.FLAGS]
    return [flags.FLAGS[name].serialize() for name in ours if flags.FLAGS[name].present]


def against_server(workloads: dict[float, Workload], seed: int) -> list[dict[str, Any]]:
    """For each rate, the last round's result in process and that of a server of the same flags, and the share between them."""
    from jaxserve.cli.common.http_load import Target, server_process
    from jaxserve.cli.common.open_loop import serve

    engine, results = make_engine(), []
    for workload in workloads.values():
        check_fits(workload, engine)
    with server_process("jaxserve.cli.serve", "--noaccess_log", *server_flags()) as (url, _):
        for rate, workload in workloads.items():
            shares, here, there = [], {}, {}
            for of_round in range(seed, seed + 1 + _ROUNDS.value):
                run = serve(engine, workload, of_round, max_concurrency=_CONCURRENCY.value)
                here = summary(rate, run.times) | run.counts
                there = summary(rate, over_http(Target(url), workload, engine.config.model.vocab_size, of_round))
                shares.append(there["output_throughput"] / here["output_throughput"])
            print("in process, the last round:")
            report(here)
            print("server, the last round:")
            report(there)
            share = statistics.median(shares[1:])
            print(f"rate {here['request_rate']}: the server reaches {share:.1%} of the engine in process (rounds: ", end="")
            print(", ".join(f"{s:.1%}" for s in shares[1:]) + ")")
            results.append({"request_rate": here["request_rate"], "share": share, "in_process": here, "server": there})
    return results


def check_heeded() -> None:
    """UsageError naming flags given that this run would not read."""
    if _URL.value:
        others = [name for name in engine_flags() if name not in ("max_model_len", "seed")]
        refuse_flags("is of an engine, and --base_url makes none", "config", *others)
        if flags.FLAGS.workload != "sharegpt":
            refuse_flags(
                "the server at --base_url has its own; it is for --workload=sharegpt, whose texts its tokenizer counts", "model"
            )
    else:
        refuse_flags("is of the server at --base_url", "vocab_size", "api_key")
    if not _AGAINST.value:
        refuse_flags("is of --against_server", "rounds")
        refuse_flags("all programs are compiled before the first timed run", "warm_up")


@refuse_bad_input()
def main() -> None:
    if _PLOT.value and (_URL.value or _AGAINST.value):
        raise app.UsageError("--plot is for an engine in process: without --base_url and --against_server")
    if _URL.value and _AGAINST.value:
        raise app.UsageError("give either --base_url or --against_server")
    check_heeded()
    objectives = parse_objectives(_GOODPUT.value)
    name, options = flags.FLAGS.model, engine_options()
    limit, seed = options["max_model_len"], options["seed"]
    workloads = {float(r): read_traffic(name, limit, float(r), seed) for r in _RATE.value}  # before an engine is made
    steps = None
    if _URL.value:
        results = at_url(workloads, seed)
    elif _AGAINST.value:
        results = against_server(workloads, seed)
    else:
        results, steps = in_process(workloads, seed)
    about = {"benchmark": "serve", "model": _URL.value or name, "workload": flags.FLAGS.workload}
    write_json(_JSON.value, {**about, "goodput_config": objectives, "results": results, **provenance()})
    if _PLOT.value:
        draw(results, steps, next(iter(workloads.values())).name)


def summary(rate: float, times: ServedTimes) -> dict[str, Any]:
    percentiles = [float(p) for p in _PERCENTILES.value]
    found = times.summary(metrics=_METRICS.value, percentiles=percentiles, objectives=parse_objectives(_GOODPUT.value))
    return {"request_rate": rate if math.isfinite(rate) else "inf", **found}


def report(r: dict[str, Any]) -> None:
    """One result for people."""
    goodput = "" if r["request_goodput"] is None else f", goodput {r['request_goodput']:.2f}/s"
    engine = ""
    if "num_preemptions" in r:  # a server keeps these to itself
        engine = f", {r['num_preemptions']} preemptions, prefix hits {r['prefix_hit_share']:.0%}, padding {r['padding_share']:.1%}"
    print(
        f"rate {r['request_rate']}: {r['request_throughput']:.2f} requests/s{goodput}, {r['output_throughput']:.0f} output "
        f"and {r['total_token_throughput']:.0f} total tok/s, peak {r['max_concurrent_requests']} requests{engine}"
    )
    for metric in _METRICS.value:
        values = {k.removesuffix(f"_{metric}_ms"): v for k, v in r.items() if k.endswith(f"_{metric}_ms") and v is not None}
        print(f"  {metric.upper():5} ms: " + ", ".join(f"{k} {v:.1f}" for k, v in values.items()))


if __name__ == "__main__":
    run_command(main)
