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
    if not isinstance(values, list) or len(values) > MAX_VALUES or float not in map(type, values):
        return values
    return [_integral(x) for x in values]


def _only_false(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported")
    return value


# The most elements of a list: pydantic stops there. What takes longer to check than a step is more than any request needs.
MAX_ITEMS = 4096  # messages, or items of a conversation
MAX_PARTS = 1024  # parts of a message, tools, documents
MAX_VALUES = 2**21  # token ids, or texts
ITEMS: Any = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
PARTS: Any = Field(max_length=MAX_PARTS, fail_fast=True)
SOME_PARTS: Any = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
# fail_fast: the first wrong element ends the check, since a long list of a wrong kind would have as many errors.
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_VALUES, fail_fast=True)]
SomeTokenIds = Annotated[list[TokenId], Field(max_length=MAX_VALUES, fail_fast=True), BeforeValidator(_all_integral)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_VALUES, fail_fast=True), BeforeValidator(_all_integral)]
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
