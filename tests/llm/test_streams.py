"""`LLM.stream`: what it yields, by turns, closed and aborted."""

import pytest

from tests.alphabet_model import after
from tests.llm.alphabet_llm import assert_idle, generate, greedy, texts


def test_stream_yields_what_grew(llm):
    seen: dict[int, list[str]] = {0: [], 1: []}
    for index, output in llm.stream(["a", "m"], [greedy(max_tokens=3), greedy(max_tokens=5, stop=["qrs"])]):
        seen[index].append(output.outputs[0].text)
    assert seen == {0: ["b", "bc", "bcd"], 1: ["", "", "n", "no", "nopqr"]}


def test_stream_checks_its_arguments_at_once_and_closing_it_aborts(llm):
    with pytest.raises(ValueError, match="empty prompt"):
        llm.stream("")
    stream = llm.stream(["a", "b"], greedy(max_tokens=100))
    next(stream)
    assert llm.engine.has_unfinished_requests()
    stream.close()
    assert_idle(llm)
    llm.stream("a").close()  # never begun


def test_streams_may_be_read_by_turns(llm):
    first, second = llm.stream("a", greedy()), llm.stream(["b", "c"], greedy(max_tokens=20))
    next(first)
    next(second)
    assert texts(generate(llm, ["d"])) == [after("d", 8)]
    ended = {index: output for index, output in second if output.finished}
    assert texts([ended[0], ended[1]]) == [after("b", 20), after("c", 20)]
    *_, (_, last) = first
    assert last.finished and last.outputs[0].text == after("a", 8)


def test_aborting_a_streams_requests_behind_its_back_is_said(llm):
    stream = llm.stream("a", greedy(max_tokens=100))
    _, output = next(stream)
    llm.engine.abort(output.request_id)
    with pytest.raises(RuntimeError, match="aborted from elsewhere"):
        list(stream)
