"""The form that an output must have, as clients give it: OpenAI's `response_format`, and vLLM's `structured_outputs`.

Owns how both are written over HTTP. jaxserve.structured knows what a form means, and which can't be compiled.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from jaxserve.serving.strict_model import PARTS, Model, Text
from jaxserve.structured_outputs import KINDS, StructuredOutputsParams

OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")  # that clients may give with KINDS


class TextFormat(Model):
    type: Literal["text"]


class JsonObjectFormat(Model):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Model):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="The output is held to the schema whatever this says.")


class JsonSchemaFormat(Model):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Structure(Model):
    begin: str
    schema_: dict[str, Any] = Field(alias="schema")
    end: str


class StructuralTagFormat(Model):
    """vLLM's: free text with structures, or a `format` in xgrammar's form."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["format"], "properties": {"structures": {"type": "null"}, "triggers": {"type": "null"}}},
                {"required": ["structures", "triggers"], "properties": {"format": {"type": "null"}}},
            ]
        }
    )

    type: Literal["structural_tag"]
    structures: Annotated[list[Structure], PARTS] | None = None
    triggers: Annotated[list[Text], PARTS] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_one(self):
        self.form()  # refuses what is none
        return self

    def form(self) -> StructuredOutputsParams:
        """The same as the engine takes it. Raises ValueError for what is neither kind."""
        tag = self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return StructuredOutputsParams(structural_tag=tag)


AnyFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
ResponseFormat = Annotated[AnyFormat, Field(discriminator="type")]


def form_of(response_format: AnyFormat | None) -> StructuredOutputsParams | None:
    """The form that a response_format asks for; None where it is plain text."""
    if isinstance(response_format, StructuralTagFormat):
        return response_format.form()
    if isinstance(response_format, JsonSchemaFormat):
        return StructuredOutputsParams(json=response_format.json_schema.schema_)
    return StructuredOutputsParams(json_object=True) if isinstance(response_format, JsonObjectFormat) else None


def _read(given: Any) -> StructuredOutputsParams:
    if not isinstance(given, dict):
        raise ValueError("must be an object")
    unknown = sorted(str(name) for name in given if name not in (*KINDS, *OPTIONS))
    if unknown:
        raise ValueError(f"unknown fields {', '.join(unknown)}; it may have {', '.join((*KINDS, *OPTIONS))}")
    try:
        return StructuredOutputsParams.make({name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise ValueError(str(error).removeprefix("structured_outputs: ").removeprefix("structured_outputs ")) from None


def _tags(text: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON schemas of a structural tag: with structures and triggers, and with a format."""
    structure = {
        "type": "object",
        "properties": {"begin": {"type": "string"}, "schema": {"type": "object"}, "end": {"type": "string"}},
        "required": ["begin", "schema", "end"],
    }
    flag = {"type": "boolean"}
    tag = {
        "type": "object",
        "properties": {
            "type": {"const": "structural_tag"},
            "structures": {"type": "array", "items": structure, "minItems": 1},
            "triggers": {"type": "array", "items": text, "minItems": 1},
            "only_structures": flag | {"description": "No text but blanks between structures, of which there is one at least."},
            "otherwise": {"type": "object", "description": "A JSON schema: JSON of it, or else structures alone."},
            "stop_after_first": flag | {"description": "One structure at most, and nothing behind it."},
        },
        "required": ["structures", "triggers"],
        "additionalProperties": False,
    }
    newer = {
        "type": "object",
        "properties": {"type": {"const": "structural_tag"}, "format": {"type": "object", "properties": {"type": text}}},
        "required": ["format"],
        "additionalProperties": False,
    }
    return tag, newer


def _published() -> dict[str, Any]:
    """The JSON schema of what `_read` accepts: an alternative for each kind, in which the fields of other kinds must be null."""
    text, null, flag = {"type": "string", "minLength": 1}, {"type": "null"}, {"type": "boolean"}
    kinds = {
        "json": {"anyOf": [{"type": "object"}, {"type": "boolean"}, text], "description": "A JSON schema, or its text."},
        "regex": text | {"description": "Of Rust's regex crate: no look-around, no back-references."},
        "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "grammar": text | {"description": "llguidance's Lark, or GBNF."},
        "json_object": {"const": True},
        "structural_tag": {"anyOf": [*_tags(text), text], "description": "Free text with structures, or its JSON as text."},
    }
    options = {
        "disable_any_whitespace": flag | {"description": "JSON without whitespace but what a string holds."},
        "disable_additional_properties": flag | {"description": "Objects have no properties but those their schema names."},
        "whitespace_pattern": text | {"description": "A regular expression for the whitespace between JSON's tokens."},
    }
    off = {"anyOf": [{"const": False}, null]}
    refused = {name: off if name.startswith("disable") else null for name in options}
    allowed = {name: {"anyOf": [shape, null]} for name, shape in options.items()}

    def alternative(kind: str, its_options: dict[str, Any]) -> dict[str, Any]:
        others = {name: off if name == "json_object" else null for name in KINDS if name != kind}
        return {
            "type": "object",
            "properties": {kind: kinds[kind], **others, **its_options},
            "required": [kind],
            "additionalProperties": False,
        }

    alternatives = []
    for kind in KINDS:
        if kind in ("json", "json_object"):
            alternatives += [alternative(kind, allowed | {name: refused[name]}) for name in (OPTIONS[0], OPTIONS[2])]
        else:
            alternatives.append(alternative(kind, refused))
    return {"anyOf": alternatives}


StructuredOutputs = Annotated[StructuredOutputsParams, PlainValidator(_read), WithJsonSchema(_published())]
