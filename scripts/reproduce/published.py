"""Published measurements that reproduce_literature puts beside the model, as data with their sources.

Owns the numbers. Those of Sarathi-Serve: Agrawal et al., OSDI 2024 (arXiv 2403.02310). Its artifact:
github.com/microsoft/sarathi-serve at 02d2567, folder osdi-experiments (Apache-2.0), which has results of the authors' own runs for
Yi-34B on two A100s (TP2). Its folders carry the numbers of an earlier draft's figures. Those of drafts name their sources below.
"""

from __future__ import annotations

# figure-2/decode.csv: milliseconds of a step of so many decodes, 1,023 positions of KV each at most.
DECODE_MS: dict[int, float] = {1: 46.80, 2: 47.50, 4: 48.85, 8: 69.68, 16: 77.25, 32: 87.90, 64: 127.81, 128: 189.33}
# figure-2/prefill.csv: milliseconds of a step of one whole prompt.
PREFILL_MS: dict[int, float] = {
    128: 48.09,
    256: 121.35,
    512: 105.58,
    1024: 214.30,
    2048: 366.03,
    4096: 757.60,
    8192: 1863.26,
    16384: 4407.50,
}
# table-2/results.csv: (milliseconds of the step, of its linear operators, of its attention).
SPLIT_MS: dict[str, tuple[float, float, float]] = {
    "4 decodes at 1k": (68.12, 25.50, 3.00),
    "a prompt of 1024": (217.24, 160.93, 13.67),
}
# figure-9/chunking-overhead.csv: milliseconds of a prompt alone, by tokens a chunk; 16384 is the whole prompt in one.
CHUNKED_MS: dict[int, dict[int, float]] = {
    2047: {512: 435.68, 1024: 444.17, 2048: 377.71, 16384: 378.13},
    4095: {512: 921.96, 1024: 932.26, 2048: 793.90, 16384: 775.44},
    8191: {512: 1958.53, 1024: 1946.24, 2048: 1643.37, 16384: 1754.16},
    16383: {512: 4512.83, 1024: 4357.55, 2048: 3651.59, 16384: 4535.00},
}
# figure-1/high_tail_latency.ipynb: P99 seconds between tokens by requests a second, read off its plot, about. Its run at 0.7
# failed. The paper's caption names arxiv_summarization, the notebook's command sharegpt: we follow the command.
TAIL_SECONDS: dict[str, dict[float, float]] = {"vllm-256": {0.55: 1.39, 1.0: 2.05}, "sarathi-1536": {0.55: 0.52, 1.0: 0.54}}

# Drafts, on MT-bench unless said. vLLM issue 20780 (2025-07): Llama-3.1-8B-Instruct, one request at a time, by drafts of a chain of
# EAGLE-3: (accepted length, milliseconds a token); 0: without drafts. Which GPU it does not say; the same author's runs before it
# were on an H100 (vLLM pull request 16937, 2025-04).
EAGLE3_OF_VLLM: dict[int, tuple[float, float]] = {
    0: (1.0, 7.07),
    2: (2.36, 4.32),
    3: (2.79, 4.09),
    4: (3.08, 4.05),
    5: (3.32, 4.13),
    6: (3.46, 4.20),
    7: (3.54, 4.29),
}
EAGLE3_FIRST = 0.75  # of that head's first drafts stand (vLLM pull request 17504, 2025-05)
# 2503.01840, table 3: an H100, Llama-3.1-8B-Instruct, chains of 3 drafts in SGLang 0.4.4: throughput over that
# without, by batch.
EAGLE3_OF_SGLANG: dict[int, float] = {
    2: 1.81,
    4: 1.82,
    8: 1.62,
    16: 1.48,
    24: 1.39,
    32: 1.32,
    48: 1.38,
    56: 1.34,
    64: 1.38,
}
# gist.github.com/jiangLLM/e95756b974f385846e4277b7ee68d6c8 (2026-10): Qwen3-8B in vLLM 0.31.0 on an H100, drafts replayed from
# saved outputs, so that all stand and cost nothing. By most sequences at a time: (tokens a second without, drafts of a chain,
# tokens a second with).
REPLAYED_OF_VLLM: dict[int, tuple[float, int, float]] = {1: (125, 12, 1309), 8: (898, 12, 4739), 32: (2726, 16, 9538)}
