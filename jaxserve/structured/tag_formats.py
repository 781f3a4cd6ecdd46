"""Structural tags in the form {"type": "structural_tag", "format": {...}}, as xgrammar and vLLM have it, in llguidance's Lark.

Owns what each type of format means. lark.py knows how a text is written in a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.structured.lark import BLANKS, HEAD, Marks

Format = Mapping[str, Any]


def grammar_of(form: Any, marks: Marks) -> str:
    """The grammar of a format.

    Raises:
      ValueError: it is malformed, or of a type that is not supported; the message names it.
    """
    writer = _Writer(marks)
    start = writer.rule(form)
    return HEAD + BLANKS + f"start: {start}\n" + "".join(writer.rules)


class _Writer:
    """Writes rules, one for each format."""

    def __init__(self, marks: Marks):
        self._marks = marks
        self.rules: list[str] = []
        self._types: dict[str, Callable[[Format], str]] = {
            "const_string": lambda form: self._text(form, "value"),
            "json_schema": self._schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": lambda form: self._sequence(_list(form, "elements")),
            "or": lambda form: " | ".join(map(self.rule, _list(form, "elements"))),
            "optional": lambda form: f"{self.rule(form.get('content'))}?",
            "star": lambda form: f"{self.rule(form.get('content'))}*",
            "plus": lambda form: f"{self.rule(form.get('content'))}+",
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def rule(self, form: Any) -> str:
        """The name of a rule for a format."""
        write = self._types.get(str(form.get("type"))) if isinstance(form, Mapping) else None
        if write is None:
            said = form.get("type") if isinstance(form, Mapping) else form
            raise ValueError(f"a format's type is {said!r}; it must be one of {', '.join(self._types)}")
        return self._add(write(form))

    def _add(self, body: str) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}: {body}\n")
        return name

    def _until(self, mark: str) -> str:
        """The name of a rule for any text up to the first `mark`, and the mark."""
        name = f"part_{len(self.rules)}"
        self.rules.append(self._marks.text_until(name, mark))
        return name

    def _spell(self, text: str) -> str:
        return self._marks.spell(text) or '""'

    def _text(self, form: Format, name: str) -> str:
        return self._spell(_text(form, name))

    def _schema(self, form: Format) -> str:
        if form.get("style", "json") != "json":
            raise ValueError(f"json_schema: style={form['style']!r} is not supported; leave it out")
        return f"%json {json.dumps(form.get('json_schema', {}))}"

    def _regex(self, form: Format) -> str:
        pattern = _text(form, "pattern").replace("\n", "\\n")
        return f"/{re.sub(r'(?<!\\)/', r'\\/', pattern)}/"

    def _any_text(self, form: Format) -> str:
        excluded = form.get("excludes") or []
        if not excluded:
            return "TEXT"
        name = f"TEXT_{len(self.rules)}"
        words = "|".join(re.escape(word).replace("/", "\\/") for word in excluded)
        self.rules.append(f"{name}: /(.|\\n)*/ & ~/(.|\\n)*({words})(.|\\n)*/\n")
        return name

    def _sequence(self, elements: Sequence[Any]) -> str:
        """One after the other. Free text ends where the next element's first text begins."""
        written, pending = [], False
        for element in elements:
            free = isinstance(element, Mapping) and element.get("type") == "any_text" and not element.get("excludes")
            if pending:
                begin, rest = self._opened(element)
                written += [self._until(begin), rest]
            elif not free:
                written.append(self.rule(element))
            pending = free
        return " ".join([*written, *(["TEXT"] if pending else [])])

    def _opened(self, element: Any) -> tuple[str, str]:
        """(the text with which an element begins, the rest of it as rules)."""
        kind = element.get("type") if isinstance(element, Mapping) else None
        if kind == "const_string":
            return _text(element, "value"), '""'
        if kind == "tag":
            return _text(element, "begin"), self._behind_begin(element)
        raise ValueError("any_text may stand at a sequence's end, or before a const_string or a tag, whose text ends it")

    def _tag(self, form: Format) -> str:
        return f"{self._text(form, 'begin')} {self._behind_begin(form)}"

    def _behind_begin(self, form: Format, num_said: int | None = None) -> str:
        """A tag after its begin, or after the first num_said characters of that."""
        rest = "" if num_said is None else self._marks.spell(_text(form, "begin")[num_said:])
        ends = form.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not (isinstance(ends, list) and ends and all(isinstance(end, str) for end in ends)):
            raise ValueError(f"tag: end={form.get('end')!r} must be a text or a list of texts")
        content = form.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            inner = " | ".join(map(self._until, ends))
        else:
            inner = f"{self.rule(content)} ({' | '.join(map(self._spell, ends))})"
        return f"{rest} ({inner})"

    def _triggered(self, form: Format) -> str:
        """Free text in which a trigger begins one of the tags that begin with it."""
        triggers, tags = _list(form, "triggers"), _list(form, "tags")
        by_trigger: dict[str, list[Format]] = {}
        for tag in tags:
            begin = _text(tag, "begin")
            if not (begun_by := [trigger for trigger in triggers if begin.startswith(trigger)]):
                raise ValueError(f"triggered_tags: begin={begin!r} starts with none of the triggers {triggers}")
            by_trigger.setdefault(max(begun_by, key=len), []).append(tag)
        rules = []
        for trigger, its_tags in by_trigger.items():
            bodies = " | ".join(self._behind_begin(tag, len(trigger)) for tag in its_tags)
            rules.append(self._add(f"{self._until(trigger)} ({bodies})"))
        one = f"({' | '.join(rules)})"
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else f"TEXT | {one}"
        return f"{one}{'+' if form.get('at_least_one') else '*'} TEXT"

    def _separated(self, form: Format) -> str:
        one = f"({' | '.join(map(self.rule, _list(form, 'tags')))})"
        if not form.get("stop_after_first"):
            one = f"({one} ({self._spell(_text(form, 'separator'))} {one})*)"
        return one if form.get("at_least_one") else f"{one}?"


def _text(form: Any, name: str) -> str:
    value = form.get(name) if isinstance(form, Mapping) else None
    if not isinstance(value, str):
        raise ValueError(f"a format's {name}={value!r} must be a text: {form}")
    return value


def _list(form: Format, name: str) -> list[Any]:
    value = form.get(name)
    if not (isinstance(value, list) and value):
        raise ValueError(f"{form.get('type')}: {name}={value!r} must be a list that is not empty")
    return value
