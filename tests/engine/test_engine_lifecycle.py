"""Requests' lives in the engine: how they end, what leaves with them, what one's end does to the others (nothing)."""

import collections
import json
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import Engine, Request, SamplingParams
from jaxserve.models import named_leaves, with_leaves
from tests.dummy import (
    EOS,
    ONE_BUCKET,
    SETTINGS,
    VOCAB,
    Answer,
    Ask,
    add,
    assert_empty,
    differences,
    dummy_model,
    make_engine,
    plain_logprobs,
    poison,
    serve,
    serve_alone,
)
from tests.workload import alone, requests

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture
def engine() -> Engine:
    return make_engine(dummy_model(), bucket_plan=ONE_BUCKET)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(1, VOCAB, n).tolist() for n in lengths]


def greedy(prompt: list[int], **params) -> list[int]:
    """Its greedy tokens, by the plain forward alone."""
    tokens, params = list(prompt), GREEDY.with_(**params)
    assert params.max_tokens is not None
    for _ in range(params.max_tokens):
        tokens.append(int(plain_logprobs(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def finish_all(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = {} if answers is None else answers
    for _ in range(300):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            answers.setdefault(output.request.request_id, Answer()).take(output)
        poison(engine)
    assert_empty(engine)
    return answers


# -- how requests end


def test_nothing_is_left_after_everything(engine):
    run = serve(engine, requests(True))
    assert_empty(engine)
    assert all(answer.finish_reason for answer in run.answers.values())
    assert not engine.scheduler.requests.stop_ids and not engine.pipeline.undelivered
    assert engine.step() == [] and not engine.has_unfinished_requests()
    assert engine.reset_prefix_cache() and not engine.pool._page_of


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_exact_max_tokens(asynchronous):
    """No token more or less, and no row computed in vain: lengths are known before tokens are."""
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, async_scheduling=asynchronous)
    asks = [Ask(prompt, GREEDY.with_(max_tokens=n)) for n, prompt in enumerate(prompts(*range(1, 10)), 1)]
    run = serve(engine, asks)
    assert [len(run.answers[str(i)].tokens) for i in range(9)] == list(range(1, 10))
    assert {answer.finish_reason for answer in run.answers.values()} == {"length"}
    num_needed = sum(len(ask.prompt) + n - 1 for n, ask in enumerate(asks, 1))
    assert run.stats.num_scheduled_tokens == num_needed and run.stats.num_discarded_rows == 0


def test_max_model_len_ends_a_request_without_max_tokens(engine):
    longest = SETTINGS["max_model_len"]
    asks = [Ask(prompt, GREEDY.with_(max_tokens=None)) for prompt in prompts(longest - 1, longest - 9)]
    answers = serve(engine, asks).answers
    assert [(len(a.tokens), a.finish_reason) for a in answers.values()] == [(1, "length"), (9, "length")]


def test_eos_stop_ids_and_their_reasons():
    """The same greedy tokens, ended by what one of them is called."""
    (prompt,) = prompts(6)
    tokens = greedy(prompt)
    num = next(n for n in range(4, 11) if tokens[n - 1] not in tokens[: n - 1])  # tokens up to the stop and with it
    stop = tokens[num - 1]
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, eos=stop)
    cases = {
        "eos": ({"ignore_eos": False}, num, "stop", None),
        "eos ignored": ({}, 12, "length", None),
        "stop id": ({"stop_token_ids": [VOCAB - 1, stop]}, num, "stop", stop),
        "eos and stop id": ({"ignore_eos": False, "stop_token_ids": [stop]}, num, "stop", None),
        "stop with the last token": ({"ignore_eos": False, "max_tokens": num}, num, "stop", None),
        "length before": ({"ignore_eos": False, "max_tokens": num - 1}, num - 1, "length", None),
    }
    answers = serve(engine, [Ask(prompt, GREEDY.with_(**params)) for params, *_ in cases.values()]).answers
    for (name, (_, num_tokens, finish_reason, stop_reason)), answer in zip(cases.items(), answers.values(), strict=True):
        assert answer.tokens == tokens[:num_tokens], name
        assert (answer.finish_reason, answer.stop_reason) == (finish_reason, stop_reason), name


def test_min_tokens_holds_stops_back():
    """As the plain forward does with eos and stop ids forbidden for the first tokens."""
    (prompt,) = prompts(6)
    free = greedy(prompt)
    stops, min_tokens = {free[0], free[2]}, 5
    expected = list(prompt)
    for i in range(12):
        logprobs = plain_logprobs(expected)[-1]
        if i < min_tokens:
            logprobs[[EOS, *stops]] = -np.inf
        expected.append(int(logprobs.argmax()))
        if i >= min_tokens and expected[-1] in {EOS, *stops}:
            break
    params = GREEDY.with_(ignore_eos=False, stop_token_ids=sorted(stops), min_tokens=min_tokens)
    answer = serve(make_engine(dummy_model(), bucket_plan=ONE_BUCKET), [Ask(prompt, params)]).answers["0"]
    assert answer.tokens == expected[len(prompt) :] != free[: len(answer.tokens)]


def test_seeds_come_from_the_engines_by_order_of_arrival():
    """Without seeds of their own, requests differ from each other, and a second engine repeats the first."""
    ask = Ask(prompts(5)[0], SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True))

    def tokens(seed: int) -> list[list[int]]:
        engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, seed=seed)
        return [answer.tokens for answer in serve(engine, [ask, ask, ask]).answers.values()]

    first = tokens(1)
    assert len(set(map(tuple, first))) == 3
    assert first == tokens(1) and first != tokens(2)


