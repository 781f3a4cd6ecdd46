"""Structural tags and preambles, over vocabularies where their marks are tokens of their own and where they are text."""

import json

import pytest
import tokenizers
from tokenizers import models

from jaxserve.structured import lark
from jaxserve.structured.grammars import GrammarCompiler, GrammarError
from jaxserve.structured.masks import GrammarState
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer
from tests import alphabet_model
from tests.alphabet_model import TURN

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
CALL = '<tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>'
OTHER = '<tool_call>{"name": "fg", "arguments": {"x": [1]}}</tool_call>'
STRUCTURES = [
    {"begin": '<tool_call>{"name": "f", "arguments": ', "schema": CITY, "end": "}</tool_call>"},
    {"begin": '<tool_call>{"name": "fg", "arguments": ', "schema": {"type": "object"}, "end": "}</tool_call>"},
]
TAG = {"structures": STRUCTURES, "triggers": ["<tool_call>", "<"]}


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def compiler(request):
    backend = alphabet_model.backend()
    if request.param:
        backend.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    made = GrammarCompiler(Tokenizer(backend), 264, [alphabet_model.SPECIALS[alphabet_model.EOS]])
    made.__dict__ |= {"has_marks": request.param, "encode": lambda text: backend.encode(text, add_special_tokens=False).ids}
    yield made
    made.close()


def read(compiler, form, text: str) -> str | None:
    """What is left to say after a text: "more", "maybe" or "nothing"; None where the form does not allow the text."""
    state, ids = GrammarState(compiler.compile(form)), compiler.encode(text)
    if state.advance(ids) < len(ids):
        return None
    return "nothing" if state.ended else "maybe" if state.complete else "more"


FREE = {"": "maybe", "hm": "maybe", f"hm {CALL}": "maybe", f"{CALL}\n{OTHER} hm": "maybe", CALL[:-15]: "more"}
FREE |= {f"hm {CALL[:-20]}": "more", "<tool_call>hm": None, CALL.replace("city", "town"): None, "<tool_c": "maybe"}
ONE = FREE | {f"hm {CALL}": "nothing", f"{CALL}\n{OTHER} hm": None, f"{CALL} ": None}
ALONE = {"": "more", "hm": None, CALL: "maybe", f"{CALL}\n{OTHER}": "maybe", f"{CALL} hm": None, f"hm {CALL}": None}
ALONE_ONE = ALONE | {CALL: "nothing", f"{CALL}\n{OTHER}": None, OTHER: "nothing"}
OTHERWISE = ALONE | {'{"a": 1}': "nothing", "{": "more", f"{{}}{CALL}": None, f"{CALL}{{}}": None}
CASES = [
    ({"otherwise": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}}, OTHERWISE),
    ({}, FREE),
    ({"stop_after_first": True}, ONE),
    ({"only_structures": True}, ALONE),
    ({"only_structures": True, "stop_after_first": True}, ALONE_ONE),
]


@pytest.mark.parametrize("options,expected", CASES, ids=["otherwise", "free", "free, one", "alone", "alone, one"])
def test_structural_tags(compiler, options, expected):
    form = {"structural_tag": TAG | {"triggers": ["<tool_call>"]} | options}
    if compiler.has_marks:  # these characters are no trigger then, and a tokenizer never spells a mark so
        expected = {text: left for text, left in expected.items() if text != "<tool_c"}
    assert {text: read(compiler, form, text) for text in expected} == expected


def test_triggers_that_begin_alike(compiler):
    tag = {
        "structures": [{"begin": "<a ", "schema": CITY, "end": "/>"}, {"begin": "<ab ", "schema": {"type": "null"}, "end": "/>"}]
    }
    form = {"structural_tag": tag | {"triggers": ["<a ", "<ab"]}}
    assert read(compiler, form, 'x <a {"city": ""}/> <ab null/>') == "maybe"
    assert read(compiler, form, "<a null/>") is None and read(compiler, form, '<ab {"city": ""}/>') is None


