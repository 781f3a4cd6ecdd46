"""Logits that are no numbers, and interrupts between and inside steps: `LLM` stays usable."""

from collections.abc import Callable

import pytest

from jaxserve import LLM, RequestOutput
from jaxserve.engine.progress import ProgressBar
from tests.alphabet_model import after
from tests.goldens.golden import load_golden
from tests.llm.alphabet_llm import PLAN, POISON, assert_idle, generate, greedy, texts


def test_nan_logits_end_one_request_and_nobody_else(llm):
    prompts = ["\x00", "a", POISON + "b", "b"]
    outputs = generate(llm, prompts)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "error", "length"]
    assert "NaN or infinite after 2 tokens" in str(outputs[0].outputs[0].stop_reason)
    assert outputs[0].outputs[0].text == POISON, "the token that led there"
    assert texts(outputs)[1::2] == [after("a", 8), after("b", 8)]
    again = generate(llm, prompts)
    assert texts(again) == texts(outputs) and [o.num_cached_tokens for o in again] == [0, 0, 0, 0]


class Interrupted(ProgressBar):
    def advance(self, output: RequestOutput) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_outside_a_step_aborts_the_call_and_keeps_other_requests(llm, monkeypatch):
    other = llm.stream("p", greedy())
    next(other)
    with monkeypatch.context() as patch:
        patch.setattr("jaxserve.llm.ProgressBar", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a"] * 6, [greedy(max_tokens=2 + i) for i in range(6)])
    *_, (_, output) = other
    assert output.outputs[0].text == after("p", 8)
    assert_idle(llm)
    assert texts(generate(llm, ["a"] * 6)) == [after("a", 8)] * 6


def interrupt(owner: object, name: str, call: int, after_it: bool) -> Callable:
    """owner.name, interrupted at its `call`-th call, before or after it does its work."""
    original, calls = getattr(owner, name), 0

    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs) if after_it or calls != call else None
        if calls == call:
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.fixture(scope="module")
def golden():
    return load_golden("qwen3_tied")


@pytest.fixture(scope="module")
def golden_llm(load, golden):
    """A model with random weights, whose output depends on all of its context. It has no tokenizer."""
    return load(golden.weights, skip_tokenizer_init=True, dtype="float32")


@pytest.mark.parametrize(
    ("where", "name", "call", "after_it"),
    [
        ("scheduler", "schedule", 2, True),
        ("runner", "dispatch_body", 1, False),  # the prompt's pages are known by their hash, and were never written
        ("runner", "dispatch_body", 1, True),
        pytest.param("runner", "dispatch_head", 1, True, marks=pytest.mark.slow),
        pytest.param("runner", "dispatch_body", 3, False, marks=pytest.mark.slow),
        pytest.param("runner", "dispatch_head", 3, False, marks=pytest.mark.slow),
        ("runner", "fetch", 2, False),
        pytest.param("scheduler", "update", 2, False, marks=pytest.mark.slow),
        ("scheduler", "update", 3, True),
    ],
)
def test_an_interrupt_inside_a_step_leaves_the_engine_usable(golden_llm, golden, monkeypatch, where, name, call, after_it):
    owner = getattr(golden_llm.engine, where)
    monkeypatch.setattr(owner, name, interrupt(owner, name, call, after_it))
    check_recovery(golden_llm, golden, monkeypatch)


def test_an_interrupt_that_loses_donated_buffers_leaves_the_engine_usable(golden_llm, golden, monkeypatch):
    programs = golden_llm.engine.runner.programs
    bodies = {bucket: programs.get(bucket) for bucket in PLAN.buckets}

    get = programs.get

    def get_body(key):
        def run(*args):
            bodies[key](*args)
            raise KeyboardInterrupt  # the old pages are consumed, and nobody took the new ones

        return run if key in bodies else get(key)

    monkeypatch.setattr(programs, "get", get_body)
    check_recovery(golden_llm, golden, monkeypatch)


def check_recovery(llm: LLM, golden, monkeypatch) -> None:
    """With the interrupt in place, a run ends; without it, two more bring the tokens that transformers found."""
    prompts, expected = [p.tolist() for p in golden.prompts], golden.greedy.tolist()
    params = greedy(max_tokens=len(expected[0]), ignore_eos=True)
    assert llm.engine.reset_prefix_cache()
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, params)
    monkeypatch.undo()
    assert_idle(llm)
    for _ in range(2):  # the second time from the prefix cache
        outputs = generate(llm, prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == expected
    assert outputs[-1].num_cached_tokens == (len(prompts[-1]) - 1) // 4 * 4 > 0
    assert_idle(llm)