# -- refusals


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_refused_request_leaves_no_trace(policy):
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, scheduling_policy=policy)
    good = requests(True)
    answers: dict[str, Answer] = {}
    for i, ask in enumerate(good):
        answers |= {r.request_id: Answer() for r in add(engine, str(i), ask)}
    engine.step()
    before = (engine.scheduler.num_running, engine.scheduler.num_waiting, engine.pool.num_free_pages)
    longest = SETTINGS["max_model_len"]
    refused = {
        "already in use": ("1", [1], GREEDY),
        "empty prompt": ("x", [], GREEDY),
        f"prompt of {longest} tokens": ("x", [1] * longest, GREEDY),
        rf"{VOCAB} is out of the vocabulary": ("x", [1, VOCAB], GREEDY.with_(n=3)),
        "-1 is out of the vocabulary": ("x", [-1], GREEDY),
        f"stop token id {VOCAB}": ("x", [1], GREEDY.with_(stop_token_ids=[VOCAB])),
        "flat list of integers": ("x", [[1, 2]], GREEDY),
        "must be a flat list": ("x", [1.5], GREEDY),
        "lists of unequal lengths": ("x", [[1], [2, 3]], GREEDY),
        "at most 16 stop ids": ("x", [1], GREEDY.with_(stop_token_ids=range(1, 20), min_tokens=1)),
        r"stop=\('a', 'b'\) is text: use LLM or AsyncLLM": ("x", [1], GREEDY.with_(stop=["a", "b"])),
    }
    for message, (name, prompt, params) in refused.items():
        for refuse in (engine.add_request, engine.check_request):
            with pytest.raises(ValueError, match=message):
                refuse(name, prompt, params)
    kinds: list[dict[str, Any]] = [
        {"request_id": 5},
        {"request_id": []},
        {"params": {"temperature": 0}},
        {"score_from": "a"},
        {"grammar": 5},
    ]
    for kind in kinds:
        (name,) = kind
        with pytest.raises(TypeError, match=f"{name}=.* must be"):
            engine.add_request(**{"request_id": "x", "prompt_token_ids": [1], "params": GREEDY} | kind)
    priorities: list[Any] = ["high", None, 1.5, True]
    for priority in priorities:
        for refuse in (engine.add_request, engine.check_request):
            with pytest.raises(ValueError, match=f"priority={priority!r} must be an integer"):
                refuse("x", [1], GREEDY, priority=priority)
    arrivals: list[Any] = ["now", math.nan, -math.inf, True]
    for arrival in arrivals:
        with pytest.raises(ValueError, match=f"arrival={arrival!r} must be a finite number"):
            engine.add_request("x", [1], GREEDY, arrival=arrival)
    if policy == "fcfs":
        with pytest.raises(ValueError, match="scheduling_policy='priority'"):
            engine.add_request("x", [1], GREEDY, priority=1)
    assert before == (engine.scheduler.num_running, engine.scheduler.num_waiting, engine.pool.num_free_pages)
    assert differences(finish_all(engine, answers), alone("float32", True)) == []


def test_no_number_of_tokens_is_too_large_for_a_row(engine):
    """More than 32 bits of min_tokens: the request goes on as far as the model does, and with it the others."""
    mine, other = prompts(5, 6)
    longest = SETTINGS["max_model_len"]
    engine.add_request("x", mine, GREEDY.with_(min_tokens=2**31, max_tokens=None))
    engine.add_request("y", other, GREEDY)
    answers = finish_all(engine)
    assert len(answers["x"].tokens) == longest - len(mine) and EOS not in answers["x"].tokens
    assert answers["y"].tokens == greedy(other)


