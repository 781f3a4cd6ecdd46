"""Times a third peer: tinyorca (github.com/junuxyz/tinyorca, at 2ffd14d), on the workloads of `jaxserve bench throughput`.
`bench_engine --tinyorca=` runs it.

It is a checkout that is not installed: `bench_engine --peer=PYTHON --tinyorca=FOLDER` runs it by the Python that has transformers.
Weights are random: no time depends on them. It prints {"ready": true}, and then times one run for each line on stdin, as
`bench_transformers --on_demand` does. Greedy, no early stop; KV slots are enough for all requests at once.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np
from absl import flags

from jaxserve.cli.common.command import run_command
from jaxserve.workloads.workload import WORKLOADS
from scripts.bench.torch_model import make_model, versions

_FOLDER = flags.DEFINE_string("tinyorca", None, "A checkout of tinyorca.", required=True)
_MODEL = flags.DEFINE_string("model", "tiny-qwen3", "A Qwen3 of bench_models.RANDOM.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["bfloat16", "float32"], "Of weights and activations.")
_WORKLOAD = flags.DEFINE_enum("workload", "short_long_mix", sorted(WORKLOADS), "Which requests.")
_SEQS = flags.DEFINE_integer("max_num_seqs", 8, "Most sequences of an iteration.", lower_bound=1)


def make_engine(model: str, dtype: str) -> Any:
    """tinyorca's engine, with the random weights that transformers makes."""
    import torch  # pyright: ignore[reportMissingImports]
    from tinyorca.config import OrcaConfig  # pyright: ignore[reportMissingImports]
    from tinyorca.core.engine import OrcaEngine  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="bench_tinyorca_") as folder:
        make_model(model, dtype).save_pretrained(folder)
        return OrcaEngine(OrcaConfig(model=folder), device="cpu", dtype=getattr(torch, dtype))


def run(engine: Any, requests: list[tuple[int, int]], max_num_seqs: int) -> dict[str, float]:
    """Serves all requests, which come at once; seconds, and output tokens a second."""
    from tinyorca.core.request import Request, SamplingConfig  # pyright: ignore[reportMissingImports]
    from tinyorca.core.scheduler import OrcaScheduler, RequestPool  # pyright: ignore[reportMissingImports]

    rng, pool, given = np.random.default_rng(0), RequestPool(), []
    for i, (num_prompt, num_output) in enumerate(requests):
        prompt = tuple(rng.integers(0, engine.hf_model.config.vocab_size, num_prompt).tolist())
        given.append(Request(f"request-{i}", prompt, SamplingConfig(max_new_tokens=num_output)))
        pool.push(given[-1])
    scheduler = OrcaScheduler(engine, pool, max_num_seqs, n_slots=sum(map(sum, requests)))
    start = time.perf_counter()
    for _ in scheduler.schedule():
        pass
    elapsed = time.perf_counter() - start
    assert [len(request.output_ids) for request in given] == [n for _, n in requests]
    return {"elapsed_time": elapsed, "output_tokens_per_second": sum(n for _, n in requests) / elapsed}


def main() -> None:
    sys.path.insert(0, _FOLDER.value)
    requests = WORKLOADS[_WORKLOAD.value]
    engine = make_engine(_MODEL.value, _DTYPE.value)
    run(engine, requests, _SEQS.value)
    print(json.dumps({"ready": True, **versions()}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(run(engine, requests, _SEQS.value)), flush=True)


if __name__ == "__main__":
    run_command(main)
