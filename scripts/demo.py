"""A real model answers eight chat prompts at once, streaming: SmolLM2-135M-Instruct, whose weights come from the package index.

The terminal shows the answers as they grow, side by side in time; then one summary line. Greedy, so that the answers are the same
every time; those of four prompts are compared with tests/goldens/smollm2_greedy.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import define_layout_flags, layout_options

_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "Most output tokens of each prompt.", lower_bound=1)
_STREAM = flags.DEFINE_bool("stream", sys.stdout.isatty(), "Redraw the answers while they grow (a terminal is needed).")
_CHECK = flags.DEFINE_bool("check", True, "Compare with the golden tokens and fail if they differ.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights and activations.")
define_layout_flags()

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens" / "smollm2_greedy.json"
PROMPTS = (
    "Write a short poem about a fox in the snow.",
    "Explain photosynthesis to a ten-year-old.",
    "Suggest three names for a grey cat.",
    "Give me a simple recipe for pancakes.",
)


class Screen:
    """Eight growing answers. On a terminal they are redrawn in place; elsewhere each is printed when it is complete."""

    def __init__(self, prompts: list[str], live: bool):
        self.prompts, self.live, self._lines = prompts, live, 0
        self._drawn = 0.0

    def show(self, texts: list[str], done: list[bool], *, force: bool = False) -> None:
        if not self.live or (not force and time.monotonic() - self._drawn < 0.05):
            return
        self._drawn = time.monotonic()
        width = min(shutil.get_terminal_size().columns, 140) - 2
        room = max(1, (shutil.get_terminal_size().lines - 2) // len(texts) - 1)
        lines = []
        for prompt, text, finished in zip(self.prompts, texts, done, strict=True):
            lines.append(f"\x1b[1m{prompt[:width]}\x1b[0m")
            wrapped = textwrap.wrap(" ".join(text.split()) + ("" if finished else " ▌"), width) or [""]
            lines += [f"  {line}" for line in wrapped[-room:]]
        sys.stdout.write((f"\x1b[{self._lines}F" if self._lines else "") + "\x1b[J" + "\n".join(lines) + "\n")
        sys.stdout.flush()
        self._lines = len(lines)

    def complete(self, index: int, text: str) -> None:
        if not self.live:
            print(f"\n> {self.prompts[index]}\n{text.strip()}", flush=True)


def golden_answers(dtype: str) -> list[dict[str, Any]]:
    """{prompt, token_ids, ...} of the four prompts whose greedy tokens transformers gave."""
    if not GOLDENS.exists():
        raise app.UsageError(f"{GOLDENS}, four of the prompts and transformers' answers, is missing: git checkout brings it back")
    return [{"prompt": case["prompt"], **case[dtype]} for case in json.loads(GOLDENS.read_text())["cases"]]


def main() -> None:
    from scripts.fetch_demo_model import fetch_or_exit

    goldens = golden_answers(_DTYPE.value)
    started = time.monotonic()
    path = fetch_or_exit()
    from jaxserve import LLM, BucketPlan, SamplingParams

    questions = [g["prompt"] for g in goldens] + list(PROMPTS)
    # A plan for just this batch: all prompts in one step, then eight decodes a step. The default plan has up to 24 programs.
    plan = BucketPlan(decode=(8,), mixed=((320, 8),), head_rows=(8,))
    print(f"loading {path.name} and compiling {len(plan.buckets) + 1} programs ...", file=sys.stderr)
    llm = LLM(path, dtype=_DTYPE.value, max_model_len=512, bucket_plan=plan, **layout_options())
    for key in (*plan.buckets, (8, False)):
        llm.engine.runner.programs.get(key)
    ready = time.monotonic()
    print(f"{path.name} loaded, {llm.engine.runner.programs.num_compiled} programs compiled in {ready - started:.1f} s\n")
    prompts = llm.chat_prompts([[{"role": "user", "content": q}] for q in questions])
    texts, done, outputs = [""] * len(prompts), [False] * len(prompts), {}
    screen = Screen(questions, _STREAM.value)
    for index, output in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=_MAX_TOKENS.value)):
        texts[index], done[index] = output.outputs[0].text, output.finished
        screen.show(texts, done, force=output.finished)
        if output.finished:
            outputs[index] = output
            screen.complete(index, output.outputs[0].text)
    print("\n" + summary(llm, [outputs[i] for i in range(len(prompts))], time.monotonic() - ready))
    if _CHECK.value:
        check(goldens, [outputs[i] for i in range(len(goldens))])


def summary(llm: Any, outputs: list[Any], seconds: float) -> str:
    """One line: tokens/s, time to first token, steps, programs, padding."""
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    ttft = sorted(o.metrics.ttft for o in outputs)
    stats = llm.engine.stats
    return (
        f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tok/s | TTFT median {1e3 * ttft[len(ttft) // 2]:.0f} ms, "
        f"max {1e3 * ttft[-1]:.0f} ms | {stats.num_steps} steps | {len(stats.padding.steps)} buckets used, "
        f"{llm.engine.runner.programs.num_compiled} programs compiled | padding {100 * stats.padding.padding_share:.0f}%"
    )


def check(goldens: list[dict[str, Any]], outputs: list[Any]) -> None:
    """Exits with 1 unless the greedy tokens are transformers' own."""
    wrong = []
    for golden, output in zip(goldens, outputs, strict=True):
        n = min(len(golden["token_ids"]), _MAX_TOKENS.value)
        if output.outputs[0].token_ids[:n] != golden["token_ids"][:n]:
            wrong.append(golden["prompt"])
    if wrong:
        raise app.UsageError(f"greedy tokens differ from transformers' for: {'; '.join(wrong)}")
    print(f"greedy tokens of {len(goldens)} prompts equal transformers'")


if __name__ == "__main__":
    run_command(main)
