"""What grammars cost a step: the work between one step's tokens and the next one's masks, and how much of it a device waits for.

    python -m scripts.bench_structured --tokenizer=FOLDER --json=benchmarks/results/cpu/structured.json
    python -m scripts.bench_structured --tokenizer=FOLDER --rows=64 --num_speculative_tokens=3      # masks of drafts too

The engine is the real one and so are its grammars, masks and scheduler; the device is a timer (timed_device.py), and what it
samples are the tokens of documents that fit their schemas. So many requests run at a time, a new one for each that ends. Printed
are the milliseconds of a step that go into grammars (advance: tokens taken in, forced ones found; fill: the masks), their share of
the step, and how long the device waited for them once a step's body was done. Then the time that grammars take to compile, and the
longest time between two steps while they do; and the same of the first grammar where nobody had the vocabulary read before
(an AsyncLLM does, before it serves).

With --num_speculative_tokens each row brings so many drafts, the next tokens of its document, and they stand: a step then follows
as many grammars as ever, each over more tokens, and has a mask for each draft.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import define_layout_flags, layout_options
from jaxserve.cli.common.provenance import provenance, write_json
from scripts.bench.timed_device import TimedDevice

FLAGS = flags.FLAGS
flags.DEFINE_string("tokenizer", None, "A folder with a tokenizer.json, or a GGUF file; by default the demo's model.")
flags.DEFINE_list("rows", ["1", "4", "16", "64"], "Requests at a time.")
flags.DEFINE_float("step_ms", 30.0, "Milliseconds that the device takes for a step.", lower_bound=0.0)
flags.DEFINE_float("head_ms", 3.0, "The head's part of them, which waits for the masks.", lower_bound=0.0)
flags.DEFINE_integer("steps", 100, "Timed steps of each row of the table.", lower_bound=2)
flags.DEFINE_integer("compiles", 20, "Grammars of each size that are compiled.", lower_bound=1)
flags.DEFINE_integer("num_speculative_tokens", 0, "Drafts of each constrained row and step.", lower_bound=0)
flags.DEFINE_integer("seed", 0, "Seeds schemas and documents.")
flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_layout_flags()

SIZES = {"small": 4, "medium": 30, "large": 300}  # properties of a schema
WORDS = "the a quick brown fox jumps over lazy dog order invoice street blue seven river of and with under early night".split()
MODEL = {  # the engine wants one, for its vocabulary; nothing of it runs
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}


def make_schema(rng: np.random.Generator, num_properties: int) -> dict[str, Any]:
    """An object of so many properties of all sorts, a quarter of them in objects of its own; all are required."""
    properties: dict[str, Any] = {}
    while num_properties > 0:
        name = f"{rng.choice(WORDS)}_{rng.choice(WORDS)}_{len(properties)}"
        kind = rng.choice(["text", "integer", "number", "flag", "enum", "texts", "date", "object"])
        if kind == "object" and num_properties > 3:
            properties[name] = make_schema(rng, min(num_properties // 4 + 1, 8))
            num_properties -= len(properties[name]["properties"])
            continue
        properties[name] = {
            "text": {"type": "string"},
            "object": {"type": "string", "maxLength": 200},
            "integer": {"type": "integer", "minimum": 0, "maximum": 100_000},
            "number": {"type": "number"},
            "flag": {"type": ["boolean", "null"]},
            "enum": {"enum": [str(word) for word in rng.choice(WORDS, 6, replace=False)]},
            "texts": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
            "date": {"type": "string", "format": "date"},
        }[str(kind)]
        num_properties -= 1
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def make_document(rng: np.random.Generator, schema: dict[str, Any]) -> Any:
    """What fits a schema of make_schema's."""
    text = " ".join(rng.choice(WORDS, rng.integers(2, 30)))
    if "enum" in schema:
        return str(rng.choice(schema["enum"]))
    if schema["type"] == "object":
        return {name: make_document(rng, inner) for name, inner in schema["properties"].items()}
    if schema["type"] == "array":
        return [make_document(rng, schema["items"]) for _ in range(rng.integers(5))]
    if schema["type"] == "string":
        return f"203{rng.integers(10)}-0{rng.integers(1, 10)}-11" if "format" in schema else text[:200]
    choices = {"integer": int(rng.integers(100_000)), "number": round(float(rng.normal() * 100), 3)}
    return choices.get(str(schema["type"]), [True, False, None][rng.integers(3)])


