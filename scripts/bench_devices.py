"""An engine's decode step on 1, 2, 4 and 8 devices, by turns: its time, what the host takes for it, and how long programs compile.

    python -m scripts.bench_devices --json=FILE.json

An engine for each number of devices is made in one process, and they take ten steps by turns. The devices are virtual ones of this
CPU and share its cores, so that more of them can only cost time: what is measured is the price of cutting a model, not its gain.
*Host* is the processor time of the engine's thread for a step: scheduling, packing, dispatch and taking tokens in.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from absl import flags

from jaxserve.cli.common.bench_models import RANDOM
from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.provenance import provenance, write_json

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "tiny-qwen3", f"A checkpoint, or random weights of {', '.join(RANDOM)}.")
flags.DEFINE_list("devices", ["1", "2", "4", "8"], "Numbers of devices.")
flags.DEFINE_enum("deterministic", "bucket", ["bucket", "always"], "As of an engine.")
flags.DEFINE_integer("batch", 8, "Sequences of a step.", lower_bound=1)
flags.DEFINE_integer("rounds", 15, "Turns of ten steps each.", lower_bound=1)
flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

STEPS = 10  # of a turn
PROMPT = 32


def make_engine(num_devices: int) -> tuple[Any, float]:
    """An engine whose programs are all compiled, and the seconds that this took. No compilation cache is read. One device has the
    kernels that several have."""
    from jaxserve import Engine, EngineConfig
    from jaxserve.cli.common.bench_models import bench_model

    longest = PROMPT + STEPS * (FLAGS.rounds + 1) + 16
    config = EngineConfig(
        tensor_parallel_size=num_devices,
        deterministic=FLAGS.deterministic,
        attention_backend="xla",
        matmul_backend="xla",
        moe_backend="xla",
        max_num_seqs=FLAGS.batch,
        max_num_batched_tokens=256,
        max_model_len=longest,
        num_pages=FLAGS.batch * -(-longest // 16),
        page_size=16,
        warm_up="all",
        compilation_cache_dir="",
    )
    model, start = bench_model(FLAGS.model, "float32", longest), time.perf_counter()
    return Engine(model, config, eos_token_ids=()), time.perf_counter() - start


def begin(engine: Any) -> None:
    """Requests that decode for all rounds."""
    import numpy as np

    from jaxserve import SamplingParams

    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=STEPS * (FLAGS.rounds + 1) + 8, ignore_eos=True, detokenize=False)
    for i in range(FLAGS.batch):
        engine.add_request(str(i), rng.integers(0, engine.config.model.vocab_size, PROMPT).tolist(), params)
    take_turn(engine)


def take_turn(engine: Any) -> tuple[float, float]:
    """(seconds, processor seconds of this thread) a step, the last one waited for."""
    wall, host = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        engine.step()
    host = time.thread_time() - host
    engine.runner.state.rows.last_tokens.block_until_ready()
    return (time.perf_counter() - wall) / STEPS, host / STEPS


def main() -> None:
    sizes = sorted({int(n) for n in FLAGS.devices})
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(sizes)}"
    engines, compiled, turns = {}, {}, {n: [] for n in sizes}
    for n in sizes:
        engines[n], compiled[n] = make_engine(n)
        print(f"{n} devices: {engines[n].runner.programs.num_compiled} programs compiled in {compiled[n]:.1f} s", flush=True)
        begin(engines[n])
    for _ in range(FLAGS.rounds):
        for n, engine in engines.items():
            turns[n].append(take_turn(engine))
    results = {}
    for n, found in turns.items():
        step, host = (1e3 * statistics.median(x) for x in zip(*found, strict=True))
        results[n] = {"step_ms": step, "host_ms": host, "compile_seconds": compiled[n], "turns": found}
        first = results[sizes[0]]["step_ms"]
        print(f"{n} devices: step {step:.2f} ms ({step / first:.2f}x), of which the host's thread {host:.2f} ms", flush=True)
        engines[n].close()
    how = {name: FLAGS[name].value for name in ("model", "deterministic", "batch", "rounds")}
    write_json(FLAGS.json, {"benchmark": "devices", **how, "results": results, **provenance()})


if __name__ == "__main__":
    run_command(main)
