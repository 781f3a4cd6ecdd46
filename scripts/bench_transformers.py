"""Times the peer: transformers' generate in static batches, on the workloads of `jaxserve bench throughput`.

Run by .venv-torch (make setup-torch), which has torch and transformers but not jax:

    .venv-torch/bin/python -m scripts.bench_transformers --model=tiny-qwen3 --workload=short_long_mix --max_num_seqs=8
    .venv-torch/bin/python -m scripts.bench_transformers --model=FOLDER_OR_GGUF --workload=eight --dtype=bfloat16

Requests are batched in order of arrival, at most --max_num_seqs at a time; prompts are padded on the left to the
batch's longest, and the batch runs to its longest output. Greedy, no early stop. Only output tokens that a request
asked for count. One untimed run, then medians over --repeats runs.

With --on_demand it makes the model, prints {"ready": true}, and then times one run for each line on stdin, printing
{"elapsed_time": s, "output_tokens_per_second": x} on a line: another program can so take runs in turn with it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from jaxserve.cli.common.bench_models import RANDOM
from jaxserve.cli.common.command import run_command
from jaxserve.workloads.workload import WORKLOADS
from scripts.bench.torch_model import make_model, versions

if TYPE_CHECKING:
    import torch  # pyright: ignore[reportMissingImports]

_MODEL = flags.DEFINE_string("model", "tiny-qwen3", f"A Hugging Face folder, a GGUF file, or one of {', '.join(RANDOM)}.")
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "bfloat16", "float32"], "Of weights and activations.")
_WORKLOAD = flags.DEFINE_enum("workload", "short_long_mix", sorted(WORKLOADS), "Which requests.")
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 8, "Most sequences of a batch.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs.", lower_bound=1)
_ON_DEMAND = flags.DEFINE_bool("on_demand", False, "Time one run for each line on stdin.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")


def make_batches(
    requests: list[tuple[int, int]], max_num_seqs: int, vocab_size: int
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """(input_ids i64[B, P], attention_mask i64[B, P], output tokens) of each static batch; prompts are random ids."""
    import torch  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(0)
    batches = []
    for start in range(0, len(requests), max_num_seqs):
        batch = requests[start : start + max_num_seqs]
        width = max(num_prompt for num_prompt, _ in batch)
        tokens, mask = np.zeros((2, len(batch), width), np.int64)
        for row, (num_prompt, _) in enumerate(batch):
            tokens[row, width - num_prompt :] = rng.integers(0, vocab_size, num_prompt)
            mask[row, width - num_prompt :] = 1
        num_output = max(num_output for _, num_output in batch)
        batches.append((torch.from_numpy(tokens), torch.from_numpy(mask), num_output))
    return batches


def run(model: Any, batches: list[tuple[torch.Tensor, torch.Tensor, int]], num_output_tokens: int) -> dict[str, float]:
    """Generates all batches, one after the other; seconds, and requested output tokens a second."""
    start = time.perf_counter()
    for tokens, mask, num_output in batches:
        generated = model.generate(tokens, attention_mask=mask, max_new_tokens=num_output)
        assert generated.shape == (len(tokens), tokens.shape[1] + num_output)
    elapsed = time.perf_counter() - start
    return {"elapsed_time": elapsed, "output_tokens_per_second": num_output_tokens / elapsed}


def main() -> None:
    requests = WORKLOADS[_WORKLOAD.value]
    num_output_tokens = sum(num_output for _, num_output in requests)
    model = make_model(_MODEL.value, _DTYPE.value)
    batches = make_batches(requests, _MAX_NUM_SEQS.value, model.config.vocab_size)
    run(model, batches, num_output_tokens)
    if _ON_DEMAND.value:
        print(json.dumps({"ready": True, **versions()}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(run(model, batches, num_output_tokens)), flush=True)
        return
    runs = [run(model, batches, num_output_tokens) for _ in range(_REPEATS.value)]
    result = {
        "model": _MODEL.value,
        "dtype": str(model.dtype).removeprefix("torch."),
        "workload": _WORKLOAD.value,
        "max_num_seqs": _MAX_NUM_SEQS.value,
        **{name: statistics.median(r[name] for r in runs) for name in runs[0]},
        "best_output_tokens_per_second": max(r["output_tokens_per_second"] for r in runs),
        "num_requests": len(requests),
        "runs": runs,
        **versions(),
    }
    print(
        f"transformers {result['transformers']}, {result['model']} {result['dtype']}, {result['workload']}, "
        f"static batches of {result['max_num_seqs']}: {result['output_tokens_per_second']:.0f} output tok/s "
        f"(median of {len(runs)}; best {result['best_output_tokens_per_second']:.0f})",
        file=sys.stderr,
    )
    if _JSON.value == "-":
        print(json.dumps(result))
    elif _JSON.value is not None:
        Path(_JSON.value).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run_command(main)