def test_priorities_of_any_integer_type():
    """Lower first, unsigned ones too, which have no negative."""
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, scheduling_policy="priority")
    given: list[Any] = [3, np.uint8(1), 2, np.int64(-1), 0]
    for i, priority in enumerate(given):
        engine.add_request(str(i), [1], GREEDY, priority=priority)
    assert [given.index(r.priority) for r in engine.scheduler.waiting] == [3, 4, 1, 2, 0]
    engine.close()


def test_stop_strings_are_for_who_makes_texts(engine):
    """Accepted from who says so; what they end is the caller's business."""
    (prompt,) = prompts(5)
    engine.add_request("x", prompt, GREEDY.with_(stop="a"), stops_at_text=True)
    assert finish_all(engine)["x"].tokens == greedy(prompt)


def test_more_kv_than_the_pool_is_refused():
    engine = make_engine(dummy_model(), pool_pages=4, bucket_plan=ONE_BUCKET)
    with pytest.raises(ValueError, match="the pool has 4; lower max_tokens or raise num_pages"):
        engine.add_request("x", [1] * 10, GREEDY.with_(max_tokens=8))
    engine.add_request("x", [1] * 10, GREEDY.with_(max_tokens=7))  # the last token's KV is never needed
    assert len(finish_all(engine)["x"].tokens) == 7


def test_an_id_may_be_used_again_after_its_end(engine):
    (prompt,) = prompts(7)
    answers = []
    for _ in range(2):
        engine.add_request("again", prompt, GREEDY)
        answers.append(finish_all(engine))
    assert answers[0] == answers[1]


# -- abort and finish


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
def test_abort_of_waiting_and_running_at_once(engine, num_steps):
    """The aborted are silent from then on, the others get what they get alone."""
    asks, answers = requests(True), {}
    groups = [add(engine, str(i), ask) for i, ask in enumerate(asks)]
    for _ in range(num_steps):
        for output in engine.step():
            answers.setdefault(output.request.request_id, Answer()).take(output)
    aborted = [i for i in range(len(asks)) if i % 2 == 0 and not all(r.finished for r in groups[i])]
    victims = [r for i in aborted for r in groups[i]]
    assert {r.row >= 0 for r in victims} == ({True, False} if num_steps else {False}), "none running, or none waiting"
    unfinished = [r for r in victims if not r.finished]
    engine.abort([*map(str, aborted), "unknown", str(aborted[0])])
    assert all(r.finish_reason == "abort" and r.row == -1 for r in unfinished)
    engine.scheduler.check_invariants()
    silent = {r.request_id for r in victims}
    answers = {name: answer for name, answer in answers.items() if name not in silent}
    finish_all(engine, answers)
    engine.abort(map(str, range(len(asks))))  # long finished
    expected = {name: answer for name, answer in alone("float32", True).items() if name not in silent}
    assert differences(answers, expected) == []


def test_abort_forgets_outputs_not_yet_delivered(engine):
    engine.add_request("x", [1, 2, 3], GREEDY)
    engine.step()
    engine.drain()
    engine.abort("x")
    assert finish_all(engine) == {}


def test_finish_ends_one_sample_and_no_other(engine):
    (prompt,) = prompts(9)
    params = SamplingParams(temperature=1.0, seed=2, n=3, max_tokens=10, ignore_eos=True)
    samples = engine.add_request("x", prompt, params)
    answers: dict[str, Answer] = {}
    while samples[1].num_output_tokens < 3:
        for output in engine.step():
            answers.setdefault(output.request.request_id, Answer()).take(output)
    engine.finish(samples[1], "stop", "a stop string")
    assert (samples[1].finish_reason, samples[1].stop_reason) == ("stop", "a stop string")
    engine.finish(samples[1], "abort")  # harmless, and not what it ended by
    assert samples[1].finish_reason == "stop"
    finish_all(engine, answers)
    stopped = answers.pop("x/1")
    expected = serve_alone(dummy_model(), [Ask(prompt, params)], bucket_plan=ONE_BUCKET)
    assert [answers[f"x/{i}"].tokens for i in (0, 2)] == [expected[f"0/{i}"].tokens for i in (0, 2)]
    assert stopped.tokens == expected["0/1"].tokens[:3] and stopped.finish_reason is None


def test_finish_forgets_outputs_not_yet_delivered(engine):
    (request,) = engine.add_request("x", [1, 2, 3], GREEDY)
    engine.step()
    engine.drain()
    engine.finish(request, "stop")
    assert finish_all(engine) == {}


