"""Latency of one batch: the time from giving `batch_size` prompts to the last token of the last of them.

    jaxserve bench latency --model=Qwen/Qwen3-0.6B --input_len=32 --output_len=128 --batch_size=8 --json=latency.json

Prompts are random ids, greedy, each to its full output length; nothing else runs, and no prefix is cached from one iteration to
the next. All programs are compiled before the first iteration, and --num_iters_warmup iterations come before the timed ones. The
fields of the JSON are those of vLLM's `bench latency` (avg_latency, latencies and percentiles, in seconds), and more.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from jaxserve.cli.common.bench_models import bench_model
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options, refuse_flags
from jaxserve.cli.common.provenance import provenance, write_json
from jaxserve.cli.common.timed_run import check_fits, check_length, serve
from jaxserve.lazy_names import Late
from jaxserve.workloads.workload import Workload, WorkloadRequest

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")  # --help needs none

PERCENTILES = (10, 25, 50, 75, 90, 99)

_INPUT = flags.DEFINE_integer("input_len", 32, "Tokens of a prompt.", lower_bound=1)
_OUTPUT = flags.DEFINE_integer("output_len", 128, "Tokens of an output.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 8, "Prompts of the batch.", lower_bound=1)
_WARMUP = flags.DEFINE_integer("num_iters_warmup", 10, "Untimed iterations.", lower_bound=0)
_ITERS = flags.DEFINE_integer("num_iters", 30, "Timed iterations.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="tiny-qwen3", warm_up="all")


def make_engine() -> Any:
    """An engine for one batch of this size, unless the flags say otherwise, warmed up."""
    from jaxserve import Engine
    from jaxserve.config import engine_config

    options = engine_options() | {"warm_up": "all"}
    if options["max_num_seqs"] is None and options["bucket_plan"] is None:
        options["max_num_seqs"] = _BATCH.value
    return Engine(bench_model(flags.FLAGS.model, options["dtype"]), engine_config(options), eos_token_ids=())


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """vLLM's fields in seconds, then ours: the mean time to a first token and the mean between an output's others."""
    latencies = [run["elapsed_time"] for run in runs]
    between = [(run["mean_e2el_ms"] - run["mean_ttft_ms"]) / max(_OUTPUT.value - 1, 1) for run in runs]
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
        "mean_ttft_ms": float(np.mean([run["mean_ttft_ms"] for run in runs])),
        "mean_tpot_ms": float(np.mean(between)),
        "output_tokens_per_second": _BATCH.value * _OUTPUT.value / float(np.mean(latencies)),
    }


def main() -> None:
    from tqdm import tqdm

    refuse_flags("all programs are compiled before the first timed run", "warm_up")
    batch = Workload("a batch", (WorkloadRequest(_INPUT.value, _OUTPUT.value),) * _BATCH.value)
    with refuse_bad_input():
        check_length(batch, engine_options()["max_model_len"])  # where it was given, before anything is compiled
        engine = make_engine()
        check_fits(batch, engine)
    print(engine.describe(), file=sys.stderr)
    for i in tqdm(range(_WARMUP.value), desc="warm-up", file=sys.stderr):
        serve(engine, batch, seed=i)
    runs = [serve(engine, batch, seed=_WARMUP.value + i) for i in tqdm(range(_ITERS.value), desc="timed", file=sys.stderr)]
    result = summarise(runs)
    shown = ", ".join(f"p{p} {1e3 * x:.1f}" for p, x in result["percentiles"].items())
    print(
        f"{flags.FLAGS.model}, batch {_BATCH.value}, {_INPUT.value} in, {_OUTPUT.value} out: {1e3 * result['avg_latency']:.1f} ms "
        f"({shown}), TTFT {result['mean_ttft_ms']:.1f} ms, TPOT {result['mean_tpot_ms']:.2f} ms, "
        f"{result['output_tokens_per_second']:.0f} output tok/s",
        file=sys.stderr if _JSON.value == "-" else sys.stdout,
    )
    if engine.stats.draft_summary:
        print(engine.stats.draft_summary, file=sys.stderr)
    sizes = {"input_len": _INPUT.value, "output_len": _OUTPUT.value, "batch_size": _BATCH.value, "num_iters": _ITERS.value}
    write_json(_JSON.value, {"benchmark": "latency", "model": flags.FLAGS.model, **sizes, **result, **provenance()})


if __name__ == "__main__":
    run_command(main)
