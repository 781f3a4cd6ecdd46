"""What micro-batches in flight on every stage gain over the same ones in turn, where each stage has a process and a core.

    python -m scripts.bench_pipeline --stages=2 --json=FILE.json

One engine runs the same requests by turns: *in flight*, with a micro-batch on each stage, and *in turn*, each micro-batch waited
for before the next is dispatched. The micro-batches are the same ones: as many groups of requests as there are stages. A stage is a
process here, and held to one core before JAX starts. In one process the devices of a CPU share one pool of threads, so that a stage
alone already computes on all cores.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from tqdm import tqdm

from jaxserve.cli.common.bench_models import RANDOM
from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.provenance import provenance, write_json

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "tiny-small-head", f"A checkpoint, or random weights of {', '.join(RANDOM)}.")
flags.DEFINE_integer("stages", 2, "pipeline_parallel_size.", lower_bound=2)
flags.DEFINE_integer("group", 16, "Requests of a micro-batch.", lower_bound=1)
flags.DEFINE_integer("prompt", 32, "Tokens of a prompt.", lower_bound=1)
flags.DEFINE_integer("output", 64, "Tokens of an output.", lower_bound=2)
flags.DEFINE_integer("rounds", 7, "Runs of each kind, by turns.", lower_bound=2)
flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

KINDS = ("in flight", "in turn")


class Setup(NamedTuple):
    """What every stage's process must know."""

    model: str
    stages: int
    group: int
    prompt: int
    output: int
    coordinator: str
    cores: tuple[int, ...]  # of each stage


def join(setup: Setup, stage: int) -> tuple[Any, Any, Any]:
    """(the group, the model, the config) of a stage's process, which has its core alone from here on. The token budget is the
    prompts of one group."""
    os.sched_setaffinity(0, {setup.cores[stage]})
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxserve import BucketPlan, EngineConfig, join_hosts
    from jaxserve.cli.common.bench_models import bench_model

    hosts = join_hosts(setup.stages, stage, setup.coordinator)
    tokens, seqs, longest = setup.group * setup.prompt, setup.group * setup.stages, setup.prompt + setup.output
    config = EngineConfig(
        pipeline_parallel_size=setup.stages,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_model_len=longest,
        num_pages=seqs * -(-longest // 16),
        page_size=16,
        enable_prefix_caching=False,
        bucket_plan=BucketPlan(decode=(setup.group, seqs), mixed=((max(tokens, seqs), seqs),), head_rows=(setup.group, seqs)),
        warm_up="all",
    )
    return hosts, bench_model(setup.model, "float32", longest), config


def follow(setup: Setup, stage: int) -> None:
    """The process of a stage behind the first."""
    hosts, model, config = join(setup, stage)
    from jaxserve.engine.follower import Follower

    Follower(model, config, hosts=hosts).run()
    hosts.close()


def run(engine: Any, setup: Setup, kind: str) -> tuple[float, list[int]]:
    """(seconds of all steps, the tokens of every request)."""
    from jaxserve import SamplingParams

    dispatch = engine.runner.dispatch_head
    if kind == "in turn":

        def dispatch_and_wait(*args: Any) -> Any:
            handle = dispatch(*args)
            handle.done.block_until_ready()
            return handle

        engine.runner.dispatch_head = dispatch_and_wait
    params = SamplingParams(temperature=0, max_tokens=setup.output, ignore_eos=True)
    requests = []
    for i in range(setup.group * setup.stages):
        requests += engine.add_request(str(i), [(7 * i + t) % 1000 + 1 for t in range(setup.prompt)], params)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    seconds = time.perf_counter() - start
    engine.runner.dispatch_head = dispatch
    return seconds, [token for request in requests for token in request.token_ids]


def measure(engine: Any, setup: Setup) -> dict[str, Any]:
    """Times and bubbles of both kinds, by turns."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    expected = run(engine, setup, KINDS[0])[1]
    for r in tqdm(range(FLAGS.rounds), desc=f"{setup.stages} stages"):
        for kind in KINDS if r % 2 else KINDS[::-1]:
            before = engine.bubbles
            seconds, tokens = run(engine, setup, kind)
            assert tokens == expected, "tokens depend on what is in flight"
            after = engine.bubbles
            times[kind].append(seconds)
            lost, busy = (sum((b.pb1, b.pb2, b.pb3)) for b in (before, after)), after.busy - before.busy
            lost = -next(lost) + next(lost)
            shares[kind].append(lost / (lost + busy))
    ratios = [turn / flight for flight, turn in zip(*(times[kind] for kind in KINDS), strict=True)]
    return {
        "bench": "pipeline",
        "model": Path(setup.model).name,
        "stages": setup.stages,
        "group": setup.group,
        "seconds": {kind: round(statistics.median(times[kind]), 3) for kind in KINDS},
        "bubble_share": {kind: round(statistics.median(shares[kind]), 3) for kind in KINDS},
        "speedup": round(statistics.median(ratios), 3),
        "speedups": [round(x, 3) for x in ratios],
        "cores": setup.cores,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    available = sorted(os.sched_getaffinity(0))
    with socket.create_server(("", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    cores = tuple(available[i % len(available)] for i in range(FLAGS.stages))
    setup = Setup(FLAGS.model, FLAGS.stages, FLAGS.group, FLAGS.prompt, FLAGS.output, coordinator, cores)
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=follow, args=(setup, stage), daemon=True) for stage in range(1, setup.stages)]
    for other in others:
        other.start()
    hosts, model, config = join(setup, 0)
    from jaxserve import Engine

    engine = Engine(model, config, eos_token_ids=(), hosts=hosts)
    result = measure(engine, setup)
    said = ", ".join(f"{kind} {result['seconds'][kind]} s (bubbles {result['bubble_share'][kind]:.0%})" for kind in KINDS)
    where = f"{setup.stages} stages on cores {cores}, groups of {setup.group}"
    print(f"{setup.model}, {where}: {said}, {result['speedup']:.2f}x", flush=True)
    engine.close()
    hosts.close()
    for other in others:
        other.join()
    write_json(FLAGS.json, result | provenance())


if __name__ == "__main__":
    run_command(main)
