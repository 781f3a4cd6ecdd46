"""Speculation on against off: the same prompts, by turns, on two engines that share their weights.

    python -m scripts.bench_speculative --json=benchmarks/results/cpu/speculative.json

Three tasks for the demo's model, of eight prompts each: rewriting a paragraph and editing code, whose answers repeat their prompts,
and ordinary chat. Each is run in batches of several sizes, 8 at most; where a size does not divide 8, the last batch is smaller. A
figure is output tokens a second of the whole run, its prompts' pages being in both prefix caches; the ratio is the median over
pairs of runs. All programs are compiled before. Outputs that differ are counted: greedy ones can, where two logits nearly tie and
the shapes of the steps are not the same. How nearly is said too: the largest lead of the best token over the second, in
log-probability, where an output with speculation first has another token than one without (drawn ones part at any lead: none is
said). The speculating side's timed steps are counted by bucket (in the JSON) and by the drafts of a sequence.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import Counter
from typing import Any

from absl import app, flags
from tqdm import tqdm

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.provenance import provenance, write_json
from scripts.bench.draft_tasks import TASKS

_BATCHES = flags.DEFINE_list("batches", ["1", "2", "4", "8"], "Prompts at a time, 8 at most.")
_TASKS = flags.DEFINE_list("tasks", ["rewrite", "code", "chat"], "Which of rewrite, code and chat.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed pairs of runs.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Most output tokens of each prompt.", lower_bound=2)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
_METHOD = flags.DEFINE_string("method", "ngram", "What drafts: a method of speculative_config.")
_DRAFT_MODEL = flags.DEFINE_string("draft_model", None, "The checkpoint that drafts, of a method that has one.")
_DRAFTS = flags.DEFINE_integer("num_speculative_tokens", 8, "Most drafts of a sequence and step.", lower_bound=1)
_LOOKUP_MIN = flags.DEFINE_integer("prompt_lookup_min", None, "Fewest tokens that must recur.", lower_bound=1)
_LOOKUP_MAX = flags.DEFINE_integer("prompt_lookup_max", None, "Most tokens that are looked for.", lower_bound=1)
_ADAPTIVE = flags.DEFINE_bool("adaptive", True, "As many drafts as pay; otherwise always all.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="")


def make_llms() -> dict[str, Any]:
    """{"off": ..., "on": ...}: two LLMs, one set of weights."""
    from jaxserve import LLM
    from scripts.fetch_demo_model import fetch_or_exit

    options: dict[str, Any] = engine_options() | {"warm_up": "all"}
    defaults = {"max_num_seqs": max(map(int, _BATCHES.value)), "max_num_batched_tokens": 512, "max_model_len": 1024}
    defaults["num_pages"] = 16 * defaults["max_num_seqs"] + 64  # of 64 tokens: room for every prompt in the prefix cache
    options |= {name: value for name, value in defaults.items() if options[name] is None}
    off = LLM(flags.FLAGS.model or str(fetch_or_exit()), **options)
    speculation = {"method": _METHOD.value, "num_speculative_tokens": _DRAFTS.value, "adaptive": _ADAPTIVE.value}
    speculation |= {"model": _DRAFT_MODEL.value, "prompt_lookup_min": _LOOKUP_MIN.value, "prompt_lookup_max": _LOOKUP_MAX.value}
    options["speculative_config"] = speculation
    functions = off.engine.runner.programs.functions
    weights = dict(zip(functions.paths, functions.weights, strict=True))
    return {"off": off, "on": LLM.from_params(weights, functions.model_config, tokenizer=off.tokenizer, **options)}


def run(llm: Any, prompts: list[Any], batch: int, logprobs: int | None = None) -> dict[str, Any]:
    """The prompts, `batch` at a time; seconds, counts, and of each the tokens and as many log-probabilities as asked for."""
    from jaxserve import SamplingParams

    stats = llm.engine.stats
    names = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    before = {name: getattr(stats, name) for name in names}
    buckets, lengths = Counter(stats.padding.steps), Counter(stats.steps_by_num_drafts)
    params = SamplingParams(temperature=_TEMPERATURE.value, max_tokens=_MAX_TOKENS.value, seed=0, logprobs=logprobs)
    outputs = []
    start = time.perf_counter()
    for i in range(0, len(prompts), batch):
        outputs += llm.generate(prompts[i : i + batch], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    samples = [output.outputs[0] for output in outputs]
    tokens = [list(sample.token_ids) for sample in samples]
    counts = {name: getattr(stats, name) - before[name] for name in names}
    counts |= {"buckets": Counter(stats.padding.steps) - buckets, "lengths": stats.steps_by_num_drafts - lengths}
    found = {"tokens": tokens, "logprobs": [sample.logprobs for sample in samples]}
    return {"seconds": seconds, "num_tokens": sum(map(len, tokens)), **found, **counts}


def largest_gap_where_they_part(off: dict[str, Any], ons: list[dict[str, Any]]) -> float | None:
    """By how much the best token was ahead of the second, in log-probability by the `off` run (made with two of each token), where
    outputs of the `ons` first have another token than its own: the largest of all these outputs. None if there are none."""
    gaps = []
    for on in ons:
        for expected, logprobs, tokens in zip(off["tokens"], off["logprobs"], on["tokens"], strict=True):
            for token, entry, other in zip(expected, logprobs, tokens, strict=False):
                if token != other:
                    best, second = sorted((x.logprob for x in entry.values()), reverse=True)[:2]
                    gaps.append(best - second)
                    break
    return max(gaps, default=None)


def compare(llms: dict[str, Any], task: str, batch: int) -> dict[str, Any]:
    """Both sides in turn, the first pair untimed and with log-probabilities; medians."""
    prompts = llms["off"].chat_prompts([[{"role": "user", "content": text}] for text in TASKS[task]])
    untimed = {side: run(llms[side], prompts, batch, logprobs=2) for side in ("on", "off")}
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for i in range(_ROUNDS.value):
        for side in ("on", "off") if i % 2 else ("off", "on"):
            runs[side].append(run(llms[side], prompts, batch))
    rates = {side: [r["num_tokens"] / r["seconds"] for r in some] for side, some in runs.items()}
    total = {name: sum(r[name] for r in runs["on"]) for name in runs["on"][0] if name.startswith("num_")}
    buckets, lengths = (sum((r[name] for r in runs["on"]), Counter()) for name in ("buckets", "lengths"))
    pairs = zip(runs["off"], runs["on"], strict=True)
    gap = None if _TEMPERATURE.value else largest_gap_where_they_part(untimed["off"], [untimed["on"], *runs["on"]])
    return {
        "task": task,
        "batch": batch,
        "output_tokens_per_second_off": statistics.median(rates["off"]),
        "output_tokens_per_second_on": statistics.median(rates["on"]),
        "ratio": statistics.median(on / off for off, on in zip(rates["off"], rates["on"], strict=True)),
        "runs": rates,
        "acceptance": total["num_accepted_tokens"] / max(1, total["num_draft_tokens"]),
        "draft_tokens_per_step": total["num_draft_tokens"] / total["num_steps"],
        "tokens_per_step": total["num_tokens"] / total["num_steps"],
        "num_steps": total["num_steps"],
        "steps_by_bucket": {str(bucket): n for bucket, n in sorted(buckets.items())},
        "steps_by_num_drafts": {str(k): n for k, n in sorted(lengths.items())},
        "num_outputs": len(prompts) * _ROUNDS.value,
        "num_outputs_that_differ": sum(a != b for off, on in pairs for a, b in zip(off["tokens"], on["tokens"], strict=True)),
        "largest_gap_where_they_part": gap,
    }


def chosen_cases() -> list[tuple[str, int]]:
    """(task, batch) of all that is to be run. UsageError for what cannot be."""
    unknown = set(_TASKS.value) - set(TASKS)
    if unknown or not _TASKS.value:
        raise app.UsageError(f"--tasks: {', '.join(sorted(unknown)) or 'nothing'} must be of {', '.join(TASKS)}")
    most = min(len(TASKS[task]) for task in _TASKS.value)
    for batch in _BATCHES.value or ["nothing"]:
        if not batch.isdecimal() or not 1 <= int(batch) <= most:
            raise app.UsageError(f"--batches: {batch} must be an integer from 1 to {most}, the prompts that a task has")
    return [(task, int(batch)) for task in _TASKS.value for batch in _BATCHES.value]


def main() -> None:
    cases = chosen_cases()
    llms = make_llms()
    print(llms["on"].engine.describe(), file=sys.stderr)
    results = [compare(llms, task, batch) for task, batch in tqdm(cases, file=sys.stderr)]
    with contextlib.redirect_stdout(sys.stderr if _JSON.value == "-" else sys.stdout):
        report(results)
    plan = str(llms["on"].engine.config.plan)
    about = {"benchmark": "speculative", "max_tokens": _MAX_TOKENS.value, "rounds": _ROUNDS.value, "plan": plan}
    write_json(_JSON.value, {**about, "results": results, **provenance()})


def report(results: list[dict[str, Any]]) -> None:
    print(
        "task     batch   tok/s off     on   ratio   accepted   drafts a step   tokens a step   outputs that differ   largest "
        "gap   steps by drafts a sequence"
    )
    for r in results:
        rates = f"{r['output_tokens_per_second_off']:11.1f} {r['output_tokens_per_second_on']:6.1f} {r['ratio']:6.2f}x"
        steps = f"{100 * r['acceptance']:9.0f}% {r['draft_tokens_per_step']:15.2f} {r['tokens_per_step']:15.2f}"
        differ = f"{r['num_outputs_that_differ']} of {r['num_outputs']}"
        gap = "-" if r["largest_gap_where_they_part"] is None else f"{r['largest_gap_where_they_part']:.3g}"
        lengths = ", ".join(f"{n} with {k}" for k, n in r["steps_by_num_drafts"].items())
        print(f"{r['task']:<8} {r['batch']:>5} {rates} {steps}   {differ:<21} {gap:<13} {lengths}")


if __name__ == "__main__":
    run_command(main)
