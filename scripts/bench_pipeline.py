"""What micro-batches in flight on every stage of a pipeline gain over the same ones in turn, on virtual CPU devices.

    python -m scripts.bench_pipeline --stages=2 --json=FILE.json

One engine runs the same requests by turns: *in flight*, with a micro-batch on each stage, and *in turn*, each micro-batch waited
for before the next is dispatched. The micro-batches are the same ones: as many groups of requests as there are stages. A device
gets one thread of the CPU (XLA's matmuls would else share out each stage over all cores), so that no more stages work at once than
there are cores.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

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


def make_engine() -> Any:
    """An engine whose token budget is the prompts of one group."""
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={FLAGS.stages} --xla_cpu_multi_thread_eigen=false")
    from jaxserve import BucketPlan, Engine, EngineConfig
    from jaxserve.cli.common.bench_models import bench_model

    tokens, seqs, longest = FLAGS.group * FLAGS.prompt, FLAGS.group * FLAGS.stages, FLAGS.prompt + FLAGS.output
    config = EngineConfig(
        pipeline_parallel_size=FLAGS.stages,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_model_len=longest,
        num_pages=seqs * -(-longest // 16),
        page_size=16,
        enable_prefix_caching=False,
        bucket_plan=BucketPlan(decode=(FLAGS.group, seqs), mixed=((max(tokens, seqs), seqs),), head_rows=(FLAGS.group, seqs)),
        warm_up="all",
    )
    return Engine(bench_model(FLAGS.model, "float32", longest), config, eos_token_ids=())


def run(engine: Any, kind: str) -> tuple[float, list[int]]:
    """(seconds of all steps, the tokens of every request)."""
    from jaxserve import SamplingParams

    dispatch = engine.runner.dispatch_head
    if kind == "in turn":

        def dispatch_and_wait(*args: Any) -> Any:
            handle = dispatch(*args)
            handle.done.block_until_ready()
            return handle

        engine.runner.dispatch_head = dispatch_and_wait
    params = SamplingParams(temperature=0, max_tokens=FLAGS.output, ignore_eos=True)
    requests = []
    for i in range(FLAGS.group * FLAGS.stages):
        requests += engine.add_request(str(i), [(7 * i + t) % 1000 + 1 for t in range(FLAGS.prompt)], params)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    seconds = time.perf_counter() - start
    engine.runner.dispatch_head = dispatch
    return seconds, [token for request in requests for token in request.token_ids]


def main() -> None:
    engine = make_engine()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    expected = run(engine, KINDS[0])[1]
    for r in tqdm(range(FLAGS.rounds), desc=f"{FLAGS.stages} stages"):
        for kind in KINDS if r % 2 else KINDS[::-1]:
            before = engine.bubbles
            seconds, tokens = run(engine, kind)
            assert tokens == expected, "tokens depend on what is in flight"
            after = engine.bubbles
            times[kind].append(seconds)
            lost, busy = (sum((b.pb1, b.pb2, b.pb3)) for b in (before, after)), after.busy - before.busy
            lost = -next(lost) + next(lost)
            shares[kind].append(lost / (lost + busy))
    ratios = [turn / flight for flight, turn in zip(*(times[kind] for kind in KINDS), strict=True)]
    result = {
        "bench": "pipeline",
        "model": FLAGS.model,
        "stages": FLAGS.stages,
        "group": FLAGS.group,
        "seconds": {kind: round(statistics.median(times[kind]), 3) for kind in KINDS},
        "bubble_share": {kind: round(statistics.median(shares[kind]), 3) for kind in KINDS},
        "speedup": round(statistics.median(ratios), 3),
        "speedups": [round(x, 3) for x in ratios],
        "cores": os.cpu_count(),
    }
    said = ", ".join(f"{kind} {result['seconds'][kind]} s (bubbles {result['bubble_share'][kind]:.0%})" for kind in KINDS)
    print(f"{FLAGS.model}, {FLAGS.stages} stages, groups of {FLAGS.group}: {said}, {result['speedup']:.2f}x", flush=True)
    engine.close()
    write_json(FLAGS.json, result | provenance())


if __name__ == "__main__":
    run_command(main)
