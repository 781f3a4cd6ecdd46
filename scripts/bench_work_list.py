"""Host time and balance of attention's work lists, on steps drawn at random or on the steps of a trace; no device.

Times are wall-clock microseconds of `work_list.plan`: on a shared machine the median tells what a plan costs there, the minimum
what the code costs. max_over_mean: the work of the busiest CTA over that of the average one. max_over_uncut: over what the
average would be if no sequence were split, as every split adds to the work: the better of two plans has less of it.

    python -m scripts.bench_work_list --num_kv_heads 8 --group 4
    python -m scripts.bench_work_list --trace azure_conv_2023.csv.gz --num_running 32,64,128,256
    python -m scripts.bench_work_list --longest

Of a trace the real scheduler makes the steps: its requests are sent at once and served by at most so many sequences, and every
`stride`th step in which at least 3/4 of these run is planned. kv_read: positions that the plans load, over those that each query
tile's last token sees, once a tile and KV head: of decodes alone (there it is the KV there is), and of steps with chunks.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from typing import Any

import numpy as np
from absl import flags

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import refuse_flags
from jaxserve.cli.common.provenance import provenance, write_json

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_kv_heads", 8, "KV heads.", lower_bound=1)
flags.DEFINE_integer("group", 4, "Query heads a KV head.", lower_bound=1)
flags.DEFINE_integer("num_ctas", 132, "SMs of the GPU.", lower_bound=1)
flags.DEFINE_integer("max_kv_len", 40_960, "Most positions of a sequence.", lower_bound=1)
flags.DEFINE_integer("chunk", 512, "Positions between the boundaries at which KV may be split.", lower_bound=64)
flags.DEFINE_integer("num_plans", 300, "Plans measured in each case.", lower_bound=1)
flags.DEFINE_string(
    "trace", None, "CSV file of prompt and output lengths (jaxserve.workloads.workload.trace): plan its steps instead."
)
flags.DEFINE_list("num_running", ["32", "64", "128", "256"], "--trace: most sequences that run at a time, one case each.")
flags.DEFINE_integer("stride", 7, "--trace: plan every so many steps.", lower_bound=1)
flags.DEFINE_boolean("longest", False, "Plan 16 to 32 decodes of max_kv_len positions instead, by max_kv_len and chunk.")
flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
LONGEST_KV, LONGEST_CHUNKS = (1024, 2048, 4096, 8192), (512, 256, 128)  # of --longest


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
        "128 decodes, 0.2k to 3k": decodes(128, 200, 3_000),
        "127 decodes, 0.5k to 8k, and a chunk of 1,921 at 8k": (np.append(q_lens, 1921), np.append(kv_lens, 8000)),
    }


def shape_of(q_lens: np.ndarray) -> Any:
    """The WorkShape of a step, as if its bucket had its size."""
    from kernels.ragged_paged_attention.work_list import WorkShape  # imports jax, for the package's sake

    return WorkShape(
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


def measure(q_lens: np.ndarray, kv_lens: np.ndarray) -> dict[str, Any]:
    """Plans one step over and over."""
    from kernels.ragged_paged_attention.work_list import loads, plan

    shape = shape_of(q_lens)
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


def steps_of_trace(num_running: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(q_lens, kv_lens) of the steps of --trace: 8 requests for each of num_running, or as many as it has."""
    from jaxserve.request import Request
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.scheduling.config import SchedulerConfig
    from jaxserve.scheduling.page_pool import PagePool
    from jaxserve.scheduling.scheduler import Scheduler
    from jaxserve.workloads.workload import trace

    page_size = 64
    limits = SchedulerConfig(max_model_len=FLAGS.max_kv_len, max_num_seqs=num_running, max_num_batched_tokens=2048)
    pool = PagePool(num_running * -(-FLAGS.max_kv_len // page_size), page_size, False)
    scheduler = Scheduler(limits, pool)
    for i, r in enumerate(trace(FLAGS.trace, 8 * num_running, FLAGS.max_kv_len).requests):
        params = SamplingParams(max_tokens=r.num_output_tokens, ignore_eos=True)
        scheduler.add(Request(f"r{i}", [0] * r.num_prompt_tokens, params, arrival=float(i)))
    steps, number, tokens = [], 0, np.ones(num_running, np.int32)
    while (schedule := scheduler.schedule()) is not None:
        if number % FLAGS.stride == 0 and schedule.num_seqs >= 0.75 * num_running:
            steps.append((schedule.q_lens.astype(np.int32), (schedule.starts + schedule.q_lens).astype(np.int32)))
        scheduler.update(schedule, tokens[: schedule.num_seqs])
        number += 1
    return steps


def evenness(shape: Any, packed: np.ndarray, q_lens: np.ndarray, kv_lens: np.ndarray) -> tuple[float, float]:
    """(max_over_mean, max_over_uncut) of a plan."""
    from kernels.ragged_paged_attention.work_list import ITEM_COST, loads

    load = loads(shape, packed, q_lens, kv_lens)
    num_tiles = shape.num_kv_heads * int((-(-q_lens // shape.tile_tokens)).sum())
    added = ITEM_COST * (int(shape.unpack(packed)["cta_start"][-1]) - num_tiles)
    return load.max() / load.mean(), load.max() * shape.num_ctas / (load.sum() - added)


def balance(num_running: int) -> dict[str, Any]:
    """How even the plans of a trace's steps are, and what they read."""
    from kernels.ragged_paged_attention import work_list

    over_mean, over_uncut = [], []
    read, seen = {"decode": 0, "mixed": 0}, {"decode": 0, "mixed": 0}
    steps = steps_of_trace(num_running)
    for q_lens, kv_lens in steps:
        shape = shape_of(q_lens)
        packed = work_list.plan(shape, q_lens, kv_lens)
        mean, uncut = evenness(shape, packed, q_lens, kv_lens)
        over_mean.append(mean)
        over_uncut.append(uncut)
        kind = "decode" if q_lens.max() == 1 else "mixed"
        read[kind] += work_list.positions_read(shape, packed, q_lens, kv_lens)
        seen[kind] += work_list.positions_seen(shape, q_lens, kv_lens)
    return {
        "num_running": num_running,
        "num_steps": len(steps),
        "max_over_mean": {"median": round(float(np.median(over_mean)), 3), "max": round(max(over_mean), 3)},
        "steps_over_1.1": round(float(np.mean(np.array(over_mean) > 1.1)), 3),
        "max_over_uncut": {"median": round(float(np.median(over_uncut)), 3), "max": round(max(over_uncut), 3)},
        "kv_read": {kind: round(read[kind] / seen[kind], 4) if seen[kind] else None for kind in read},
    }


def longest(max_kv_len: int, chunk: int) -> dict[str, Any]:
    """The worst max_over_mean and the mean max_over_uncut of 16 to 32 decodes, all of max_kv_len positions, in a bucket of 32."""
    from kernels.ragged_paged_attention.work_list import plan

    shape = dataclasses.replace(shape_of(np.ones(32, np.int32)), max_kv_len=max_kv_len, chunk=chunk)
    found = {}
    for n in range(16, 33):
        step = np.ones(n, np.int32), np.full(n, max_kv_len, np.int32)
        found[n] = evenness(shape, plan(shape, *step), *step)
    worst = max(found, key=lambda n: found[n])
    return {
        "max_kv_len": max_kv_len,
        "chunk": chunk,
        "max_over_mean": round(float(found[worst][0]), 3),
        "at": worst,
        "max_over_uncut": round(float(np.mean([uncut for _, uncut in found.values()])), 3),
    }


def show_balance(results: list[dict[str, Any]]) -> None:
    print("running steps  max/mean: median    max  > 1.1  max/uncut: median    max  KV read: decode   mixed")
    for r in results:
        mean, uncut = r["max_over_mean"], r["max_over_uncut"]
        decode, mixed = (r["kv_read"][kind] or float("nan") for kind in ("decode", "mixed"))
        print(
            f"{r['num_running']:7} {r['num_steps']:5} {mean['median']:17.3f} {mean['max']:6.3f} {r['steps_over_1.1']:6.1%} "
            f"{uncut['median']:18.3f} {uncut['max']:6.3f} {decode:16.4f} {mixed:7.4f}"
        )


def show_longest(results: list[dict[str, Any]]) -> None:
    print("max_kv_len  chunk  max/mean (at decodes)  max/uncut")
    for r in results:
        print(f"{r['max_kv_len']:10} {r['chunk']:6} {r['max_over_mean']:9.3f} ({r['at']:2}) {r['max_over_uncut']:17.3f}")


def show_times(results: list[dict[str, Any]]) -> None:
    print(f"{'median us':>9} {'min':>5} {'items':>6} {'KiB':>5} {'max/mean':>8}  step")
    for r in results:
        kib = r["num_bytes"] / 1024
        print(f"{r['median_us']:9} {r['min_us']:5} {r['num_items']:6} {kib:5.0f} {r['max_over_mean']:8.3f}  {r['case']}")


def main() -> None:
    results: list[dict[str, Any]]
    if FLAGS.longest:
        refuse_flags("--longest has cases of its own", "trace", "max_kv_len", "chunk", "num_running", "stride", "num_plans")
        results, show = [longest(n, chunk) for n in LONGEST_KV for chunk in LONGEST_CHUNKS], show_longest
    elif FLAGS.trace is not None:
        results, show = [balance(int(n)) for n in FLAGS.num_running], show_balance
    else:
        results, show = [{"case": name} | measure(*step) for name, step in cases().items()], show_times
    about = {"benchmark": "work_list", "machine": f"{platform.machine()}, {os.cpu_count()} CPUs", "numpy": np.__version__}
    if FLAGS.json != "-":
        show(results)
        print(", ".join(f"{key} {value}" for key, value in about.items()))
    write_json(FLAGS.json, about | {"results": results} | provenance())


if __name__ == "__main__":
    run_command(main)
