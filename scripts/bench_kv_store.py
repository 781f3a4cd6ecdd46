"""What a store of KV is worth, and what it costs: conversations larger than the pool, with the store and without it by turns.

    python -m scripts.bench_kv_store --model=MODEL.gguf --kv_store=host:2GiB

Two engines share the weights and serve each prompt by turns, until it is answered and its pages are stored. Each round has new
conversations, more than the pool holds. First all ask their first turn, one after the other (no prompt was seen before, so that
nothing hits); then all ask their second turn: what was said, the answer, and a new question. Reported are the time to the first
token of second turns, and the time of the first turns, whose ratio is what the store costs where all is saved and nothing hits; and
the same ratio of the process's processor time, which others on the machine disturb less. Then new prompts of half that length are
asked all at once, four times as many as run together: what the store costs where steps are full, and pages are stored beside them.

Then the engine with the store begins anew, and rounds follow in which nothing is ever hit: first turns and full batches alone, all
of them new. Ratios are medians of the rounds', with an interval of confidence of 95% where there are six rounds
or more. All programs are compiled before.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from absl import flags

from jaxserve.cli.common.bench_models import bench_model
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.provenance import provenance, write_json
from scripts.bench.ratio_of_rounds import Seconds, ratio_of

_CONVERSATIONS = flags.DEFINE_integer("conversations", 6, "Conversations of a round.", lower_bound=1)
_TURN = flags.DEFINE_integer("turn", 1024, "Tokens of a first turn's prompt.", lower_bound=2)
_QUESTION = flags.DEFINE_integer("question", 32, "Tokens that a second turn adds to what was said.", lower_bound=1)
_ANSWER = flags.DEFINE_integer("answer", 16, "Tokens of an answer.", lower_bound=1)
_BATCH_ANSWER = flags.DEFINE_integer("batch_answer", 64, "Tokens of an answer of those that are asked at once.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds in which second turns hit; one more comes before.", lower_bound=1)
_UNHIT_ROUNDS = flags.DEFINE_integer("unhit_rounds", 20, "Rounds in which nothing is ever hit.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="tiny-qwen3", warm_up="all", kv_store="host:1GiB", max_num_seqs=4)


Spent = tuple[float, float]  # seconds, and seconds of processor time


def serve(engine: Any, prompts: list[list[int]], num_tokens: int) -> tuple[Spent, float, list[list[int]]]:
    """(what it took until all are answered and their pages stored, seconds to the first token, the answers) of prompts that come at
    once."""
    from jaxserve import SamplingParams

    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    first, start, busy = 0.0, time.perf_counter(), time.process_time()
    for name, prompt in zip(answers, prompts, strict=True):
        engine.add_request(name, prompt, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
    while engine.has_unfinished_requests():
        for output in engine.step():
            first = first or time.perf_counter() - start
            answers[output.request.request_id] += output.new_token_ids
    wait_until_stored(engine)
    return (time.perf_counter() - start, time.process_time() - busy), first, list(answers.values())


class Turns:
    """Serves the same prompts with each engine, one after the other; who begins changes each time."""

    def __init__(self, engines: dict[str, Any]):
        self._engines = engines
        self._num_served = 0

    def serve(self, prompts: list[list[int]], num_tokens: int) -> tuple[dict[str, Spent], dict[str, float], list[list[int]]]:
        """As `serve`, of each engine. AssertionError: their answers differ."""
        self._num_served += 1
        names = list(self._engines)[:: 1 if self._num_served % 2 else -1]
        found = {name: serve(self._engines[name], prompts, num_tokens) for name in names}
        answers = found["off"][2]
        assert all(other == answers for _, _, other in found.values()), "the store has changed an answer"
        return {name: spent for name, (spent, _, _) in found.items()}, {n: first for n, (_, first, _) in found.items()}, answers


def add_round(seconds: Seconds, busy: Seconds, spent: list[dict[str, Spent]]) -> None:
    """Adds a round: what was spent in it on these servings."""
    for name in seconds:
        seconds[name].append(sum(one[name][0] for one in spent))
        busy[name].append(sum(one[name][1] for one in spent))


def none_yet() -> Seconds:
    """No round."""
    return {"off": [], "on": []}


@dataclass
class Rounds:
    """What was measured: seconds of each round, and of processor time (`busy`). unhit: of rounds in which nothing is ever hit.
    ttft: of each second turn. shares: of requests that are saved, behind each round in which nothing is hit."""

    first: Seconds = field(default_factory=none_yet)
    first_busy: Seconds = field(default_factory=none_yet)
    batch: Seconds = field(default_factory=none_yet)
    batch_busy: Seconds = field(default_factory=none_yet)
    unhit_first: Seconds = field(default_factory=none_yet)
    unhit_first_busy: Seconds = field(default_factory=none_yet)
    unhit_batch: Seconds = field(default_factory=none_yet)
    unhit_batch_busy: Seconds = field(default_factory=none_yet)
    ttft: dict[str, list[list[float]]] = field(default_factory=lambda: {"off": [], "on": []})
    shares: list[float] = field(default_factory=list)


def hit_rounds(engines: dict[str, Any], rng: np.random.Generator, rounds: Rounds) -> None:
    """Rounds in which second turns hit; one more comes before."""
    config, turns = engines["on"].config, Turns(engines)
    num_at_once = 4 * config.scheduler.max_num_seqs
    for i in range(-1, _ROUNDS.value):
        prompts = rng.integers(1, config.model.vocab_size, (_CONVERSATIONS.value, _TURN.value)).tolist()
        questions = rng.integers(1, config.model.vocab_size, (_CONVERSATIONS.value, _QUESTION.value)).tolist()
        others = rng.integers(1, config.model.vocab_size, (num_at_once, max(1, _TURN.value // 2))).tolist()
        first = [turns.serve([prompt], _ANSWER.value) for prompt in prompts]
        second = [
            turns.serve([prompt + answers[0] + question], _ANSWER.value)[1]
            for prompt, (_, _, answers), question in zip(prompts, first, questions, strict=True)
        ]
        batch = turns.serve(others, _BATCH_ANSWER.value)[0]
        if i >= 0:
            add_round(rounds.first, rounds.first_busy, [spent for spent, _, _ in first])
            add_round(rounds.batch, rounds.batch_busy, [batch])
            for name, ttft in rounds.ttft.items():
                ttft.append([seconds[name] for seconds in second])


def unhit_rounds(engines: dict[str, Any], rng: np.random.Generator, rounds: Rounds) -> None:
    """Rounds in which nothing is ever hit, from the engine's first request on: first turns and full batches, all of them new."""
    config, turns = engines["on"].config, Turns(engines)
    num_at_once = 4 * config.scheduler.max_num_seqs
    for _ in range(_UNHIT_ROUNDS.value):
        prompts = rng.integers(1, config.model.vocab_size, (_CONVERSATIONS.value, _TURN.value)).tolist()
        others = rng.integers(1, config.model.vocab_size, (num_at_once, max(1, _TURN.value // 2))).tolist()
        first = [turns.serve([prompt], _ANSWER.value)[0] for prompt in prompts]
        add_round(rounds.unhit_first, rounds.unhit_first_busy, first)
        add_round(rounds.unhit_batch, rounds.unhit_batch_busy, [turns.serve(others, _BATCH_ANSWER.value)[0]])
        rounds.shares.append(engines["on"].stats.kv_store.save_share)
    assert engines["on"].stats.kv_store.num_hit_tokens == 0


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
        longest, of_batch = _TURN.value + 2 * _ANSWER.value + _QUESTION.value, _TURN.value // 2 + _BATCH_ANSWER.value
        pages, batch_pages = -(-longest // page_size), options["max_num_seqs"] * -(-of_batch // page_size)
        options = {**options, "max_model_len": options["max_model_len"] or max(longest, of_batch)}
        # What is preempted would load what it lost.
        options["num_pages"] = options["num_pages"] or max(pages * max(1, _CONVERSATIONS.value // 2), batch_pages)
        model = bench_model(flags.FLAGS.model, options["dtype"])
        engines = {"off": engine(None), "on": engine(options["kv_store"])}
    print(engines["on"].describe(), file=sys.stderr)
    rng, rounds = np.random.default_rng(0), Rounds()
    hit_rounds(engines, rng, rounds)
    stats = engines["on"].stats.kv_store
    engines["on"].close()
    engines["on"] = engine(options["kv_store"])
    unhit_rounds(engines, rng, rounds)
    report(rounds, stats, engines["on"].stats.kv_store)


def report(rounds: Rounds, stats: Any, unhit_stats: Any) -> None:
    """Prints one line, and writes the JSON. unhit_stats: of rounds in which nothing is ever hit."""
    medians = {name: [statistics.median(seconds) for seconds in rounds.ttft[name]] for name in rounds.ttft}
    faster = statistics.median(off / on for off, on in zip(medians["off"], medians["on"], strict=True))
    ratios, result = {}, {}
    for name, seconds in vars(rounds).items():
        if name in ("ttft", "shares"):
            continue
        ratio, interval = ratios[name] = ratio_of(seconds)
        result |= {f"seconds_{name}": seconds, f"{name}_ratio": ratio, f"{name}_interval": interval}
    said = {n: f"{ratio:.3f}" + (f" ({found[0]:.3f} to {found[1]:.3f})" if found else "") for n, (ratio, found) in ratios.items()}
    off, on = (1e3 * statistics.median(medians[name]) for name in ("off", "on"))
    print(
        f"{flags.FLAGS.model}, {flags.FLAGS.kv_store}: median time to the first token of second turns {off:.1f} ms without the "
        f"store, {on:.1f} ms with it ({faster:.2f} times as fast); {stats.num_hit_tokens} of {stats.num_queried_tokens} tokens hit."
        f" First turns, which hit nothing, take {said['first']} times as long with it, and {said['first_busy']} times the processor"
        f" time; full batches take {said['batch']} times as long. Where nothing is ever hit, first turns take {said['unhit_first']}"
        f" times as long and {said['unhit_first_busy']} times the processor time, full batches {said['unhit_batch']} and "
        f"{said['unhit_batch_busy']}; {100 * unhit_stats.save_share:.0f}% of the requests are saved in the end"
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
            "batch_answer": _BATCH_ANSWER.value,
            "ttft_second_turns": rounds.ttft,
            "ttft_ratio": faster,
            **result,
            "num_hit_tokens": stats.num_hit_tokens,
            "num_queried_tokens": stats.num_queried_tokens,
            "save_seconds": stats.save_seconds,
            "save_share": stats.save_share,
            "tiers": [vars(tier) for tier in stats.tiers],
            "unhit_shares": rounds.shares,
            "unhit_save_seconds": unhit_stats.save_seconds,
            "unhit_skipped_tokens": unhit_stats.num_skipped_tokens,
            "unhit_tiers": [vars(tier) for tier in unhit_stats.tiers],
            **provenance(),
        },
    )


if __name__ == "__main__":
    run_command(main)
