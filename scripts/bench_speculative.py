"""Speculation on against off: the same prompts, by turns, on engines that share their weights, one without drafts and one a method.

    python -m scripts.bench_speculative --json=benchmarks/results/cpu/speculative.json
    python -m scripts.bench_speculative --methods=ngram,suffix,eagle3,medusa,draft_model --eagle3=FOLDER --medusa=FOLDER \\
        --draft_model=FOLDER --batches=1,8 --rounds=2

Three tasks for the demo's model, of eight prompts each: rewriting a paragraph and editing code, whose answers repeat their prompts,
and ordinary chat. A draft of the model's first layers is made by `jaxserve convert --num_layers=2`.

First each method verifies all its drafts in every step, as many sequences at a time as the largest batch has: its accepted length
is tokens a sequence and step over all steps, those for which nothing was drafted too. Then each task runs in batches of several
sizes, 8 at most, with as many drafts as pay (--adaptive); where a size does not divide 8, the last batch is smaller. A figure is
output tokens a second of the whole run, its prompts' pages being in the prefix caches; the ratio is the median over rounds. All
programs are compiled before, and one batch is run untimed.

Outputs that differ are counted: greedy ones can, where two logits nearly tie and the shapes of the steps are not the same. How
nearly is said too: the largest lead of the best token over the second, in log-probability, where an output with speculation first
has another token than one without (drawn ones part at any lead: none is said). The speculating side's timed steps are counted by
bucket (in the JSON) and by the drafts of a sequence.
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

NUM_DRAFTS = {"ngram": 8, "suffix": 8, "draft_model": 2, "eagle": 3, "eagle3": 3, "medusa": 3}  # most, unless a flag says
OFF = "off"

_METHODS = flags.DEFINE_list("methods", ["ngram"], f"What drafts, of {', '.join(NUM_DRAFTS)}.")
_DRAFTS = flags.DEFINE_list("num_speculative_tokens", None, "Most drafts of a sequence and step: one for all methods, or one each.")
_CHECKPOINTS = {
    method: flags.DEFINE_string(method, None, f"The checkpoint that drafts with {method}.")
    for method in ("draft_model", "eagle", "eagle3", "medusa")
}
_BATCHES = flags.DEFINE_list("batches", ["1", "2", "4", "8"], "Prompts at a time, 8 at most.")
_TASKS = flags.DEFINE_list("tasks", ["rewrite", "code", "chat"], "Which of rewrite, code and chat.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds: each runs every side once.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Most output tokens of each prompt.", lower_bound=2)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
_LOOKUP_MIN = flags.DEFINE_integer("prompt_lookup_min", None, "Of ngram: fewest tokens that must recur.", lower_bound=1)
_LOOKUP_MAX = flags.DEFINE_integer("prompt_lookup_max", None, "Of ngram: most tokens that are looked for.", lower_bound=1)
_ADAPTIVE = flags.DEFINE_bool("adaptive", True, "Timed runs verify as many drafts as pay; otherwise always all.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="")


def chosen_methods() -> dict[str, dict[str, Any]]:
    """{method: its speculative_config}. UsageError for what the flags can't mean."""
    methods, given = _METHODS.value, _DRAFTS.value or []
    unknown = set(methods) - set(NUM_DRAFTS)
    if unknown or not methods or len(set(methods)) < len(methods):
        wrong = f"{', '.join(sorted(unknown))} must be of" if unknown else "give some, each once, of"
        raise app.UsageError(f"--methods: {wrong} {', '.join(NUM_DRAFTS)}")
    if len(given) not in (0, 1, len(methods)) or not all(number.isdecimal() and int(number) for number in given):
        raise app.UsageError(f"--num_speculative_tokens={','.join(given)}: one integer above 0, or one for each of --methods")
    for method, flag in _CHECKPOINTS.items():
        if (method in methods) != (flag.value is not None):
            raise app.UsageError(f"--{method}: give it if and only if {method} is of --methods")
    if (_LOOKUP_MIN.value or _LOOKUP_MAX.value) and "ngram" not in methods:
        raise app.UsageError("--prompt_lookup_min and --prompt_lookup_max are of ngram, which is not of --methods")
    numbers = given * len(methods) if len(given) == 1 else given
    found: dict[str, dict[str, Any]] = {}
    for i, method in enumerate(methods):
        found[method] = {"method": method, "num_speculative_tokens": int(numbers[i]) if numbers else NUM_DRAFTS[method]}
        if method in _CHECKPOINTS:
            found[method]["model"] = _CHECKPOINTS[method].value
    if "ngram" in found:
        found["ngram"] |= {"prompt_lookup_min": _LOOKUP_MIN.value, "prompt_lookup_max": _LOOKUP_MAX.value}
    return found


