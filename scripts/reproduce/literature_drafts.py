"""What drafts were published to gain on an H100, beside what `jaxserve simulate --speculative` predicts of the same acceptance."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from jaxserve.cli.common.tables import table
from jaxserve.simulation.speculation import Speedup, predict
from jaxserve.step_times.analytic import Deployment
from jaxserve.step_times.commands import programs_of
from scripts.reproduce.published import EAGLE3_FIRST, EAGLE3_OF_SGLANG, EAGLE3_OF_VLLM, REPLAYED_OF_VLLM

CONTEXT = 300  # tokens of a sequence, about: single-turn MT-bench
LLAMA = Deployment.named("llama3.1-8b", "h100", programs=programs_of(1, False))
QWEN = Deployment.named("qwen3-8b", "h100", programs=programs_of(1, False))
HEAD = (
    "setting", "batch", "drafts", "tokens a step", "speed-up, published", "ours", "ours over published",
    "plain step (ms), published", "ours", "step with drafts (ms), published", "ours",
)  # fmt: skip
Row = tuple[str, Speedup, float, float | None]  # setting, ours, published speed-up, published ms of a plain step


def shares() -> list[float]:
    """Of EAGLE-3's chains: the first draft's as published, of the others what each added to the accepted length."""
    lengths = [1.0, 1.0 + EAGLE3_FIRST, *(length for k, (length, _) in EAGLE3_OF_VLLM.items() if k)]
    return [longer - shorter for shorter, longer in itertools.pairwise(lengths)]


def rows() -> list[Row]:
    found: list[Row] = []
    each, (_, plain) = shares(), EAGLE3_OF_VLLM[0]
    for k, (_, ms) in EAGLE3_OF_VLLM.items():
        if k:
            found.append(("vLLM, Llama-3.1-8B", predict(LLAMA, "eagle3", 1, CONTEXT, each[:k]), plain / ms, plain))
    for batch, factor in EAGLE3_OF_SGLANG.items():
        found.append(("SGLang, Llama-3.1-8B", predict(LLAMA, "eagle3", batch, CONTEXT, each[:3]), factor, None))
    for batch, (without, k, rate) in REPLAYED_OF_VLLM.items():
        ours = predict(QWEN, "ngram", batch, CONTEXT, [1.0] * k)
        found.append(("vLLM, Qwen3-8B, all drafts right", ours, rate / without, 1e3 * batch / without))
    return found


def drafts(folder: Path) -> tuple[str, dict[str, Any]]:
    """The sources' chains in their order. A published step with drafts lasts its tokens times the time of a token."""
    made, data = [], []
    for setting, ours, factor, plain in rows():
        step = None if plain is None else plain * ours.tokens / factor
        own = 1e3 * ours.plain_seconds, 1e3 * (ours.verify_seconds + ours.draft_seconds)
        ratios = factor, ours.factor, ours.factor / factor
        made.append([setting, ours.batch, ours.num_drafts, ours.tokens, *ratios, plain, own[0], step, own[1]])
        published = {"published_factor": factor, "published_plain_ms": plain, "published_step_ms": step}
        data.append({"setting": setting, "factor": ours.factor, **vars(ours), **published})
    return table(HEAD, made), {"shares": shares(), "rows": data}
