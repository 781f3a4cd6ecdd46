"""Grammars in llguidance's Lark that are made of parts: structural tags, and a form after a preamble.

Owns how a text is written in such a grammar. A vocabulary may hold a text such as <tool_call> as a single token, and a model that
was trained with it writes it in no other way. llguidance treats such a token as a mark: a grammar must name it, since the same
characters as text never allow it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers
    from llguidance import LLTokenizer

_PRIVATE = "\ue000"  # of Unicode's private use
_LARK_WORDS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s]+>')  # strings, comments, regexes, <names>
HEAD = "%llguidance {}\nTEXT: /(.|\\n)*/\n"
BLANKS = "BLANKS: /[ \\t\\r\\n]{0,8}/\n"  # a bound, because small models can't stop


def without_marks(tokenizer: tokenizers.Tokenizer) -> str:
    """The tokenizer as JSON, with its marks renamed to texts that do not occur.

    llguidance forces a grammar's text in the tokenizer's own tokens. Where that is a mark, it would force the mark and then refuse
    it.
    """
    source = json.loads(tokenizer.to_str())
    renamed = {}
    for token in source["added_tokens"]:
        name = token["content"]
        if token["special"] or re.fullmatch("<.*>", name, re.DOTALL):
            renamed[name] = token["content"] = f"<{_PRIVATE}{name}>"
    model = source["model"]  # its vocabulary may hold a mark too
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(name, name): i for name, i in model["vocab"].items()}
    else:  # of a unigram model
        model["vocab"] = [[renamed.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return json.dumps(source)


class Marks:
    """The marks of a tokenizer, and how texts are written with them. vocabulary: llguidance's view of the tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: LLTokenizer):
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: i for i, token in added.items() if vocabulary.is_special_token(i)}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def by_id(self, grammar: str) -> str:
        """The Lark grammar with each <mark> written as <[token id]>, since `without_marks` has renamed the marks."""

        def written(found: re.Match[str]) -> str:
            return f"<[{self._ids[found[0]]}]>" if found[0] in self._ids else found[0]

        return _LARK_WORDS.sub(written, grammar)

    def id_of(self, mark: str) -> int:
        """The token id of a mark."""
        return self._ids[mark]

    def is_mark(self, text: str) -> bool:
        """Whether the text is a mark."""
        return text in self._ids

    def spell(self, text: str) -> str:
        """The text as a sequence of Lark's strings and tokens; "" where it is empty."""
        parts = self._split.split(text) if self._split else [text]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts if part)

    def text_until(self, rule: str, mark: str) -> str:
        """A rule of that name: any text up to the first `mark`, and the mark."""
        return f"{rule}: TEXT {self.spell(mark)}\n" if self.is_mark(mark) else f"{rule}[lazy]: TEXT {json.dumps(mark)}\n"


def structural_tag(tag: Mapping[str, Any], marks: Marks) -> str:
    """The grammar of `StructuredOutputsParams.structural_tag`.

    A structure is possible only after its trigger. Each trigger has a rule for the text before it, and one for its structures.
    """
    by_trigger: dict[str, list[Mapping[str, Any]]] = {}
    for structure in tag["structures"]:
        begun_by = [trigger for trigger in tag["triggers"] if structure["begin"].startswith(trigger)]
        by_trigger.setdefault(max(begun_by, key=len), []).append(structure)
    alone, first_only = tag.get("only_structures", False) or "otherwise" in tag, tag.get("stop_after_first", False)
    rules = []
    for i, (trigger, structures) in enumerate(by_trigger.items()):
        rules.append(f"trigger_{i}: {marks.spell(trigger)}\n" if alone else marks.text_until(f"trigger_{i}", trigger))
        bodies = [_body(structure, len(trigger), marks) for structure in structures]
        rules.append(f"tag_{i}: trigger_{i} ({' | '.join(bodies)})\n")
    tags = " | ".join(f"tag_{i}" for i in range(len(by_trigger)))
    if alone:
        start = f"({tags})" if first_only else f"({tags}) (BLANKS ({tags}))*"
    else:
        start = f"TEXT | {tags}" if first_only else f"({tags})* TEXT"
    if "otherwise" in tag:
        start += " | otherwise"
        rules.append(f"otherwise: %json {json.dumps(tag['otherwise'])}\n")
    return HEAD + BLANKS + f"start: {start}\n" + "".join(rules)


def _body(structure: Mapping[str, Any], num_said: int, marks: Marks) -> str:
    """A structure after its trigger, which is the first `num_said` characters of the structure's `begin`."""
    begin, end = marks.spell(structure["begin"][num_said:]), marks.spell(structure["end"])
    return f"{begin} %json {json.dumps(structure['schema'])} {end}"


def counted(rule: str, begin: str, end: str, most: int, marks: Marks, but: Iterable[int] = ()) -> str:
    """A rule of that name: at most `most` tokens, none of them `end` or in `but`, and then `end`.

    Raises:
      ValueError: `begin` (unless it is "") or `end` is no mark, so that tokens do not say where the text between them lies.
    """
    for mark in filter(None, (begin, end)):
        if not marks.is_mark(mark):
            raise ValueError(f"tokens can be counted only between marks that are tokens, and {mark!r} is none of this model's")
    others = ",".join(str(i) for i in sorted({marks.id_of(end), *but}))
    counted = f"<[^{others}]>{{0,{most}}} " if most else ""
    return f"{rule}: {counted}{marks.spell(end)}\n"


def anything(begin: str, marks: Marks) -> str:
    """The grammar of any tokens but the mark `begin`, or of any tokens at all where that is ""."""
    return f"start: <[^{marks.id_of(begin)}]>*\n" if begin else "start: <[*]>*\n"


def after_preamble(begin: str, closing: str, form: str, marks: Marks) -> str:
    """The grammar `form` (any text that llguidance reads) after a preamble: `begin`, and what the rule `closing` says, which ends
    with the preamble's end. The preamble is optional, unless begin is "": the prompt then ends with its beginning."""
    preamble = f"BLANKS {marks.spell(begin)} closing BLANKS" if begin else "closing BLANKS"
    start = "start: preamble? @form\n" if begin else "start: preamble @form\n"
    head = HEAD + BLANKS + start + f"preamble: {preamble}\n" + closing
    try:
        first, *others = json.loads(form)["grammars"]
    except ValueError:  # Lark
        first, others = {"lark_grammar": form}, []
    return json.dumps({"grammars": [{"lark_grammar": head}, first | {"name": "form"}, *others]})