def chosen_cases() -> list[tuple[str, list[int]]]:
    """(task, its batches) of all that is to be run. UsageError for what cannot be."""
    unknown = set(_TASKS.value) - set(TASKS)
    if unknown or not _TASKS.value:
        raise app.UsageError(f"--tasks: {', '.join(sorted(unknown)) or 'nothing'} must be of {', '.join(TASKS)}")
    most = min(len(TASKS[task]) for task in _TASKS.value)
    for batch in _BATCHES.value or ["nothing"]:
        if not batch.isdecimal() or not 1 <= int(batch) <= most:
            raise app.UsageError(f"--batches: {batch} must be an integer from 1 to {most}, the prompts that a task has")
    return [(task, [int(batch) for batch in _BATCHES.value]) for task in _TASKS.value]


def make_llms(methods: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """{"off": ..., a method: ...}: LLMs that share one set of weights."""
    from jaxserve import LLM
    from scripts.fetch_demo_model import fetch_or_exit

    options: dict[str, Any] = engine_options() | {"warm_up": "all"}
    defaults = {"max_num_seqs": max(map(int, _BATCHES.value)), "max_num_batched_tokens": 512, "max_model_len": 1024}
    defaults["num_pages"] = 16 * defaults["max_num_seqs"] + 64  # of 64 tokens: room for every prompt in the prefix cache
    options |= {name: value for name, value in defaults.items() if options[name] is None}
    llms = {OFF: LLM(flags.FLAGS.model or str(fetch_or_exit()), **options)}
    functions = llms[OFF].engine.runner.programs.functions
    weights = dict(zip(functions.paths, functions.weights, strict=True))
    for method, config in methods.items():
        of_method: dict[str, Any] = options | {"speculative_config": config}
        llms[method] = LLM.from_params(weights, functions.model_config, tokenizer=llms[OFF].tokenizer, **of_method)
        print(f"{method}: {llms[method].engine.describe()}", file=sys.stderr)
    return llms


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


def tokens_a_step(counts: dict[str, Any]) -> float:
    """Of a sequence: each of its steps outputs a token and the drafts that stand."""
    return counts["num_tokens"] / (counts["num_tokens"] - counts["num_accepted_tokens"])


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


def accepted_lengths(llms: dict[str, Any], prompts: list[Any], batch: int) -> dict[str, float]:
    """{method: tokens of a sequence and step where all its drafts are verified}. Fills the prefix caches too."""
    found = {}
    for method, llm in llms.items():
        lengths = llm.engine.draft_lengths
        if lengths is None:
            run(llm, prompts, batch)
            continue
        lengths.adaptive = False
        found[method] = tokens_a_step(run(llm, prompts, batch))
        lengths.adaptive = _ADAPTIVE.value
    return found


def compare(llms: dict[str, Any], task: str, batches: list[int], tick: Any) -> list[dict[str, Any]]:
    """A result for each batch and method. tick: called after each timed round."""
    prompts = llms[OFF].chat_prompts([[{"role": "user", "content": text}] for text in TASKS[task]])
    lengths, results = accepted_lengths(llms, prompts, max(batches)), []
    for batch in batches:
        told = run(llms[OFF], prompts, batch, logprobs=2)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in llms}
        for side, llm in llms.items():
            if side != OFF:
                run(llm, prompts[:batch], batch)  # from which it learns what drafts are worth and what steps take
        sides = list(llms)
        for i in range(_ROUNDS.value):
            for side in sides[i % len(sides) :] + sides[: i % len(sides)]:
                runs[side].append(run(llms[side], prompts, batch))
            tick()
        about = {"task": task, "batch": batch}
        for method, length in lengths.items():
            results.append({**about, "method": method, "accepted_length": length, **result(told, runs[OFF], runs[method])})
    return results


