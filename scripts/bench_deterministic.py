"""What bits that do not depend on the bucket cost: steps of `deterministic="always"` and of "bucket" by turns, on this machine.

    python -m scripts.bench_deterministic --model=FILE.gguf,tiny-qwen3,tiny-qwen3-moe --json=FILE.json

Each model has both kinds of programs in one process. A round visits every step with each of them, one after the other, so that
other work on a shared machine falls on both alike. A figure is the median of the rounds' ratios, and of the seconds of a step.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from jaxserve.cli.common.bench_models import RANDOM
from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import define_option
from jaxserve.cli.common.provenance import provenance, write_json

FLAGS = flags.FLAGS
flags.DEFINE_list("model", ["tiny-qwen3"], f"Checkpoints, or random weights of {', '.join(RANDOM)}.")
flags.DEFINE_enum("dtype", "bfloat16", ["auto", "bfloat16", "float32"], "Of weights and activations.")
flags.DEFINE_list("decodes", ["1", "8", "32"], "Steps of so many decodes.")
flags.DEFINE_list("prefills", ["512"], "Steps of one prompt of so many tokens.")
flags.DEFINE_integer("kv_len", 256, "Tokens that each decode sees.", lower_bound=1)
flags.DEFINE_integer("rounds", 9, "Visits of each step.", lower_bound=2)
flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_option("tensor_parallel_size", 1)

LEVELS = ("bucket", "always")


def measurers(name: str, decodes: list[int], prefills: list[int]) -> dict[str, Any]:
    """A StepMeasurer for each level, on one model."""
    from jaxserve.cli.common.bench_models import bench_model
    from jaxserve.config import EngineConfig
    from jaxserve.engine.measure import StepMeasurer

    model = bench_model(name, FLAGS.dtype)
    longest = max(FLAGS.kv_len, *prefills)
    limits = {"max_num_seqs": max(decodes), "max_num_batched_tokens": max(prefills), "max_model_len": longest}
    config = {**limits, "num_pages": (max(decodes) + 2) * -(-longest // 16), "page_size": 16}
    config["tensor_parallel_size"] = FLAGS.tensor_parallel_size
    return {level: StepMeasurer(model, EngineConfig(**config, deterministic=level), multiple=2) for level in LEVELS}


def steps(measurer: Any, decodes: list[int], prefills: list[int]) -> dict[str, tuple[Any, int]]:
    """Name -> (step, rows of its head), in the smallest bucket that holds it."""
    from jaxserve.engine.measure import StepShape

    plan, found = measurer.plan, {}
    for n in decodes:
        bucket = next(b for b in plan.buckets if b.max_q_len == 1 and b.seqs >= n)
        found[f"decode {n}"] = StepShape(bucket, n, FLAGS.kv_len), plan.select_head_rows(n)
    for n in prefills:
        bucket = next(b for b in plan.buckets if b.max_q_len > 1 and b.tokens >= n)
        found[f"prefill {n}"] = StepShape(bucket, 0, 0, (n,)), plan.select_head_rows(1)
    return found


def median_ratio(times: dict[str, list[float]]) -> float:
    """Of "always" to "bucket", round by round."""
    return statistics.median(a / b for a, b in zip(times["always"], times["bucket"], strict=True))


def run_model(name: str) -> list[dict[str, Any]]:
    """A row for each step."""
    decodes, prefills = ([int(n) for n in names] for names in (FLAGS.decodes, FLAGS.prefills))
    engines = measurers(name, decodes, prefills)
    todo = steps(engines["bucket"], decodes, prefills)
    for step in todo.values():
        for engine in engines.values():
            engine.visit(*step)  # compiles
    times: dict[str, dict[str, list[float]]] = {step: {level: [] for level in LEVELS} for step in todo}
    for r in tqdm(range(FLAGS.rounds), desc=name):
        for step_name, step in todo.items():
            for level in LEVELS if r % 2 else LEVELS[::-1]:
                times[step_name][level].append(engines[level].visit(*step))
    return [
        {
            "model": Path(name).name,
            "step": step,
            **{f"{level}_ms": round(1e3 * statistics.median(of[level]), 3) for level in LEVELS},
            "ratio": round(median_ratio(of), 3),
            "ratios": [round(a / b, 3) for a, b in zip(of["always"], of["bucket"], strict=True)],
        }
        for step, of in times.items()
    ]


def main() -> None:
    rows = []
    for name in FLAGS.model:
        for row in run_model(name):
            print(f"{row['model']} {FLAGS.dtype} {row['step']}: {row['bucket_ms']} ms, always {row['ratio']:.2f}x", flush=True)
            rows.append(row)
    write_json(
        FLAGS.json,
        {
            "bench": "deterministic",
            "dtype": FLAGS.dtype,
            "tensor_parallel_size": FLAGS.tensor_parallel_size,
            "rows": rows,
            **provenance(),
        },
    )


if __name__ == "__main__":
    run_command(main)
