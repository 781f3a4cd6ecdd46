"""The tables and plot of benchmarks/orca: iteration-level against request-level scheduling (Orca, OSDI 2022), on a real engine.

    python -m scripts.reproduce_orca
    python -m scripts.reproduce_orca --max_num_seqs_list=2 --rounds=3 --output=FOLDER

short_long_mix is 16 requests, (32, 32) and (512, 128) tokens by turns; equal_size, 16 of (128, 128), is the control: nothing ends
early there. One scheduler serves them under four settings:

iteration    what the engine does by itself: prompts in chunks beside decodes (policy sarathi), 512 tokens a step
orca         whole prompts beside decodes, KV for the longest output reserved (policy orca), room for all prompts in a step
shrinking    request-level: a batch is admitted when the last one has ended, and runs in smaller buckets as its members end
padded       request-level with one decode bucket: rows that have ended stay in the batch until it ends, as a static batch's do

Published (a small reimplementation of Orca against a static batch): throughput +44%, TTFT -38%, E2E -31%. Every round runs all
settings, in another order, so that a slow minute falls on all; a ratio is taken within a round, and its median over the rounds is
what counts. An answer of a request-level batch is taken as it comes; "returned" counts it when its batch ends, as a server without
iterations does. Results are written whenever a number of sequences is done.
"""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from absl import app, flags
from tqdm import tqdm

from jaxserve.cli.common.bench_models import bench_model
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.plots import figure, policies
from jaxserve.cli.common.provenance import provenance, write_json
from jaxserve.workloads.workload import fixed
from scripts.reproduce.orca_report import (
    MAX_MODEL_LEN,
    METRICS,
    SETTINGS,
    WORKLOADS,
    bucket_plan,
    limits,
    measure,
    medians,
    order,
    tables,
)

_LEVELS = flags.DEFINE_list("max_num_seqs_list", ["2", "4", "8"], "Most requests at a time.")
_ROUNDS = flags.DEFINE_integer(
    "rounds", 8, "Timed runs of each setting, of 8 each comes twice at each place; one more is not counted.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", "benchmarks/orca", "Folder of the results.")
define_engine_flags(model="tiny-qwen3")


def make_engine(model: Any, name: str, max_num_seqs: int) -> Any:
    """A warmed-up engine of one setting (orca_report.limits, bucket_plan)."""
    from jaxserve import Engine
    from jaxserve.llm import engine_config

    options = engine_options() | {"warm_up": "all", "batching_policy": SETTINGS[name], **limits(name, max_num_seqs)}
    options |= {"page_size": 64, "num_pages": MAX_MODEL_LEN // 64 * max_num_seqs, "bucket_plan": bucket_plan(name, max_num_seqs)}
    return Engine(model, engine_config(options), eos_token_ids=())


def compare(model: Any, max_num_seqs: int) -> dict[str, dict[str, Any]]:
    """{workload: {setting: its steps_by_bucket, and what `measure` found in each of its rounds}}"""
    names = tqdm(SETTINGS, desc=f"compiling, at most {max_num_seqs}", unit="setting")
    engines = {name: make_engine(model, name, max_num_seqs) for name in names}
    found = {}
    for workload_name in WORKLOADS:
        workload = fixed(workload_name)
        runs: dict[str, Any] = {name: {"steps_by_bucket": {}, "rounds": []} for name in SETTINGS}
        for i in tqdm(range(-1, _ROUNDS.value), desc=f"{workload_name}, at most {max_num_seqs}", unit="round"):
            for name in order(list(SETTINGS), max(i, 0)):
                result, runs[name]["steps_by_bucket"] = measure(engines[name], workload, i + 1, max_num_seqs)
                if i >= 0:
                    runs[name]["rounds"].append(result)
        found[workload_name] = runs
    for engine in engines.values():
        engine.close()
    return found


def main() -> None:
    folder = Path(_OUTPUT.value)
    logging.getLogger("jaxserve").setLevel(logging.WARNING)  # or it names every program
    results: dict[str, dict[str, Any]] = {}
    try:
        figure()  # or the plot would find at the end that it can't be drawn
    except RuntimeError as error:
        raise app.UsageError(str(error)) from error
    with refuse_bad_input():
        model = bench_model(flags.FLAGS.model, str(flags.FLAGS.dtype), MAX_MODEL_LEN)
        for level in map(int, _LEVELS.value):
            results |= {f"{name}, {level}": of for name, of in compare(model, level).items()}
            write(folder, dict(sorted(results.items(), key=lambda item: WORKLOADS.index(item[0].split(",")[0]))))  # stable
    print((folder / "tables.md").read_text())


def write(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """tables.md, results.json and the plot, of the cases so far."""
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "scripts.reproduce_orca", *sys.argv[1:]])
    (folder / "tables.md").write_text(f"# Tables\n\nWritten by `{command}`. Read README.md.\n\n{tables(results)}")
    write_json(str(folder / "results.json"), {"benchmark": "orca", "rounds": _ROUNDS.value, "results": results, **provenance()})
    policies(
        {case: {name: medians(of) for name, of in found.items()} for case, found in results.items()}, METRICS, folder / "orca.png"
    )


if __name__ == "__main__":
    run_command(main)
