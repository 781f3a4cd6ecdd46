"""The form of an answer that calls tools: which calls it may contain, and what their arguments must be.

Owns what `tool_choice`, `strict` and `parallel_tool_calls` mean for an output, in the Hermes notation that parsers.py reads.
"""

from __future__ import annotations

import json
from typing import Any

from jaxserve.serving.chat_protocol import ChatRequest, FunctionSchema, NamedTool
from jaxserve.serving.notations import HERMES
from jaxserve.serving.parsers import CALL, END_CALL, Notation
from jaxserve.structured_outputs import StructuredOutputsParams

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as chat templates write JSON


def tool_form(body: ChatRequest, notation: Notation) -> StructuredOutputsParams | None:
    """The form of the output that the request's tools require; None where any text may follow.

    tool_choice "required": one or more calls and no other text, with arguments by the tools' parameters.
    tool_choice naming a function: exactly one such call.
    "auto" with a strict tool: free text, in which <tool_call> begins a call of one of the tools. Arguments of tools that are not
      strict may be any object.
    "auto" with a form: calls alone, or content of that form.

    Raises:
      ValueError: a call is required but no such tool is given, the model has no notation for calls, or the form can't be combined
        with calls.
    """
    choice, tools = body.tool_choice, [tool.function for tool in body.shown_tools]
    forced = body.must_call
    form = None if forced else body.form  # a form is for content, which calls alone don't have
    if not forced and not (tools and (form is not None or any(tool.strict for tool in tools))):
        return None
    if not tools:
        raise ValueError("tool_choice: a call can be required only where tools are given")
    if notation.tool_calls is None or not forced and notation.tool_calls is not HERMES:
        raise ValueError("tools: this model's chat template has no tool calls that the server could hold to a schema")
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
        if not tools:
            raise ValueError(f"tool_choice: there is no tool {choice.function.name!r}")
    tag = {
        "structures": [_structure(tool, held=forced or bool(tool.strict)) for tool in tools],
        "triggers": [CALL],
        "only_structures": forced,
        "stop_after_first": body.parallel_tool_calls is False or isinstance(choice, NamedTool),
    }
    return StructuredOutputsParams(structural_tag=tag if form is None else tag | {"otherwise": _schema(form, body.form_field)})


def _schema(form: StructuredOutputsParams, field: str) -> dict[str, Any]:
    """The JSON schema of a form. Raises ValueError where the form is not a plain JSON schema."""
    if form == StructuredOutputsParams(json_object=True):
        return {"type": "object"}
    if isinstance(form.json, dict) and form == StructuredOutputsParams(json=form.json):
        return form.json
    raise ValueError(
        f"{field}: beside tools it may only be json_object or a JSON schema without options, or set tool_choice='none'"
    )


def _structure(tool: FunctionSchema, held: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if held:
        schema |= {"properties": {}, "additionalProperties": False} if tool.parameters is None else tool.parameters
    if schema["type"] != "object":
        raise ValueError(f"tools: the parameters of {tool.name!r} must be an object's schema, not of type {schema['type']!r}")
    begin = f'{CALL}\n{{"name": {json.dumps(tool.name)}, "arguments": '
    return {"begin": begin, "schema": schema | {"x-guidance": _SPACING}, "end": f"}}\n{END_CALL}"}
