"""The tables and plot of benchmarks/orca: iteration-level against request-level scheduling (Orca, OSDI 2022), on a real engine.

    python -m scripts.reproduce_orca
    python -m scripts.reproduce_orca --max_num_seqs_list=2 --rounds=3 --output=FOLDER

short_long_mix is 16 requests, (32, 32) and (512, 128) tokens by turns; equal_size, 16 of (128, 128), is the control: nothing ends
early there. One scheduler serves them under four settings:

iteration    what the engine does by itself: prompts in chunks beside decodes (policy sarathi)
orca         the same with whole prompts and KV for the longest output reserved (policy orca)
shrinking    request-level: a batch is admitted when the last one has ended, and runs in smaller buckets as its members end
padded       request-level with one decode bucket: rows that have ended stay in the batch until it ends, as a static batch's do

Published (a small reimplementation of Orca against a static batch): throughput +44%, TTFT -38%, E2E -31%. Rounds go by turns, so
that a slow minute falls on all; medians. An answer of a request-level batch is taken as it comes; "returned" counts it when its
batch ends, as a server without iterations does.
"""

from __future__ import annotations

import logging
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from absl import app, flags
from tqdm import tqdm

from jaxserve.workloads import fixed
from scripts.bench_models import bench_model
from scripts.engine_flags import define_engine_flags, engine_options, provenance, write_json
from scripts.orca_report import METRICS, SETTINGS, WORKLOADS, measure, tables

_LEVELS = flags.DEFINE_list("max_num_seqs_list", ["2", "4", "8"], "Most requests at a time.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Timed runs of each setting; one more is not counted.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "benchmarks/orca", "Folder of the results.")
define_engine_flags(model="tiny-qwen3")


def make_engine(model: Any, name: str, max_num_seqs: int) -> Any:
    """A warmed-up engine of one setting. All have the same mixed buckets, and decode buckets of 2, 4, ... to max_num_seqs; padded
    has the last alone."""
    from jaxserve import BucketPlan, Engine
    from jaxserve.llm import engine_config

    options = engine_options() | {"warm_up": "all", "batching_policy": SETTINGS[name], "max_num_seqs": max_num_seqs}
    options |= {"max_model_len": 640, "max_num_batched_tokens": 512, "page_size": 64, "num_pages": 10 * max_num_seqs}
    sizes = [size for size in (2, 4, 8, 16, 32, 64, 128) if size < max_num_seqs] + [max_num_seqs]
    decode = sizes[-1:] if name == "padded" else sizes
    mixed = tuple((tokens, min(tokens, max_num_seqs)) for tokens in (32, 64, 128, 256, 512))
    options["bucket_plan"] = BucketPlan(tuple(decode), mixed, tuple(decode))
    return Engine(model, engine_config(options), eos_token_ids=())


def compare(model: Any, workload_name: str, max_num_seqs: int) -> dict[str, dict[str, float]]:
    """Medians of every setting."""
    workload = fixed(workload_name)
    engines = {name: make_engine(model, name, max_num_seqs) for name in SETTINGS}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for i in tqdm(range(-1, _ROUNDS.value), desc=f"{workload_name}, at most {max_num_seqs}"):
        for name, engine in engines.items():
            result = measure(engine, workload, i + 1, max_num_seqs)
            if i >= 0:
                runs[name].append(result)
    for engine in engines.values():
        engine.close()
    return {name: {metric: statistics.median(r[metric] for r in rs) for metric in rs[0]} for name, rs in runs.items()}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    folder = Path(_OUTPUT.value)
    logging.getLogger("jaxserve").setLevel(logging.WARNING)  # or it names every program
    try:
        model = bench_model(flags.FLAGS.model, str(flags.FLAGS.dtype), 640)
        results = {
            f"{workload}, {level}": compare(model, workload, int(level)) for workload in WORKLOADS for level in _LEVELS.value
        }
    except (ValueError, NotImplementedError, OSError) as error:
        sys.exit(f"reproduce_orca: {error}")
    text = tables(results)
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "scripts.reproduce_orca", *sys.argv[1:]])
    (folder / "tables.md").write_text(f"# Tables\n\nWritten by `{command}`. Read README.md.\n\n{text}")
    write_json(str(folder / "results.json"), {"benchmark": "orca", "rounds": _ROUNDS.value, "results": results, **provenance()})
    from scripts.plots import policies

    policies(results, METRICS, folder / "orca.png")
    print(text)


if __name__ == "__main__":
    app.run(main)