FORMS = {
    "json": ({"json": CITY, "disable_any_whitespace": True}, '{"city":"R"}'),
    "json_object": ({"json_object": True}, '{"a": []}'),
    "regex": ({"regex": "[0-9]{2}"}, "12"),
    "choice": ({"choice": ["yes", "no"]}, "no"),
    "lark": ({"grammar": 'start: "a" b\nb: "c"'}, "ac"),
    "gbnf": ({"grammar": 'root ::= "a" b\nb ::= "c"'}, "ac"),
    "structural_tag": ({"structural_tag": TAG | {"only_structures": True, "stop_after_first": True}}, CALL),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_preamble_before_any_form(compiler, name):
    form, text = FORMS[name]
    maybe, opened = form | {"preamble": ("<think>", "</think>")}, form | {"preamble": ("", "</think>")}
    done = read(compiler, form, text)
    assert done in ("maybe", "nothing")
    assert read(compiler, maybe, text) == done
    for said in ("<think>\nwell, 12 {}</think>\n\n" + text, f"<think></think>{text}"):
        assert read(compiler, maybe, said) == read(compiler, opened, said.removeprefix("<think>")) == done
    for said in ("<think>", "<think>hm", "<think>12", "<think>hm</think>"):
        assert read(compiler, maybe, said) == read(compiler, opened, said.removeprefix("<think>")) == "more"
    assert read(compiler, maybe, f"<think>hm</think>~{text}") is None and read(compiler, maybe, f"~{text}") is None
    assert read(compiler, opened, f"hm</think>~{text}") is None


@pytest.mark.parametrize("preamble", [None, ("<think>", "</think>"), ("", "</think>")])
@pytest.mark.parametrize("form", [{"regex": "[^\\s\\S]"}, {"grammar": 'start: NOTHING "a" | NOTHING\nNOTHING: /a/ & /b/'}])
def test_what_nothing_satisfies_is_refused_behind_a_preamble_too(compiler, form, preamble):
    """What may be said there would hide that nothing may follow it."""
    with pytest.raises(GrammarError, match="nothing satisfies it"):
        compiler.compile(form | {"preamble": preamble})


def test_the_characters_of_a_mark_are_text(compiler):
    """The tokenizer spells them with the mark, which a form that means text must neither force nor wait for."""
    state = GrammarState(compiler.compile({"json": {"const": "a<tool_call>b"}}))
    forced = state.forced
    assert bytes(forced) == json.dumps("a<tool_call>b").encode()
    assert state.advance(forced) == len(forced) and state.ended


def test_marks_by_name_in_a_grammar_of_the_users(compiler):
    """They are marks where Lark names them, and text in its strings, regular expressions and comments."""
    form = {"grammar": 'start: <|turn|> "<|turn|>" /<.turn.>/ x // <|turn|>\nx: "\\"<|turn|>"'}
    assert read(compiler, form, TURN) == "more"
    state = GrammarState(compiler.compile(form))
    said = [alphabet_model.SPECIALS[TURN], *TURN.encode(), *b'<xturnx>"<|turn|>']
    assert state.forced == said[:10]
    assert state.advance(said) == len(said) and state.ended


@pytest.mark.parametrize(
    "form,said",
    [
        ({"structural_tag": TAG | {"only": True}}, r"unknown fields \['only'\]"),
        ({"structural_tag": TAG | {"otherwise": True}}, "otherwise=True must be a JSON schema"),
        ({"structural_tag": TAG | {"stop_after_first": 1}}, "stop_after_first=1 must be true or false"),
        ({"regex": "a", "preamble": "<think>"}, "preamble='<think>' must be two texts"),
        ({"regex": "a", "preamble": ("<think>", "")}, "the second not empty"),
    ],
)
def test_refusals(form, said):
    with pytest.raises(ValueError, match=said):
        StructuredOutputsParams.make(form)


def _wordpiece() -> tokenizers.Tokenizer:
    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "##b": 4}
    return tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))


def _unigram() -> tokenizers.Tokenizer:
    vocabulary = [("<unk>", -9.0), ("</s>", -9.0), ("a", -1.0), ("b", -1.0), ("ab", -1.5)]
    return tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))


@pytest.mark.parametrize("make", [_wordpiece, _unigram])
def test_marks_that_the_vocabulary_holds_too(make):
    """As in sentencepiece's: ids stay, names go, text is spelled as before."""
    backend = make()
    backend.add_special_tokens(["<unk>", "</s>"])
    renamed = tokenizers.Tokenizer.from_str(lark.without_marks(backend))
    assert renamed.get_vocab_size() == backend.get_vocab_size() == 5
    assert renamed.encode("ab").ids == backend.encode("ab").ids
    assert backend.encode("a</s>").ids[-1] == 1 and 1 not in renamed.encode("a</s>").ids
    assert sorted(renamed.get_added_tokens_decoder()) == [0, 1]
