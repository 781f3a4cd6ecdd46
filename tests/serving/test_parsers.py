"""Reasoning, content and tool calls of a text, however it is cut: the pieces are those of the whole text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.serving.notations import HERMES, REASONING
from jaxserve.serving.parsers import CallPart, Content, Notation, OutputParser, Reasoning

BOTH = Notation(REASONING["qwen3"], HERMES)
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln {\\"x\\"}", "days": [1, {"a": 2}]}}\n</tool_call>'
WEATHER_ARGUMENTS = {"city": 'Köln {"x"}', "days": [1, {"a": 2}]}


def parse(parts: list[str], notation: Notation = BOTH, **options):
    """(reasoning, content, calls) of a text that comes in parts."""
    parser = OutputParser(notation, **options)
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallPart):
            if piece.name is not None:
                assert piece.index not in calls, "a name comes once, first"
                calls[piece.index] = [piece.name, ""]
            calls[piece.index][1] += piece.arguments
    assert parser.num_calls >= len(calls)
    said = {kind: "".join(p.text for p in pieces if isinstance(p, kind)) for kind in (Reasoning, Content)}
    return said[Reasoning], said[Content], [(name, arguments) for name, arguments in calls.values()]


CASES = {
    "plain": ("Hello <b>you</b>.\n", ("", "Hello <b>you</b>.\n", [])),
    "thought": ("<think>\nwell,\n\nyes\n</think>\n\nFine.", ("well,\n\nyes", "Fine.", [])),
    "empty thought": ("<think>\n\n</think>\n\nFine.", ("", "Fine.", [])),
    "cut thought": ("<think>\nwell", ("well", "", [])),
    "not a thought": ("<thin ice", ("", "<thin ice", [])),
    "blank lines first": ("\n\n x", ("", "\n\n x", [])),
    "a call": (WEATHER, ("", "", [("weather", WEATHER_ARGUMENTS)])),
    "thought, text, calls": (
        f"<think>a</think>\nLet me see.\n{WEATHER}\n{WEATHER}",
        ("a", "Let me see.", [("weather", WEATHER_ARGUMENTS)] * 2),
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", {})])),
    "arguments first": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", {"a": 1})])),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("", "", [("f", {"a": 1})])),
    "never closed": ('<tool_call>{"name": "f", "arguments": {"a": 1}}', ("", "", [("f", {"a": 1})])),
    "no call": ("<tool_call>nonsense</tool_call> after", ("", "<tool_call>nonsense</tool_call>after", [])),
    "a number": ("<tool_call>1</tool_call>", ("", "<tool_call>1</tool_call>", [])),
    "cut mark": ("a <tool_ca", ("", "a <tool_ca", [])),
}


def checked(found, expected):
    reasoning, content, calls = found
    assert (reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]) == expected


@pytest.mark.parametrize("name", CASES)
def test_whole_and_a_character_at_a_time(name):
    text, expected = CASES[name]
    checked(parse([text]), expected)
    checked(parse(list(text)), expected)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 200), max_size=8))
def test_however_it_is_cut(name, cuts):
    text, expected = CASES[name]
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    checked(parse([text[a:b] for a, b in zip(at, at[1:], strict=False)]), expected)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', "}", "}}", " ", "x", '"']
        )
    )
)
def test_any_mess_is_parsed_alike_whole_and_in_parts(parts):
    assert parse(parts) == parse(["".join(parts)])


def test_arguments_come_before_the_call_is_complete():
    parser = OutputParser(BOTH)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": "long') == [
        CallPart(0, "f", ""),
        CallPart(0, None, '{"a": "long'),
    ]
    assert parser.feed(' text"}') == [CallPart(0, None, ' text"}')]
    assert parser.feed("}</tool_call>") == []


def test_a_prompt_that_opened_the_thought():
    assert parse(["yes\n</think>\n\nFine."], prompt="...<|assistant|>\n<think>\n") == ("yes", "Fine.", [])
    assert parse(["Fine."], prompt="...<think>\n\n</think>\n\n") == ("", "Fine.", [])


def test_notations_that_are_off_are_content():
    text = f"<think>a</think>{WEATHER}"
    assert parse([text], Notation()) == ("", text, [])
    assert parse([text], Notation(REASONING["qwen3"])) == ("a", WEATHER, [])


def test_calls_beyond_the_most_are_dropped():
    _, content, calls = parse([WEATHER + WEATHER + "end"], max_calls=1)
    assert len(calls) == 1 and content == "end"


def test_notation_of_a_template():
    assert Notation.of_template("{{ '<think>' }}...{{ '</think>' }} <tool_call>") == BOTH
    assert Notation.of_template("{{ messages[0].content }}") == Notation()
