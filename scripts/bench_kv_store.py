"""What a store of KV is worth, and what it costs: conversations larger than the pool, with the store and without it by turns.

    python -m scripts.bench_kv_store --model=MODEL.gguf --kv_store=host:2GiB

Two engines share the weights. Each round has new conversations, more than the pool holds. First all ask their first turn, one after
the other (no prompt was seen before, so that nothing hits); then all ask their second turn: what was said, the answer, and a new
question. Reported are the time to the first token of second turns, and the time of the first turns from end to end, whose ratio is
what the store costs where nothing hits; and the same ratio of the process's processor time, the store's thread included, which
others on the machine disturb less. Then new prompts of half that length are asked all at once, four times as many as run
together: what the store costs where steps are full, and pages are stored beside them.

Then the engine with the store begins anew, and as many rounds follow in which nothing is ever hit: first turns and full batches
alone, all of them new. Some come before that are not timed: until the share of requests that are saved has fallen as far as it
does, at most SETTLING_ROUNDS of them. Ratios are medians of the rounds'. All programs are compiled before.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
from absl import flags

from jaxserve.cli.common.bench_models import bench_model
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.provenance import provenance, write_json

_CONVERSATIONS = flags.DEFINE_integer("conversations", 6, "Conversations of a round.", lower_bound=1)
_TURN = flags.DEFINE_integer("turn", 1024, "Tokens of a first turn's prompt.", lower_bound=2)
_QUESTION = flags.DEFINE_integer("question", 32, "Tokens that a second turn adds to what was said.", lower_bound=1)
_ANSWER = flags.DEFINE_integer("answer", 16, "Tokens of an answer.", lower_bound=1)
_BATCH_ANSWER = flags.DEFINE_integer("batch_answer", 64, "Tokens of an answer of those that are asked at once.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds; one more comes before.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
SETTLING_ROUNDS = 20
define_engine_flags(model="tiny-qwen3", warm_up="all", kv_store="host:1GiB", max_num_seqs=4)


Seconds = dict[str, list[float]]  # of each round, without the store ("off") and with it ("on")


def ask(engine: Any, name: str, prompt: list[int]) -> tuple[float, list[int]]:
    """(seconds to the first token, the answer) of one request that runs alone."""
    from jaxserve import SamplingParams

    first, answer, start = 0.0, [], time.perf_counter()
    engine.add_request(name, prompt, SamplingParams(max_tokens=_ANSWER.value, temperature=0, ignore_eos=True))
    while engine.has_unfinished_requests():
        for output in engine.step():
            first = first or time.perf_counter() - start
            answer += output.new_token_ids
    return first, answer


def one_round(
    engine: Any, prompts: list[list[int]], questions: list[list[int]]
) -> tuple[tuple[float, float], list[float], list[list[int]]]:
    """(seconds of all first turns, and of processor time until their pages are stored; seconds to the first token of each second
    turn; all answers)."""
    start, busy = time.perf_counter(), time.process_time()
    first = [ask(engine, f"{i}/1", prompt)[1] for i, prompt in enumerate(prompts)]
    elapsed = time.perf_counter() - start
    wait_until_stored(engine)
    spent = elapsed, time.process_time() - busy
    second = [
        ask(engine, f"{i}/2", prompt + answer + question)
        for i, (prompt, answer, question) in enumerate(zip(prompts, first, questions, strict=True))
    ]
    return spent, [seconds for seconds, _ in second], first + [answer for _, answer in second]


def full_batch(engine: Any, prompts: list[list[int]]) -> tuple[float, dict[str, list[int]]]:
    """(seconds until all are answered, the answers) of prompts that come at once."""
    from jaxserve import SamplingParams

    answers: dict[str, list[int]] = {f"{i}/batch": [] for i in range(len(prompts))}
    start = time.perf_counter()
    for name, prompt in zip(answers, prompts, strict=True):
        engine.add_request(name, prompt, SamplingParams(max_tokens=_BATCH_ANSWER.value, temperature=0, ignore_eos=True))
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request.request_id] += output.new_token_ids
    elapsed = time.perf_counter() - start
    wait_until_stored(engine)
    return elapsed, answers


def unhit_round(engine: Any, prompts: list[list[int]], others: list[list[int]]) -> tuple[tuple[float, float], Any]:
    """(seconds of first turns and of a full batch, and of processor time until their pages are stored; all answers)."""
    start, busy = time.perf_counter(), time.process_time()
    answers = [ask(engine, str(i), prompt)[1] for i, prompt in enumerate(prompts)]
    elapsed = time.perf_counter() - start
    batch_elapsed, at_once = full_batch(engine, others)
    return (elapsed + batch_elapsed, time.process_time() - busy), (answers, at_once)


def never_hit(engines: dict[str, Any], rng: np.random.Generator) -> tuple[Seconds, Seconds, int]:
    """(seconds of each round, of processor time, rounds before them) in which nothing is hit."""
    elapsed: Seconds = {"off": [], "on": []}
    busy: Seconds = {"off": [], "on": []}
    config = engines["on"].config
    num_before, share = 0, 1.0
    while len(elapsed["on"]) < _ROUNDS.value:
        before, share = share, engines["on"].stats.kv_store.save_share
        is_timed = bool(elapsed["on"]) or before <= share < 1 or num_before == SETTLING_ROUNDS
        num_before += not is_timed
        prompts = rng.integers(1, config.model.vocab_size, (_CONVERSATIONS.value, _TURN.value)).tolist()
        others = rng.integers(1, config.model.vocab_size, (4 * config.scheduler.max_num_seqs, max(1, _TURN.value // 2))).tolist()
        answers = {}
        for name in ("off", "on") if len(elapsed["on"]) % 2 else ("on", "off"):
            (seconds, processor), answers[name] = unhit_round(engines[name], prompts, others)
            if is_timed:
                elapsed[name].append(seconds)
                busy[name].append(processor)
        assert answers["on"] == answers["off"], "the store has changed an answer"
    assert engines["on"].stats.kv_store.num_hit_tokens == 0
    return elapsed, busy, num_before


def wait_until_stored(engine: Any) -> None:
    """Until the store has written what it was given, if there is one."""
    stored = engine.stored_pages
    while stored is not None and stored.is_saving:
        stored.save(rest=True)
        stored.poll(0.01)


def main() -> None:
    from jaxserve import Engine
    from jaxserve.llm import engine_config

    model: Any
    options: dict[str, Any]

    def engine(store: str | None) -> Engine:
        return Engine(model, engine_config(options | {"kv_store": store}), eos_token_ids=())

    with refuse_bad_input():
        options = engine_options()
        page_size = options["page_size"] or 64
        longest = max(_TURN.value + 2 * _ANSWER.value + _QUESTION.value, _TURN.value // 2 + _BATCH_ANSWER.value)
        pages = -(-longest // page_size)
        options = {**options, "max_model_len": options["max_model_len"] or longest}
        options["num_pages"] = options["num_pages"] or pages * max(1, _CONVERSATIONS.value // 2)
        model = bench_model(flags.FLAGS.model, options["dtype"])
        engines = {"off": engine(None), "on": engine(options["kv_store"])}
    print(engines["on"].describe(), file=sys.stderr)
    rng = np.random.default_rng(0)
    first: dict[str, list[float]] = {"off": [], "on": []}
    busy: dict[str, list[float]] = {"off": [], "on": []}
    ttft: dict[str, list[list[float]]] = {"off": [], "on": []}
    batch: dict[str, list[float]] = {"off": [], "on": []}
    num_batch = 4 * engines["on"].config.scheduler.max_num_seqs
    for i in range(-1, _ROUNDS.value):
        vocab_size, answers = engines["on"].config.model.vocab_size, {}
        prompts = rng.integers(1, vocab_size, (_CONVERSATIONS.value, _TURN.value)).tolist()
        questions = rng.integers(1, vocab_size, (_CONVERSATIONS.value, _QUESTION.value)).tolist()
        others = rng.integers(1, vocab_size, (num_batch, max(1, _TURN.value // 2))).tolist()
        for name in ("off", "on") if i % 2 else ("on", "off"):
            (elapsed, processor), seconds, turns = one_round(engines[name], prompts, questions)
            batch_elapsed, at_once = full_batch(engines[name], others)
            answers[name] = turns, at_once
            if i >= 0:
                first[name].append(elapsed)
                busy[name].append(processor)
                ttft[name].append(seconds)
                batch[name].append(batch_elapsed)
        assert answers["on"] == answers["off"], "the store has changed an answer"
    stats = engines["on"].stats.kv_store
    engines["on"].close()
    engines["on"] = engine(options["kv_store"])
    report(first, busy, ttft, batch, stats, never_hit(engines, rng), engines["on"].stats.kv_store)


def ratio_of(seconds: Seconds) -> float:
    """The median of the rounds' ratios, with the store over without it."""
    return statistics.median(on / off for off, on in zip(seconds["off"], seconds["on"], strict=True))


