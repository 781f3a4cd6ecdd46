"""Requests' lives in the engine: how they end, what leaves with them, what one's end does to the others (nothing)."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import SamplingParams
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
    serve,
    serve_alone,
    stages,
)
from tests.engine.dummy_runs import GREEDY, finish_all, greedy, prompts
from tests.workload import alone, requests


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
    programs = stages(engine)[-1].programs
    dispatch, program = runner.dispatch_body, programs.get

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
        monkeypatch.setattr(programs, "get", breaks_inside)
    else:
        monkeypatch.setattr(runner, "fetch" if where == "in the fetch" else "dispatch_body", breaks)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert_empty(engine)
    assert all(r.finished for group in groups for r in group)
    assert differences(serve(engine, requests(True)).answers, alone("float32", True)) == []


# -- counts
