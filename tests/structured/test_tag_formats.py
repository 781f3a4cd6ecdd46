"""Structural tags in their newer form: what each type of format allows, over vocabularies where marks are tokens and where not."""

import pytest

from jaxserve.structured.grammars import GrammarError
from jaxserve.structured_outputs import BACKENDS, StructuredOutputsParams
from tests.structured.test_lark import compiler, read

__all__ = ["compiler"]

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
CALL = {"type": "tag", "begin": "<tool_call>", "content": INTEGER, "end": "</tool_call>"}
NOTE = {"type": "tag", "begin": "<note>", "content": {"type": "any_text"}, "end": ["</note>", "<end>"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<tool_call>", "<no"], "tags": [CALL, NOTE]}
SEPARATED = {"type": "tags_with_separator", "tags": [CALL, NOTE], "separator": ", "}
YES = {"type": "const_string", "value": "yes"}
SAID = "<tool_call>12</tool_call>"
CASES = [
    (YES, {"yes": "nothing", "ye": "more", "no": None}),
    (INTEGER, {"12": "maybe", "x": None}),
    ({"type": "regex", "pattern": "[a/b]+"}, {"a/b": "maybe", "c": None}),
    ({"type": "any_text"}, {"": "maybe", "hm": "maybe"}),
    ({"type": "any_text", "excludes": ["no", "a/b"]}, {"hm n": "maybe", "hm no": None, "a/b": None}),
    ({"type": "or", "elements": [YES, INTEGER]}, {"yes": "nothing", "1": "maybe", "yes1": None}),
    ({"type": "optional", "content": YES}, {"": "maybe", "yes": "nothing"}),
    ({"type": "star", "content": YES}, {"": "maybe", "yesyes": "maybe"}),
    ({"type": "plus", "content": YES}, {"": "more", "yesyes": "maybe"}),
    (CALL, {SAID: "nothing", "<tool_call>x": None, "<tool_call>12": "more"}),
    (NOTE, {"<note>a<b</note>": "nothing", "<note>a<end>": "nothing", "<note>a</note>b": None}),
    (TRIGGERED, {"": "maybe", f"hm {SAID} hm": "maybe", "<tool_call>hm": None, "<note>x</note>": "maybe", "<now": None}),
    (TRIGGERED | {"at_least_one": True}, {"": "more", "hm": "more", f"hm {SAID} hm": "maybe"}),
    (TRIGGERED | {"stop_after_first": True}, {"hm": "maybe", f"hm {SAID}": "nothing", f"{SAID} hm": None}),
    (TRIGGERED | {"stop_after_first": True, "at_least_one": True}, {"": "more", f"hm {SAID}": "nothing"}),
    (SEPARATED, {"": "maybe", f"{SAID}, <note>x</note>": "maybe", f"{SAID}{SAID}": None}),
    (SEPARATED | {"at_least_one": True}, {"": "more", SAID: "maybe"}),
    (SEPARATED | {"stop_after_first": True}, {SAID: "nothing", f"{SAID}, {SAID}": None}),
    (
        {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "</think>"}, YES, NOTE]},
        {"hm</think>yes<note>": "more", "hm</think>no": None, "hm": "more"},
    ),
    ({"type": "sequence", "elements": [YES, {"type": "any_text"}]}, {"yes": "maybe", "yes and no": "maybe", "no": None}),
    ({"type": "sequence", "elements": [{"type": "any_text"}, CALL]}, {f"hm {SAID}": "nothing", "hm": "more"}),
]


@pytest.mark.parametrize("form,texts", CASES, ids=[str(form)[:60] for form, _ in CASES])
def test_what_a_format_allows(compiler, form, texts):
    params = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    assert {text: read(compiler, params, text) for text in texts} == texts


@pytest.mark.parametrize(
    "form,said",
    [
        ({"type": "nope"}, "a format's type is 'nope'; it must be one of const_string"),
        ({"type": "tag", "begin": "a", "content": YES}, "end=None must be a text or a list"),
        ({"type": "tag", "begin": 1, "content": YES, "end": ""}, "begin=1 must be a text"),
        ({"type": "sequence", "elements": []}, "elements=\\[\\] must be a list that is not empty"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, INTEGER]}, "any_text may stand at a sequence's end"),
        (TRIGGERED | {"triggers": ["<x"]}, "starts with none of the triggers"),
        (INTEGER | {"style": "qwen_xml"}, "style='qwen_xml' is not supported"),
        ({"type": "regex", "pattern": "("}, "structural_tag"),
    ],
)
def test_what_is_no_format(compiler, form, said):
    with pytest.raises(GrammarError, match=said):
        compiler.compile(StructuredOutputsParams(structural_tag={"format": form}))


def test_what_stands_beside_a_format():
    with pytest.raises(ValueError, match="beside 'format', an object, there may only be 'type'"):
        StructuredOutputsParams(structural_tag={"format": YES, "triggers": ["a"]})


def test_names_of_compilers():
    plain = StructuredOutputsParams(json={"type": "object"})
    assert all(StructuredOutputsParams(json={"type": "object"}, backend=name) == plain for name in BACKENDS)
    with pytest.raises(ValueError, match="backend='outlines' has no grammar; leave it out, or give guidance"):
        StructuredOutputsParams(grammar='start: "a"', backend="outlines")
    with pytest.raises(ValueError, match="backend='mine' must be one of auto, guidance, xgrammar"):
        StructuredOutputsParams(regex="a", backend="mine")


def test_json_without_whitespace_is_compact(compiler):
    params = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}}, disable_any_whitespace=True)
    assert read(compiler, params, "[1,2]") == "nothing" and read(compiler, params, "[1, 2]") is None


# ---- counted preambles


def test_a_preamble_of_so_many_tokens(compiler):
    marks = ("<think>", "</think>")
    params = StructuredOutputsParams(choice=["yes"], preamble=marks, max_preamble_tokens=2)
    if not compiler.has_marks:
        with pytest.raises(GrammarError, match="can be counted only between marks that are tokens"):
            compiler.compile(params)
        return
    texts = {
        "<think>ab</think>yes": "nothing",
        "<think></think>yes": "nothing",
        "yes": "nothing",
        "<think>abc": None,
        "<think>ab": "more",
    }
    assert {text: read(compiler, params, text) for text in texts} == texts
    free = StructuredOutputsParams(preamble=("", "</think>"), max_preamble_tokens=2)
    texts = {"ab</think>whatever<tool_call>": "maybe", "abc": None, "a": "more"}
    assert {text: read(compiler, free, text) for text in texts} == texts


def test_counting_needs_a_preamble():
    with pytest.raises(ValueError, match="max_preamble_tokens=2 needs a preamble"):
        StructuredOutputsParams(max_preamble_tokens=2)
    with pytest.raises(ValueError, match="max_preamble_tokens=-1 must be an integer >= 0"):
        StructuredOutputsParams(preamble=("a", "b"), max_preamble_tokens=-1)
