"""Host time of a step: schedule, pack and update of steady decodes, with nothing of a model or a device.

Every running request decodes in every step; pages grow at their boundaries and are hashed when full, stop ids and lengths are
checked, and with --depth 1 a step is in flight while the next is scheduled. Times are wall-clock microseconds: on a shared machine
the median tells what a step costs there, the minimum what the code costs. Needs no jax but with --planners, which adds what packing
does on a Hopper GPU: the work list of each step's attention (32 query and 8 KV heads of 128, an H100's 132 SMs, a context of 40,960
tokens). What a plan costs depends on how long the sequences are: --prompt_len. A plan serves the steps after it while the batch
stays as it is, so the times of steps that made one are told apart ("planning"), and the mean counts them in their proportion.

    python -m scripts.bench_scheduler --num_running 64,256 --page_sizes 16
    python -m scripts.bench_scheduler --num_running 64,256 --page_sizes 64 --planners --prompt_len 2000
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.provenance import revision, write_json
from jaxserve.scheduling.scheduler import Scheduler
from scripts.bench.decode_steps import make_packer, make_scheduler

FLAGS = flags.FLAGS
flags.DEFINE_list("num_running", ["1", "64", "128", "256"], "Running decodes.")
flags.DEFINE_list("page_sizes", ["16", "64"], "Tokens a page.")
flags.DEFINE_integer("num_steps", 1000, "Steps measured in each case.", lower_bound=1)
flags.DEFINE_integer("depth", 1, "Steps in flight while the next is scheduled; 0 is synchronous.", lower_bound=0)
flags.DEFINE_enum("order", "fcfs", ["fcfs", "priority"], "Order of the scheduler.")
flags.DEFINE_integer("prompt_len", 20, "Tokens of the shortest prompt; page boundaries are spread out above it.", lower_bound=1)
flags.DEFINE_boolean("planners", False, "Plan attention's work too, as on a Hopper GPU.")
flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

NUM_WARM_UP = 50


def measure(scheduler: Scheduler, num_running: int, num_steps: int, depth: int, planned: bool = False) -> dict[str, float]:
    """Median and minimum microseconds of schedule, pack, update and all three, over `num_steps` steps of decodes only."""
    rng, in_flight, packer = np.random.default_rng(1), deque(), make_packer(scheduler, planned)
    times, plans = np.zeros((num_steps, 3)), np.zeros(num_steps, bool)
    for step in range(-NUM_WARM_UP, num_steps):
        tokens = rng.integers(10, 100_000, num_running).astype(np.int32)
        t0 = time.perf_counter()
        schedule = scheduler.schedule()
        t1 = time.perf_counter()
        assert schedule is not None
        num_planned = packer.work_lists.num_planned
        packer.newcomers(schedule)
        packer.pack(schedule)
        t2 = time.perf_counter()
        in_flight.append(schedule)
        if len(in_flight) <= depth:
            continue
        late = in_flight.popleft()
        t3 = time.perf_counter()
        scheduler.update(late, tokens)
        t4 = time.perf_counter()
        if step >= 0:
            assert schedule.num_decodes == num_running
            times[step], plans[step] = (t1 - t0, t2 - t1, t4 - t3), packer.work_lists.num_planned > num_planned
    result = {}
    for name, column in (("schedule", times[:, 0]), ("pack", times[:, 1]), ("update", times[:, 2]), ("total", times.sum(axis=1))):
        result[f"{name}_us"] = round(statistics.median(column) * 1e6, 1)
        result[f"{name}_min_us"] = round(float(column.min()) * 1e6, 1)
    totals = times.sum(axis=1)
    result["total_mean_us"] = round(float(totals.mean()) * 1e6, 1)
    if plans.any():
        result["planning_us"] = round(statistics.median(totals[plans]) * 1e6, 1)
        result["planning_share"] = round(float(plans.mean()), 3)
    return result


def main() -> None:
    sizes, num_steps, depth = [int(n) for n in FLAGS.num_running], FLAGS.num_steps, FLAGS.depth
    cases = [(page, cached, n) for page in map(int, FLAGS.page_sizes) for cached in (True, False) for n in sizes]
    results: list[dict[str, Any]] = []
    for page_size, cached, num_running in tqdm(cases, leave=False):
        gc.collect()
        scheduler = make_scheduler(num_running, page_size, cached, FLAGS.order, NUM_WARM_UP + num_steps + depth, FLAGS.prompt_len)
        case = {"page_size": page_size, "prefix_caching": cached, "num_running": num_running}
        results.append(case | measure(scheduler, num_running, num_steps, depth, FLAGS.planners))
    slopes = [
        {"page_size": rows[0]["page_size"], "prefix_caching": rows[0]["prefix_caching"]}
        | {"us_per_request": round((rows[-1]["total_us"] - rows[0]["total_us"]) / (sizes[-1] - sizes[0]), 3)}
        for rows in (results[i : i + len(sizes)] for i in range(0, len(results), len(sizes)))
        if sizes[-1] != sizes[0]
    ]
    about = {
        "benchmark": "scheduler",
        "depth": depth,
        "order": FLAGS.order,
        "num_steps": num_steps,
        "prompt_len": FLAGS.prompt_len,
        "planners": FLAGS.planners,
        "revision": revision(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    write_json(FLAGS.json, {**about, "results": results, "growth": slopes})
    if FLAGS.json == "-":
        return
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print("us a step, median (minimum)")
    heads = "".join(f"  {name:>15}" for name in ("schedule", "pack", "update", "total"))
    print(f"{'page':>5} {'cache':>5} {'running':>7}{heads}  {'mean':>6}  {'planning':>8}")
    for r in results:
        parts = (f"{r[f'{name}_us']:.1f} ({r[f'{name}_min_us']:.1f})" for name in ("schedule", "pack", "update", "total"))
        cached = "on" if r["prefix_caching"] else "off"
        print(f"{r['page_size']:>5} {cached:>5} {r['num_running']:>7}  " + "  ".join(f"{part:>15}" for part in parts), end="")
        print(f"  {r['total_mean_us']:>6.1f}  {r.get('planning_us', '-'):>8}")
    for slope in slopes:
        cached = "on" if slope["prefix_caching"] else "off"
        print(f"growth, page {slope['page_size']}, cache {cached}: {slope['us_per_request']:.3f} us a running request")


if __name__ == "__main__":
    run_command(main)