def spell(grammar: Any, tokenizer: Any, text: str) -> list[int]:
    """The tokens in which an engine would write the text: those that the grammar forces, and the tokenizer's own elsewhere."""
    from jaxserve.structured.masks import GrammarState

    state, tokens, at = GrammarState(grammar), [], 0
    while not state.ended:
        new = state.forced or tokenizer.backend.encode(text[at : at + 100], add_special_tokens=False).ids[:1]
        accepted = state.advance(new)
        assert accepted == len(new), (text[:at], new, state.error)
        tokens += new
        at += sum(len(tokenizer.backend.decode([token], skip_special_tokens=False)) for token in new)
    assert at == len(text)
    return tokens


class Load:
    """Requests that keep an engine on a TimedDevice busy. forms: (what an output must be, its tokens), in turn; None: free ones."""

    def __init__(self, engine: Any, compiler: Any, forms: list[tuple[Any, list[int]]] | None):
        self._engine, self._compiler, self._forms = engine, compiler, forms
        self._texts: dict[str, list[int]] = {}
        self._num_added = 0
        self._last_step: float | None = None  # when it ended
        body = 1e-3 * (FLAGS.step_ms - FLAGS.head_ms)
        speculative = engine.config.speculative
        self._num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        self.device = TimedDevice(engine, body, 1e-3 * FLAGS.head_ms, self._next_tokens, self._num_drafts)

    def _add(self) -> None:
        from jaxserve import SamplingParams

        name, grammar = str(self._num_added), None
        if self._forms is not None:
            form, self._texts[name] = self._forms[self._num_added % len(self._forms)]
            grammar = self._compiler.submit(form)
        self._num_added += 1
        self._engine.add_request(name, [1] * 8, SamplingParams(max_tokens=None, ignore_eos=grammar is None), grammar=grammar)

    def _next_tokens(self, schedule: Any) -> np.ndarray:
        """i32[n, 1 + 2K]: for each entry that samples, the tokens of its document from there on."""
        from jaxserve.speculative.proposer import NO_DRAFT

        ends = (schedule.starts + schedule.q_lens)[schedule.samples]  # exact: all drafts before them have stood
        to_come = np.full((len(ends), 1 + 2 * self._num_drafts), NO_DRAFT, np.int32)
        requests = (r for r, samples in zip(schedule.requests, schedule.samples, strict=True) if samples)
        for row, request, at in zip(to_come, requests, (ends - schedule.logits_rows.counts + 1).tolist(), strict=True):
            text = self._texts.get(request.request_id, [])[at - request.num_prompt_tokens :][: len(row)]
            row[: len(text)] = text
        return to_come

    def run(self, num_rows: int, num_steps: int) -> list[float]:
        """Keeps so many requests running; returns the seconds from step to step, of the last call's last step to the first too."""
        gaps = []
        for _ in range(num_steps):
            while len(self._engine._requests) < num_rows:
                self._add()
            self._engine.step()
            before, self._last_step = self._last_step, time.perf_counter()
            if before is not None:
                gaps.append(self._last_step - before)
        return gaps