def result(told: dict[str, Any], offs: list[dict[str, Any]], ons: list[dict[str, Any]]) -> dict[str, Any]:
    """Of timed runs without and with drafts. told: a run without drafts, with log-probabilities."""
    off_rates, on_rates = ([r["num_tokens"] / r["seconds"] for r in some] for some in (offs, ons))
    total = {name: sum(r[name] for r in ons) for name in ons[0] if name.startswith("num_")}
    buckets, lengths = (sum((r[name] for r in ons), Counter()) for name in ("buckets", "lengths"))
    pairs = list(zip(offs, ons, strict=True))
    return {
        "output_tokens_per_second_off": statistics.median(off_rates),
        "output_tokens_per_second_on": statistics.median(on_rates),
        "ratio": statistics.median(on / off for off, on in zip(off_rates, on_rates, strict=True)),
        "runs": {"off": off_rates, "on": on_rates},
        "acceptance": total["num_accepted_tokens"] / max(1, total["num_draft_tokens"]),
        "draft_tokens_per_step": total["num_draft_tokens"] / total["num_steps"],
        "tokens_per_step": total["num_tokens"] / total["num_steps"],
        "tokens_per_sequence_step": tokens_a_step(total),
        "num_steps": total["num_steps"],
        "steps_by_bucket": {str(bucket): n for bucket, n in sorted(buckets.items())},
        "steps_by_num_drafts": {str(k): n for k, n in sorted(lengths.items())},
        "num_outputs": sum(len(on["tokens"]) for on in ons),
        "num_outputs_that_differ": sum(a != b for off, on in pairs for a, b in zip(off["tokens"], on["tokens"], strict=True)),
        "largest_gap_where_they_part": None if _TEMPERATURE.value else largest_gap_where_they_part(told, ons),
    }


def main() -> None:
    cases, methods = chosen_cases(), chosen_methods()
    llms, results = make_llms(methods), []
    with tqdm(total=_ROUNDS.value * sum(len(batches) for _, batches in cases), unit="round", file=sys.stderr) as bar:
        for task, batches in cases:
            results += compare(llms, task, batches, bar.update)
    with contextlib.redirect_stdout(sys.stderr if _JSON.value == "-" else sys.stdout):
        report(results)
    plans = {side: str(llm.engine.config.plan) for side, llm in llms.items()}
    about = {"benchmark": "speculative", "max_tokens": _MAX_TOKENS.value, "rounds": _ROUNDS.value, "adaptive": _ADAPTIVE.value}
    write_json(_JSON.value, {**about, "methods": methods, "plans": plans, "results": results, **provenance()})


def report(results: list[dict[str, Any]]) -> None:
    print(
        "Accepted length: tokens a sequence and step with all drafts; tokens: the same with as many drafts as the timed runs had."
    )
    print(
        f"{'task':<8} {'batch':>5} {'method':<12} {'accepted length':>15} {'tok/s off':>10} {'on':>7} {'ratio':>7} {'tokens':>7} "
        f"{'accepted':>9}   {'differ':<9} {'largest gap':<12} steps by drafts a sequence"
    )
    for r in results:
        rates = f"{r['output_tokens_per_second_off']:10.1f} {r['output_tokens_per_second_on']:7.1f} {r['ratio']:6.2f}x"
        steps = f"{r['tokens_per_sequence_step']:7.2f} {100 * r['acceptance']:8.0f}%"
        differ = f"{r['num_outputs_that_differ']} of {r['num_outputs']}"
        gap = "-" if r["largest_gap_where_they_part"] is None else f"{r['largest_gap_where_they_part']:.3g}"
        lengths = ", ".join(f"{n} with {k}" for k, n in r["steps_by_num_drafts"].items())
        head = f"{r['task']:<8} {r['batch']:>5} {r['method']:<12} {r['accepted_length']:>15.2f}"
        print(f"{head} {rates} {steps}   {differ:<9} {gap:<12} {lengths}")


if __name__ == "__main__":
    run_command(main)
