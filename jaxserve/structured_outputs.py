"""`StructuredOutputsParams`: the form that a request's output must have. Knows nothing of how a form is enforced."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

KINDS: tuple[str, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
BACKENDS: dict[
    str, tuple[str, ...]
] = {  # vLLM's name -> the kinds that it compiles, to the same outputs as llguidance, which compiles them here
    "auto": KINDS,
    "guidance": KINDS,
    "xgrammar": KINDS,
    "outlines": ("json", "regex", "choice", "json_object"),
    "lm-format-enforcer": ("json", "regex", "choice", "json_object"),
}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """One of KINDS, with names and meanings as vLLM's StructuredOutputsParams; the others stay None.

    json: a JSON schema, as a dict or as JSON text, or a pydantic model class.
    regex: a regular expression (of Rust's regex crate: no look-around, no back-references) that the whole output matches.
    choice: the output is one of these strings.
    grammar: a context-free grammar, in llguidance's Lark or in GBNF.
    json_object: any JSON object.
    structural_tag: {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}, as a dict or as JSON text: free text in
      which a trigger starts one of the structures that begin with it. Or {"format": {"type": ...}}, xgrammar's newer form:
      const_string, json_schema, regex, any_text, sequence, or, optional, star, plus, tag, triggered_tags, tags_with_separator.
      Beside structures, with "only_structures": true there is no other text than blanks between them, and one at least; with
      "otherwise": a JSON schema, there is that or else JSON of the schema; with "stop_after_first": true there is one structure at
      most, and nothing behind it.

    disable_any_whitespace: JSON without whitespace but what a string holds. whitespace_pattern: a regular expression for the
      whitespace between JSON's tokens. disable_additional_properties: objects have no properties but those their schema names.
    backend: vLLM's name of a compiler. llguidance compiles everything here; BACKENDS says which names are taken: those that
      mean the same outputs.
    preamble: (begin, end), marks between which anything may be said before the form begins, as ("<think>", "</think>"). Where begin
      is "" the prompt has opened it, and the output must close it. max_preamble_tokens: most tokens between its marks; then its end
      follows. The marks must be tokens. None of KINDS need be given beside it: anything may follow the preamble then.

    Raises:
      ValueError: none or several of KINDS, a value of the wrong type, or an option that its kind does not read.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: str | None = None
    preamble: tuple[str, str] | None = None
    max_preamble_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) > 1 or not given and self.max_preamble_tokens is None:
            raise ValueError(f"structured_outputs must have exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}")
        for kind in given:
            object.__setattr__(self, kind, _CHECKS[kind](getattr(self, kind)))
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"structured_outputs: {name}={getattr(self, name)!r} must be True or False")
        if self.whitespace_pattern is not None and not (isinstance(self.whitespace_pattern, str) and self.whitespace_pattern):
            raise ValueError(f"structured_outputs: whitespace_pattern={self.whitespace_pattern!r} must be a string, and not empty")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("structured_outputs: disable_any_whitespace leaves nothing for whitespace_pattern; give one of them")
        options = [name for name in _JSON_OPTIONS if getattr(self, name)]
        if options and self.kind not in ("json", "json_object"):
            raise ValueError(f"structured_outputs: {', '.join(options)} is for json, not for {self.kind}")
        if self.backend is not None:
            _check_backend(self.backend, self.kind)
            object.__setattr__(self, "backend", None)  # so that equal forms are equal
        if self.preamble is not None:
            object.__setattr__(self, "preamble", _preamble(self.preamble))
        if (most := self.max_preamble_tokens) is not None:
            if not isinstance(most, int) or isinstance(most, bool) or most < 0:
                raise ValueError(f"structured_outputs: max_preamble_tokens={most!r} must be an integer >= 0, or None")
            if self.preamble is None:
                raise ValueError(f"structured_outputs: max_preamble_tokens={most} needs a preamble")

    @classmethod
    def make(cls, given: StructuredOutputsParams | Mapping[str, Any]) -> StructuredOutputsParams:
        """From itself, or from a dict of its fields. ValueError names an unknown field."""
        if isinstance(given, StructuredOutputsParams):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"structured_outputs={given!r} must be a StructuredOutputsParams, or a dict of its fields")
        known = [field.name for field in fields(cls)]
        unknown = sorted(str(name) for name in given if name not in known)
        if unknown:
            raise ValueError(f"structured_outputs has unknown fields {', '.join(unknown)}; it may have {', '.join(known)}")
        return cls(**given)

    @property
    def kind(self) -> str:
        """Which of KINDS it is; "free" for none, where there is a max_preamble_tokens alone."""
        return next((kind for kind in KINDS if getattr(self, kind) is not None), "free")

    @cached_property
    def key(self) -> str:
        """Equal for params that mean the same; a JSON text."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})

    def __hash__(self) -> int:
        return hash(self.key)


def _check_backend(backend: Any, kind: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"structured_outputs: backend={backend!r} must be one of {', '.join(BACKENDS)}")
    if kind not in BACKENDS[backend]:
        raise ValueError(f"structured_outputs: backend={backend!r} has no {kind}; leave it out, or give guidance")


_OF_TAGS = {"type", "structures", "triggers", "only_structures", "otherwise", "stop_after_first"}
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def _schema(value: Any) -> dict[str, Any] | bool:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()  # pyright: ignore[reportAttributeAccessIssue]  (a pydantic model, without pydantic)
    value = _parsed("json", value)
    if not isinstance(value, dict | bool):
        raise ValueError(f"structured_outputs: json={value!r} must be a JSON schema: an object, true or false")
    return value


def _preamble(value: Any) -> tuple[str, str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"structured_outputs: preamble={value!r} must be two texts: what begins it, and what ends it")
    begin, end = value
    if not (isinstance(begin, str) and isinstance(end, str) and end):
        raise ValueError(f"structured_outputs: preamble={value!r} must be two texts, the second not empty")
    return begin, end


def _structural_tag(value: Any) -> dict[str, Any]:
    value = _parsed("structural_tag", value)
    if isinstance(value, dict) and "format" in value:
        if set(value) - {"type", "format"} or not isinstance(value["format"], dict):
            raise ValueError("structured_outputs: structural_tag: beside 'format', an object, there may only be 'type'")
        return value
    unknown = sorted(set(value) - _OF_TAGS) if isinstance(value, dict) else []
    if unknown:
        raise ValueError(f"structured_outputs: structural_tag: unknown fields {unknown}; it may have {sorted(_OF_TAGS)}")
    structures, triggers = (value.get(name) if isinstance(value, dict) else None for name in ("structures", "triggers"))
    if not (isinstance(structures, list) and structures and isinstance(triggers, list) and triggers):
        raise ValueError("structured_outputs: structural_tag must have 'structures' and 'triggers', lists that are not empty")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError(f"structured_outputs: structural_tag: {triggers=} must be strings, none of them empty")
    for structure in structures:
        texts = [structure.get(name) if isinstance(structure, dict) else None for name in ("begin", "end")]
        if not (all(isinstance(text, str) for text in texts) and isinstance(structure.get("schema"), dict)):
            raise ValueError(
                f"structured_outputs: structural_tag: {structure=} must have 'begin' and 'end' texts and a 'schema' object"
            )
        if not any(str(texts[0]).startswith(trigger) for trigger in triggers):
            raise ValueError(f"structured_outputs: structural_tag: begin={texts[0]!r} starts with none of the triggers {triggers}")
    for name in ("only_structures", "stop_after_first"):
        if not isinstance(value.get(name, False), bool):
            raise ValueError(f"structured_outputs: structural_tag: {name}={value[name]!r} must be true or false")
    if not isinstance(value.get("otherwise", {}), dict):
        raise ValueError(f"structured_outputs: structural_tag: otherwise={value['otherwise']!r} must be a JSON schema, an object")
    return value


def _parsed(name: str, value: Any) -> Any:
    """A copy of plain JSON types, from itself or from JSON text."""
    try:
        return json.loads(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs: {name} is not JSON: {error}") from None


def _text(name: str):
    def check(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"structured_outputs: {name}={value!r} must be a string that is not empty")
        return value

    return check


def _choice(value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value or not all(isinstance(x, str) for x in value):
        raise ValueError(f"structured_outputs: choice={value!r} must be a list of strings, one at least")
    return list(value)


def _json_object(value: Any) -> bool:
    if value is not True:
        raise ValueError(f"structured_outputs: json_object={value!r} must be True or False")
    return value


_CHECKS = {
    "json": _schema,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("grammar"),
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