def make_engine(vocab_size: int, max_rows: int, document: int, num_drafts: int = 0) -> Any:
    """An engine whose pool holds `max_rows` documents, and whose steps verify so many drafts of each."""
    from jaxserve import BucketPlan, Engine, EngineConfig
    from jaxserve.models.loading import lay_out_for_device, random_model

    plan = speculative = None
    if num_drafts:  # the default plan has few drafts beside many rows
        speculative, logits_rows = {"num_speculative_tokens": num_drafts, "adaptive": False}, max_rows * (1 + num_drafts)
        draft = ((max_rows, num_drafts),)
        plan = BucketPlan(decode=(max_rows,), mixed=((2048, max_rows),), head_rows=(logits_rows,), draft=draft)
    length = -(-(document + 64) // 64) * 64
    config = EngineConfig(
        max_num_seqs=max_rows,
        max_num_batched_tokens=2048,
        max_model_len=length,
        num_pages=max_rows * length // 64,
        page_size=64,
        bucket_plan=plan,
        speculative_config=speculative,
        **layout_options(),
    )
    model = lay_out_for_device(random_model(MODEL | {"vocab_size": vocab_size}, dtype="float32"))
    return Engine(model, config, eos_token_ids=())


class Clock:
    """Adds up the seconds spent in some functions, a sum a step."""

    def __init__(self):
        self.seconds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0])

    def time(self, owner: Any, function: str, name: str) -> None:
        """From now on calls of owner.function count under `name`."""
        plain = getattr(owner, function)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args)
            finally:
                self.seconds[name][-1] += time.perf_counter() - start

        setattr(owner, function, timed)

    def next_step(self) -> None:
        for sums in self.seconds.values():
            sums.append(0.0)


def measure_masks(compiler: Any, vocab_size: int, forms: list[tuple[Any, list[int]]], num_rows: int) -> dict[str, Any]:
    """What `num_rows` requests with these forms cost a step; medians and 99th percentiles in ms."""
    engine = make_engine(vocab_size, num_rows, max(len(text) for _, text in forms), FLAGS.num_speculative_tokens)
    load, clock = Load(engine, compiler, forms), Clock()
    load.run(num_rows, 20)  # before what is timed
    clock.time(engine.pipeline.grammars, "follow", "advance")
    clock.time(engine._constraints, "masks", "fill")
    load.device.late.clear()
    steps = []
    for _ in range(FLAGS.steps):
        steps += load.run(num_rows, 1)
        clock.next_step()
    advance, fill = (1e3 * np.array(clock.seconds[name][:-1]) for name in ("advance", "fill"))
    late, work = 1e3 * np.array(load.device.late), advance + fill
    stats = engine.stats
    engine.close()
    return {
        "rows": num_rows,
        "step_ms": statistics.median(steps) * 1e3,
        "work_ms": float(np.median(work)),
        "work_p99_ms": float(np.percentile(work, 99)),
        "advance_ms": float(np.median(advance)),
        "fill_ms": float(np.median(fill)),
        "share": float(np.mean(work) / FLAGS.step_ms),
        "late_ms": float(late.mean()),
        "late_p99_ms": float(np.percentile(late, 99)),
        "hidden": max(0.0, 1 - float(late.sum() / work.sum())),  # late has the rest of the host's work too
        "tokens_per_row": 1 + stats.num_accepted_tokens / max(1, stats.num_drafts),  # that verified drafts
    }


def measure_compiles(tokenizer: Any, vocab_size: int, eos: list[int], schemas: dict[str, list[Any]]) -> dict[str, Any]:
    """The time that grammars take, each alone in the compiler's threads, and what 64 free requests notice of it."""
    from jaxserve.structured.grammars import GrammarCompiler

    compiler, clock = GrammarCompiler(tokenizer, vocab_size, eos), Clock()
    engine = make_engine(vocab_size, 64, 8_000)
    load = Load(engine, compiler, None)
    load.run(64, 20)
    result: dict[str, Any] = {"gap_without_ms": 1e3 * max(load.run(64, FLAGS.steps))}
    clock.time(compiler, "_read_vocabulary", "vocabulary")
    first, gaps = compiler.submit({"regex": "x"}), []
    while not first.done():
        gaps += load.run(64, 1)
    gaps += load.run(64, 1)
    result["vocabulary"] = {"read_ms": 1e3 * clock.seconds["vocabulary"][-1], "longest_gap_ms": 1e3 * max(gaps)}
    clock.time(compiler, "_compile", "compile")
    for size, some in schemas.items():
        futures, gaps, times = [], [], []
        for schema in some:
            futures.append(compiler.submit({"json": schema}))
            gaps += load.run(64, 3)
            while not futures[-1].done():
                gaps += load.run(64, 1)
            times.append(clock.seconds["compile"][-1])
            clock.next_step()
        result[size] = {"median_ms": 1e3 * statistics.median(times), "max_ms": 1e3 * max(times), "longest_gap_ms": 1e3 * max(gaps)}
    engine.close()
    compiler.close()
    return result


