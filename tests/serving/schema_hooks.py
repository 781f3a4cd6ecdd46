"""For schemathesis: what the published schema can't say. Grammars compile, and bad words have few tokens.

What a negative case says stays as it is. That a grammar is refused which does not compile is test_refusals.py's to see.
"""

import schemathesis

from jaxserve.request import MAX_BAD_WORD_TOKENS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
FORMS = {"json": SCHEMA, "regex": "[a-c]+", "grammar": 'start: "a" | "b" start', "structural_tag": TAG, "whitespace_pattern": " ?"}


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.meta is None or not case.meta.generation.mode.is_positive or not isinstance(case.body, dict):
        return
    if case.body.get("bad_words"):
        case.body["bad_words"] = [word if len(word.encode()) < MAX_BAD_WORD_TOKENS else "x" for word in case.body["bad_words"]]
    response_format, form = case.body.get("response_format"), case.body.get("structured_outputs")
    if isinstance(response_format, dict) and response_format["type"] == "json_schema":
        named = response_format["json_schema"] | {"schema": SCHEMA}
        case.body["response_format"] = response_format | {"json_schema": named}
    if isinstance(form, dict):
        valid = {name: FORMS[name] for name, value in form.items() if value is not None and name in FORMS}
        case.body["structured_outputs"] = form | valid
