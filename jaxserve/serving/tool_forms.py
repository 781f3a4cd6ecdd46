"""The form of an answer that calls tools: which calls it may hold, and what their arguments must be.

Owns what `tool_choice`, `strict` and `parallel_tool_calls` ask of an output in the Hermes notation that parsers.py reads.
"""

from __future__ import annotations

import json
from typing import Any

from jaxserve.serving.chat_protocol import ChatRequest, FunctionSchema, NamedTool
from jaxserve.serving.parsers import CALL, END_CALL, Notation
from jaxserve.structured import StructuredOutputsParams

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as chat templates write JSON


def tool_form(body: ChatRequest, notation: Notation) -> StructuredOutputsParams | None:
    """What the tools ask of the output; None where a call may be anything.

    "required" and a function by name: calls alone, one at least (one, if by name), held to their parameters. "auto" with a strict
    tool: free text, in which <tool_call> begins a call of one of the tools; those that are not strict take any object.

    Raises:
      ValueError: calls that must be made where there is nobody to call or no way to, or that exclude `response_format`.
    """
    choice, tools = body.tool_choice, [tool.function for tool in body.shown_tools]
    forced = choice == "required" or isinstance(choice, NamedTool)
    if not forced and not any(tool.strict for tool in tools):
        if tools and body.form is not None:
            raise ValueError(_either(body))
        return None
    if not tools:
        raise ValueError("tool_choice: a call can be required only where tools are given")
    if not notation.tool_calls:
        raise ValueError("tools: this model's chat template has no tool calls that the server could hold to a schema")
    if body.form is not None:
        raise ValueError(_either(body))
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
        if not tools:
            raise ValueError(f"tool_choice: there is no tool {choice.function.name!r}")
    first_only = body.parallel_tool_calls is False or isinstance(choice, NamedTool)
    structures = [_structure(tool, held=forced or bool(tool.strict)) for tool in tools]
    tag = {"structures": structures, "triggers": [CALL], "only_structures": forced, "stop_after_first": first_only}
    return StructuredOutputsParams(structural_tag=tag)


def _either(body: ChatRequest) -> str:
    return f"{body.form_field}: an answer can't both have a form and call tools; give no tools, or tool_choice='none'"


def _structure(tool: FunctionSchema, held: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if held:
        schema |= {"properties": {}, "additionalProperties": False} if tool.parameters is None else tool.parameters
    if schema["type"] != "object":
        raise ValueError(f"tools: the parameters of {tool.name!r} must be an object's schema, not of type {schema['type']!r}")
    begin = f'{CALL}\n{{"name": {json.dumps(tool.name)}, "arguments": '
    return {"begin": begin, "schema": schema | {"x-guidance": _SPACING}, "end": f"}}\n{END_CALL}"}
