"""The workloads that benchmarks share: for each request, in order of arrival, (prompt tokens, output tokens)."""

import random


def _nano_vllm() -> list[tuple[int, int]]:
    """The 256 requests of nano-vllm's bench.py: its draws, in its order, so that the totals are those that it publishes (142,827
    prompt and 133,966 output tokens)."""
    draw = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(draw.randint(100, 1024))
        for _ in range(prompts[-1]):
            draw.randint(0, 10000)  # the prompt's ids
    return [(n, draw.randint(100, 1024)) for n in prompts]


WORKLOADS: dict[str, list[tuple[int, int]]] = {
    "single": [(32, 64)],
    "eight": [(32, 64)] * 8,
    "equal_size": [(128, 128)] * 16,
    "short_long_mix": [(32, 32), (512, 128)] * 8,
    "nano_vllm": _nano_vllm(),
}