def test_close_ends_everything(engine):
    for i, ask in enumerate(requests(True)):
        add(engine, str(i), ask)
    for _ in range(4):
        engine.step()
    engine.close()
    assert_empty(engine)


# -- logits that are not numbers


def poisoned_model(token: int):
    leaves = named_leaves(dummy_model())
    table = leaves["embed_tokens/embedding"]
    return with_leaves(dummy_model(), {**leaves, "embed_tokens/embedding": table.at[token].set(jnp.nan)})


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("place", ["prompt", "output"])
def test_nan_ends_its_own_request_alone(place, asynchronous, caplog):
    """One token's embedding is NaN: in a prompt's middle (its chunks go on with NaN in their pages), or generated."""
    asks = [requests(True)[i] for i in (1, 2, 6, 8)]
    expected = serve_alone(dummy_model(), asks, bucket_plan=ONE_BUCKET)
    (prefix,) = prompts(30)
    base = serve_alone(dummy_model(), [Ask(prefix, GREEDY)], bucket_plan=ONE_BUCKET)["0"].tokens
    others = {t for ask in asks for t in ask.prompt} | {t for a in expected.values() for t in a.tokens}
    if place == "prompt":
        bad, num_output = next(t for t in range(1, VOCAB) if t not in others and t not in prefix), 0
        prompt = [*prefix[:17], bad, *prefix[17:]]
    else:  # it comes out, is delivered, and goes in
        fresh = [i for i, t in enumerate(base[:-1]) if t not in others and t not in prefix and t not in base[:i]]
        assert fresh, "every token of the answer is used by another request"
        bad, num_output, prompt = base[fresh[0]], fresh[0] + 1, prefix
    model = poisoned_model(bad)
    engine = make_engine(model, bucket_plan=ONE_BUCKET, async_scheduling=asynchronous)
    asks.append(Ask(prompt, GREEDY.with_(max_tokens=20), at=2))
    with caplog.at_level(logging.ERROR, logger="jaxserve"):
        answers = serve(engine, asks).answers
    victim = answers.pop(str(len(asks) - 1))
    assert victim.finish_reason == "error" and victim.tokens == base[:num_output]
    assert f"NaN or infinite after {len(prompt) + num_output} tokens" in str(victim.stop_reason)
    assert [r.getMessage() for r in caplog.records] == [f"request {len(asks) - 1}: {victim.stop_reason}"]
    assert engine.stats.bad_rows == 1
    assert differences(answers, expected) == []
    # What it wrote is not hit, not even the pages before the bad token; its beginning is served as ever.
    hits = engine.scheduler.stats().num_hit_tokens
    ask = Ask(prefix[:16] + asks[0].prompt, GREEDY.with_(max_tokens=1))
    again = serve(engine, [ask])
    assert again.stats.num_hit_tokens == hits
    assert differences(again.answers, serve_alone(dummy_model(), [ask], bucket_plan=ONE_BUCKET)) == []


# -- broken steps


@pytest.mark.parametrize("where", ["before the dispatch", "inside it", "after it", "in the fetch"])
def test_a_step_that_breaks_aborts_all_and_leaves_the_engine_usable(engine, where, monkeypatch):
    """Inside the dispatch, the step's donated state is gone and what replaces it is lost."""
    groups = [add(engine, str(i), ask) for i, ask in enumerate(requests(True))]
    for _ in range(3):
        engine.step()
    runner = engine.runner
    dispatch, program = runner.dispatch_body, runner.programs.get

    def breaks(*args):
        if where == "after it":
            dispatch(*args)
        raise KeyboardInterrupt

    def breaks_inside(bucket):
        def run(*args):
            program(bucket)(*args)
            raise KeyboardInterrupt

        return run

    if where == "inside it":
        monkeypatch.setattr(runner.programs, "get", breaks_inside)
    else:
        monkeypatch.setattr(runner, "fetch" if where == "in the fetch" else "dispatch_body", breaks)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert_empty(engine)
    assert all(r.finished for group in groups for r in group)
    assert differences(serve(engine, requests(True)).answers, alone("float32", True)) == []


# -- counts


def test_first_step_returns_nothing_and_the_next_its_tokens(engine):
    """A step late when asynchronous, at once when not."""
    engine.add_request("x", [1, 2, 3], GREEDY)
    assert engine.step() == []
    (output,) = engine.step()
    assert len(output.new_token_ids) == 1 and not output.finished
    synchronous = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, async_scheduling=False)
    synchronous.add_request("x", [1, 2, 3], GREEDY)
    assert [o.new_token_ids for o in synchronous.step()] == [output.new_token_ids]


