"""The base of all request models, and field types that several share. Unknown fields are refused; only 3.0 is converted, to 3.

Owns how JSON values become fields. Knows no request.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

DECIMAL_TOKEN_ID = r"^(0|[1-9][0-9]{0,9})$"


def _integral(value: Any) -> Any:
    """3 for 3.0, which JSON does not distinguish."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_integral(values: Any) -> Any:
    return [_integral(x) for x in values] if isinstance(values, list) and float in map(type, values) else values


def _only_false(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported")
    return value


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
# fail_fast: the first wrong element ends the check, since a long list of a wrong kind would have as many errors.
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
SomeTokenIds = Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(_all_integral)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), BeforeValidator(_all_integral)]
OnlyFalse = Annotated[bool, AfterValidator(_only_false), WithJsonSchema({"const": False, "type": "boolean"})]
TokenIdText = Annotated[str, Field(pattern=DECIMAL_TOKEN_ID)]


class Model(BaseModel):
    """Refuses unknown fields, and values of another type than JSON gave them."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: Any) -> Any:
        return {name: _integral(value) for name, value in given.items()} if isinstance(given, dict) else given


def if_given(name: str, kind: str, needed: str) -> dict[str, Any]:
    """A part of a JSON schema: where `name` is given with a value of this kind, `needed` must be true."""
    return {
        "if": {"properties": {name: {"type": kind}}, "required": [name]},
        "then": {"properties": {needed: {"const": True}}, "required": [needed]},
    }