def main() -> None:
    from jaxserve.structured.grammars import GrammarCompiler
    from jaxserve.text.tokenizer import Tokenizer
    from scripts.fetch_demo_model import fetch_or_exit

    tokenizer = Tokenizer.from_id(FLAGS.tokenizer or fetch_or_exit())
    vocab_size = -(-tokenizer.backend.get_vocab_size() // 128) * 128
    eos = sorted(tokenizer.special_ids)[:1]
    compiler = GrammarCompiler(tokenizer, vocab_size, eos)
    rng = np.random.default_rng(FLAGS.seed)
    results, schemas = [], {}
    for size, num_properties in SIZES.items():
        schemas[size] = [make_schema(rng, num_properties) for _ in range(FLAGS.compiles)]
        forms = []
        for schema in schemas[size][:8]:
            form = {"json": schema, "disable_any_whitespace": True}
            text = json.dumps(make_document(rng, schema), separators=(",", ":"))
            forms.append((form, spell(compiler.compile(form), tokenizer, text)))
        for num_rows in tqdm([int(n) for n in FLAGS.rows], desc=size, file=sys.stderr):
            results.append({"schema": size} | measure_masks(compiler, vocab_size, forms, num_rows))
    compiler.close()
    compiles = measure_compiles(tokenizer, vocab_size, eos, schemas)
    with contextlib.redirect_stdout(sys.stderr if FLAGS.json == "-" else sys.stdout):
        report(vocab_size, results, compiles)
    about = {"benchmark": "structured", "vocab_size": vocab_size, "step_ms": FLAGS.step_ms, "head_ms": FLAGS.head_ms}
    about["num_speculative_tokens"] = FLAGS.num_speculative_tokens
    write_json(FLAGS.json, {**about, "masks": results, "compiles": compiles, **provenance()})


def report(vocab_size: int, results: list[dict[str, Any]], compiles: dict[str, Any]) -> None:
    drafts = f"; {FLAGS.num_speculative_tokens} drafts a row" if FLAGS.num_speculative_tokens else ""
    print(f"vocabulary {vocab_size}, steps of {FLAGS.step_ms:g} ms of which the head takes {FLAGS.head_ms:g}{drafts}")
    print(
        "schema   rows   grammars a step, ms: median (p99) = advance + fill   of the step   hidden   device waits, ms: mean (p99)"
    )
    for r in results:
        work = f"{r['work_ms']:.2f} ({r['work_p99_ms']:.2f}) = {r['advance_ms']:.2f} + {r['fill_ms']:.2f}"
        shares = f"{100 * r['share']:12.1f}% {100 * r['hidden']:7.0f}%"
        print(f"{r['schema']:<7} {r['rows']:>5}   {work:>50} {shares}   {r['late_ms']:.2f} ({r['late_p99_ms']:.2f})")
    print("compiles beside 64 free requests: their time; longest time between two steps")
    print(f"  none: {compiles['gap_without_ms']:.1f} ms")
    vocabulary = compiles["vocabulary"]
    print(f"  the vocabulary, read beside steps: {vocabulary['read_ms']:.0f} ms; {vocabulary['longest_gap_ms']:.1f} ms")
    for size in SIZES:
        c = compiles[size]
        print(f"  {size}: {c['median_ms']:.1f} ms median, {c['max_ms']:.1f} at most; {c['longest_gap_ms']:.1f} ms")


if __name__ == "__main__":
    run_command(main)