def test_drain_keeps_what_it_fetches_for_the_next_step(engine):
    expected = serve_alone(dummy_model(), [Ask([1, 2, 3], GREEDY)], bucket_plan=ONE_BUCKET)["0"]
    engine.add_request("x", [1, 2, 3], GREEDY)
    answers: dict[str, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers.setdefault("x", Answer()).take(output)
        engine.drain()
        assert not engine.pipeline.in_flight
    assert answers["x"] == expected


def test_stats_add_up():
    """Against the schedules and the answers themselves; no prompt is hit or preempted here, so that tokens are what was asked."""
    engine = make_engine(dummy_model(), enable_prefix_caching=False)
    run = serve(engine, requests(True, logprobs=True))
    stats, padding = engine.stats, engine.stats.padding
    asks = requests(True)
    page_size = engine.config.cache.page_size
    shared = [(ask.params.n - 1) * ((len(ask.prompt) - 1) // page_size * page_size) for ask in asks]  # with the first sample
    assert stats.prefill_tokens == sum(len(ask.prompt) * ask.params.n for ask in asks) - sum(shared)
    assert stats.generated_tokens == sum(len(answer.tokens) for answer in run.answers.values())
    assert stats.num_steps == padding.num_steps == len(run.schedules) == run.stats.num_steps
    select = engine.config.plan.select
    buckets = [select(s.num_tokens, s.num_seqs, int(max(s.q_lens))) for s in run.schedules]
    assert padding.steps == collections.Counter(buckets) and len(padding.steps) > 2
    tokens = sum(int(s.q_lens.sum()) for s in run.schedules)
    assert (padding.tokens, padding.tokens + padding.padded_tokens) == (tokens, sum(b.tokens for b in buckets))
    assert padding.head_rows == sum(int(s.samples.sum()) for s in run.schedules)
    assert padding.padding_share == pytest.approx(1 - tokens / sum(b.tokens for b in buckets))
    assert dict(padding.by_bucket()) == padding.steps


def test_demand_log_has_a_line_a_step(tmp_path):
    path = tmp_path / "demand.jsonl"
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, demand_log=str(path))
    run = serve(engine, requests(True))
    engine.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(run.schedules)
    for i, (line, s) in enumerate(zip(lines, run.schedules, strict=True), 1):
        assert line.pop("waiting") >= 0
        ends, d, page_size = s.starts + s.q_lens, s.num_decodes, engine.config.cache.page_size
        chunks = [range(start, end) for start, end in zip(s.starts[d:].tolist(), ends[d:].tolist(), strict=True)]
        assert line == {
            "step": i,
            "tokens": int(s.q_lens.sum()),
            "seqs": len(s.requests),
            "decodes": s.num_decodes,
            "max_q_len": int(max(s.q_lens)),
            "samples": int(sum(s.samples)),
            "kv_tokens": sum(-(-end // page_size) * page_size for end in ends[:d].tolist()),
            "pairs": sum(position + 1 for chunk in chunks for position in chunk),
            "bucket": [24, 6],
        }


def test_metrics_of_a_request(engine):
    groups: list[list[Request]] = [add(engine, str(i), ask) for i, ask in enumerate(requests(True))]
    finish_all(engine)
    for request in (r for group in groups for r in group):
        m = request.metrics
        assert m is not None and m.first_scheduled_time and m.first_token_time and m.finished_time
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
        assert m.ttft == m.first_token_time - m.arrival_time
        assert m.num_preemptions == request.num_preemptions


def test_state_is_donated_and_weights_are_not(engine):
    """A step reuses its state's buffers: KV pages are written in place, and the old arrays are gone."""
    engine.add_request("x", [1, 2, 3], GREEDY)
    runner = engine.runner
    for _ in range(3):
        state = jax.tree.leaves(runner.state)
        places = [x.unsafe_buffer_pointer() for x in runner.state.kv_pages]
        engine.step()
        assert all(x.is_deleted() for x in state)
        assert [x.unsafe_buffer_pointer() for x in runner.state.kv_pages] == places
    assert not any(x.is_deleted() for x in runner.programs.functions.weights)
    leaves = named_leaves(dummy_model()).values()
    assert {id(x) for x in (*runner.body_weights, *runner.head_weights)} == {id(x) for x in leaves}, "weights were copied"


def test_describe_says_what_was_decided(engine):
    said = engine.describe()
    for part in ("attention: xla", "128 pages of 4 tokens", "24 tokens and 6 sequences", "up to 192 tokens", "5 programs"):
        assert part in said
