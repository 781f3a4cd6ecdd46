"""For schemathesis: what the published schema can't say. Grammars compile, bad words have few tokens, what is to be called is among
the tools, a checkpoint is there, no deadline is shorter than an answer takes, max_tokens has one of its names and is not 0, and
beams are searched by few fields.

What a negative case says stays as it is. That the server refuses what is repaired here, other tests see.
"""

import os
from typing import Any

import schemathesis

from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
FORMS = {"json": SCHEMA, "regex": "[a-c]+", "grammar": 'start: "a" | "b" start', "structural_tag": TAG, "whitespace_pattern": " ?"}


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.meta is None or not case.meta.generation.mode.is_positive or not isinstance(case.body, dict):
        return
    body = case.body
    if body.get("bad_words"):
        body["bad_words"] = [word if len(word.encode()) < MAX_BAD_WORD_TOKENS else "x" for word in body["bad_words"]]
    if "max_completion_tokens" in body:
        body.pop("max_tokens", None)
    if body.get("timeout"):
        body["timeout"] = 60
    if "path" in body:
        body["path"] = os.environ["SCHEMA_CHECKPOINT"]
    for name in ("use_beam_search", "length_penalty"):  # few other fields go with them
        body.pop(name, None)
    if body.get("max_tokens") == 0:
        body["max_tokens"] = 1
    response_format, form = body.get("response_format"), body.get("structured_outputs")
    if isinstance(response_format, dict) and response_format["type"] == "json_schema":
        named = response_format["json_schema"] | {"schema": SCHEMA}
        body["response_format"] = response_format | {"json_schema": named}
    if isinstance(response_format, dict) and response_format["type"] == "structural_tag":
        body["response_format"] = TAG | {"type": "structural_tag"}
    if isinstance(form, dict):
        valid = {name: FORMS[name] for name, value in form.items() if value is not None and name in FORMS}
        body["structured_outputs"] = form | valid
    if body.get("tools") and body.get("tool_choice") != "none":
        _repair_tools(body)


def _repair_tools(body: dict[str, Any]) -> None:
    """Arguments are objects, a function that must be called is one of the tools, and a form beside them is a JSON schema."""
    body["tools"] = [tool | {"function": tool["function"] | {"parameters": SCHEMA}} for tool in body["tools"]]
    if isinstance(body.get("tool_choice"), dict):
        body["tool_choice"] = body["tool_choice"] | {"function": {"name": body["tools"][0]["function"]["name"]}}
    if body.get("structured_outputs"):
        body["structured_outputs"] = {"json": SCHEMA}
