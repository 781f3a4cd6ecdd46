"""Requests that the engine refuses: nothing of them is left."""

import math
from typing import Any

import numpy as np
import pytest

from tests.dummy import (
    EOS,
    ONE_BUCKET,
    SETTINGS,
    VOCAB,
    Answer,
    add,
    differences,
    dummy_model,
    make_engine,
)
from tests.engine.dummy_runs import GREEDY, finish_all, greedy, prompts
from tests.workload import alone, requests


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
        rf"{VOCAB} is out of vocabulary": ("x", [1, VOCAB], GREEDY.with_(n=3)),
        "-1 is out of vocabulary": ("x", [-1], GREEDY),
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
    with pytest.raises(ValueError, match="empty prompt"):
        engine.add_request("x", [], GREEDY, score_from=1)
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
