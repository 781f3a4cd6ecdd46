"""Host time and balance of attention's work lists on steps drawn at random; no device.

Times are wall-clock microseconds of `work_list.plan`: on a shared machine the median tells what a plan costs there, the minimum
what the code costs. max_over_mean: the work of the busiest CTA over that of the average one.

    python -m scripts.bench_work_list --num_kv_heads 8 --group 4
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from typing import Any

import numpy as np
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_kv_heads", 8, "KV heads.", lower_bound=1)
flags.DEFINE_integer("group", 4, "Query heads a KV head.", lower_bound=1)
flags.DEFINE_integer("num_ctas", 132, "SMs of the GPU.", lower_bound=1)
flags.DEFINE_integer("max_kv_len", 40_960, "Most positions of a sequence.", lower_bound=1)
flags.DEFINE_integer("chunk", 512, "Positions between the boundaries at which KV may be split.", lower_bound=64)
flags.DEFINE_integer("num_plans", 300, "Plans measured in each case.", lower_bound=1)
flags.DEFINE_boolean("json", False, "Print the results as one line of JSON.")


def cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name -> (q_lens, kv_lens)."""
    rng = np.random.default_rng(0)

    def decodes(n: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(n, np.int32), rng.integers(low, high + 1, n).astype(np.int32)

    q_lens, kv_lens = decodes(127, 500, 8_000)
    return {
        "1 decode, 4k": decodes(1, 4096, 4096),
        "32 decodes, 4k": decodes(32, 4096, 4096),
        "256 decodes, 2k": decodes(256, 2048, 2048),
        "64 decodes, 0.5k to 32k": decodes(64, 500, 32_000),
        "127 decodes, 0.5k to 8k, and a chunk of 1,921 at 8k": (np.append(q_lens, 1921), np.append(kv_lens, 8000)),
    }


def measure(q_lens: np.ndarray, kv_lens: np.ndarray) -> dict[str, Any]:
    """Plans one step over and over."""
    from kernels.ragged_paged_attention.work_list import WorkShape, loads, plan  # imports jax, for the package's sake

    shape = WorkShape(
        num_tokens=int(q_lens.sum()),
        num_seqs=len(q_lens),
        max_q_len=int(q_lens.max()),
        num_kv_heads=FLAGS.num_kv_heads,
        max_kv_len=FLAGS.max_kv_len,
        num_ctas=FLAGS.num_ctas,
        tile_tokens=1 if q_lens.max() == 1 else 128 // FLAGS.group,
        split_q_len=1,
        chunk=FLAGS.chunk,
    )
    out, times = np.zeros(shape.size, np.int32), []
    for _ in range(FLAGS.num_plans):
        start = time.perf_counter()
        plan(shape, q_lens, kv_lens, out=out)
        times.append(time.perf_counter() - start)
    load = loads(shape, out, q_lens, kv_lens)
    return {
        "median_us": round(statistics.median(times) * 1e6),
        "min_us": round(min(times) * 1e6),
        "num_items": int(shape.unpack(out)["cta_start"][-1]),
        "num_bytes": shape.size * 4,
        "max_over_mean": round(float(load.max() / load.mean()), 3),
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; everything is a flag")
    results: list[dict[str, Any]] = [{"case": name} | measure(*step) for name, step in cases().items()]
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs"
    about = {"benchmark": "work_list", "machine": machine, "python": platform.python_version(), "numpy": np.__version__}
    if FLAGS.json:
        print(json.dumps(about | {"results": results}))
        return
    print(f"{'median us':>9} {'min':>5} {'items':>6} {'KiB':>5} {'max/mean':>8}  step")
    for r in results:
        kib = r["num_bytes"] / 1024
        print(f"{r['median_us']:9} {r['min_us']:5} {r['num_items']:6} {kib:5.0f} {r['max_over_mean']:8.3f}  {r['case']}")
    print(", ".join(f"{key} {value}" for key, value in about.items()))


if __name__ == "__main__":
    app.run(main)
