"""Offline throughput: a workload given to the engine all at once, timed to its end.

    jaxserve bench throughput --model=tiny-qwen3 --workload=short_long_mix --max_num_seqs=8
    jaxserve bench throughput --model=tiny-qwen3 --workload=short_long_mix --policies=sarathi,request_level
    jaxserve bench throughput --model=Qwen/Qwen3-0.6B --workload=nano_vllm --max_model_len=4096 --repeats=1
    jaxserve bench throughput --model=Qwen/Qwen3-0.6B --workload=random --random_input_len=512 --random_output_len=64
    jaxserve bench throughput --model=Qwen/Qwen3-0.6B --workload=sharegpt --dataset_path=ShareGPT_V3.json
    jaxserve bench throughput --model=Qwen/Qwen3-0.6B --workload=trace --dataset_path=requests.csv.gz --max_model_len=8192

Workloads are those of jaxserve/workloads/workload.py: equal_size is 16 requests of 128 prompt and 128 output tokens;
short_long_mix is 16 requests, (32, 32) and (512, 128) by turns; nano_vllm is nano-vllm's benchmark; a trace's requests longer
than --max_model_len are left out, and its arrival times are not heeded: this is offline. Every request runs to its full output
length. With several --policies, runs of each alternate and a ratio to the last one is printed. All programs are compiled before
the first timed run, and one untimed run comes before the timed ones; medians over --repeats runs.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from absl import flags

from jaxserve.cli.common.bench_models import bench_model
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options, refuse_flags
from jaxserve.cli.common.provenance import provenance, write_json
from jaxserve.cli.common.timed_run import check_fits, check_length, serve
from jaxserve.cli.common.workload_flags import read_workload
from jaxserve.workloads.workload import Workload

_POLICIES = flags.DEFINE_list("policies", [], "Batching policies to compare; by default --batching_policy alone.")
_PREFIX = flags.DEFINE_list("prefix_caching", [], "Compare with prefix caching on and off: --prefix_caching=true,false.")
flags.register_validator("prefix_caching", lambda given: set(given) <= {"true", "false"}, "give true, false or both")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each setting.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="tiny-qwen3", warm_up="all")


def make_engines() -> dict[str, Any]:
    """An engine for each setting to compare, warmed up; they share the model's weights, and have pools of one size."""
    from jaxserve import Engine
    from jaxserve.config import engine_config

    options: dict[str, Any] = engine_options() | {"warm_up": "all"}
    model = bench_model(flags.FLAGS.model, options["dtype"])
    settings = {p: {"batching_policy": p} for p in (_POLICIES.value or [options["batching_policy"]])}
    if _PREFIX.value:
        settings = {
            f"{name}, prefix caching {value}": s | {"enable_prefix_caching": value == "true"}
            for name, s in settings.items()
            for value in _PREFIX.value
        }
    options["gpu_memory_utilization"] /= len(settings)  # all pools are held at once
    engines = {}
    for name, setting in settings.items():
        engines[name] = Engine(model, engine_config(options | setting), eos_token_ids=())
        options["num_pages"] = engines[name].config.cache.num_pages  # a later engine would count an earlier one's pool as in use
    return engines


def summarise(workload: Workload, runs: list[dict[str, Any]], engine: Any) -> dict[str, Any]:
    """Medians over the runs, with vLLM's field names for what it reports too."""
    median = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
    total = workload.num_prompt_tokens + workload.num_output_tokens
    return {
        **median,
        "num_requests": len(workload.requests),
        "total_num_tokens": total,
        "requests_per_second": len(workload.requests) / median["elapsed_time"],
        "tokens_per_second": total / median["elapsed_time"],
        "best_output_tokens_per_second": max(r["output_tokens_per_second"] for r in runs),
        "padding_share": engine.stats.padding.padding_share,
        "num_programs": engine.runner.programs.num_compiled,
    }


def main() -> None:
    refuse_flags("all programs are compiled before the first timed run", "warm_up")
    with refuse_bad_input():
        max_model_len = engine_options()["max_model_len"]
        workload = read_workload(flags.FLAGS.model, max_model_len)
        check_length(workload, max_model_len)  # where it was given, before anything is compiled
        engines = make_engines()
        for engine in engines.values():
            check_fits(workload, engine)
    for engine in engines.values():
        print(engine.describe(), file=sys.stderr)
    runs: dict[str, list] = {name: [] for name in engines}
    for repeat in range(-1, _REPEATS.value):  # the first run of each is not counted
        for name, engine in engines.items():
            result = serve(engine, workload, seed=repeat + 1)
            if repeat >= 0:
                runs[name].append(result)
    results = {name: summarise(workload, runs[name], engines[name]) for name in engines}
    names = list(results)
    for name, r in results.items():
        ratio = r["output_tokens_per_second"] / results[names[-1]]["output_tokens_per_second"]
        against = f", {ratio:.2f}x {names[-1]}" if name != names[-1] else ""
        print(
            f"{workload.name} | {name}: {r['requests_per_second']:.2f} requests/s, {r['tokens_per_second']:.0f} total tok/s, "
            f"{r['output_tokens_per_second']:.0f} output tok/s, TTFT {r['mean_ttft_ms']:.0f} ms, "
            f"E2E {r['mean_e2el_ms']:.0f} ms, padding {100 * r['padding_share']:.0f}%{against}"
        )
        if engines[name].stats.draft_summary:
            print(f"{workload.name} | {name}: {engines[name].stats.draft_summary}")
    write_json(
        _JSON.value,
        {
            "benchmark": "throughput",
            "model": flags.FLAGS.model,
            "workload": workload.name,
            "max_num_seqs": next(iter(engines.values())).config.scheduler.max_num_seqs,
            "repeats": _REPEATS.value,
            "results": results,
            **provenance(),
        },
    )


if __name__ == "__main__":
    run_command(main)