def report(
    first: Seconds,
    busy: Seconds,
    ttft: dict[str, list[list[float]]],
    batch: Seconds,
    stats: Any,
    unhit: tuple[Seconds, Seconds, int],
    unhit_stats: Any,
) -> None:
    """Prints one line, and writes the JSON. unhit, unhit_stats: of rounds in which nothing is ever hit."""
    medians = {name: [statistics.median(seconds) for seconds in ttft[name]] for name in ttft}
    faster = statistics.median(off / on for off, on in zip(medians["off"], medians["on"], strict=True))
    slower, busier, batch_slower = ratio_of(first), ratio_of(busy), ratio_of(batch)
    unhit_seconds, unhit_busy, num_before = unhit
    unhit_slower, unhit_busier = ratio_of(unhit_seconds), ratio_of(unhit_busy)
    off, on = (1e3 * statistics.median(medians[name]) for name in ("off", "on"))
    print(
        f"{flags.FLAGS.model}, {flags.FLAGS.kv_store}: median time to the first token of second turns {off:.1f} ms without the "
        f"store, {on:.1f} ms with it ({faster:.2f} times as fast); first turns, which hit nothing, take {slower:.3f} times as long "
        f"with it, and {busier:.3f} times the processor time; full batches take {batch_slower:.3f} times as long; "
        f"{stats.num_hit_tokens} of {stats.num_queried_tokens} tokens hit. Where nothing is ever hit, rounds take "
        f"{unhit_slower:.3f} times as long, and {unhit_busier:.3f} times the processor time, behind {num_before} others; "
        f"{100 * unhit_stats.save_share:.0f}% of the requests are saved in the end"
    )
    write_json(
        _JSON.value,
        {
            "benchmark": "kv_store",
            "model": flags.FLAGS.model.rpartition("/")[2],
            "conversations": _CONVERSATIONS.value,
            "turn": _TURN.value,
            "question": _QUESTION.value,
            "answer": _ANSWER.value,
            "seconds_first_turns": first,
            "processor_seconds_first_turns": busy,
            "batch_answer": _BATCH_ANSWER.value,
            "seconds_batch": batch,
            "ttft_second_turns": ttft,
            "ttft_ratio": faster,
            "no_hit_ratio": slower,
            "no_hit_processor_ratio": busier,
            "batch_ratio": batch_slower,
            "num_hit_tokens": stats.num_hit_tokens,
            "num_queried_tokens": stats.num_queried_tokens,
            "save_seconds": stats.save_seconds,
            "save_share": stats.save_share,
            "seconds_unhit": unhit_seconds,
            "processor_seconds_unhit": unhit_busy,
            "unhit_ratio": unhit_slower,
            "unhit_processor_ratio": unhit_busier,
            "unhit_rounds_before": num_before,
            "unhit_save_seconds": unhit_stats.save_seconds,
            "unhit_save_share": unhit_stats.save_share,
            "unhit_skipped_tokens": unhit_stats.num_skipped_tokens,
            "tiers": [vars(tier) for tier in stats.tiers],
            **provenance(),
        },
    )


if __name__ == "__main__":
    run_command(main)
