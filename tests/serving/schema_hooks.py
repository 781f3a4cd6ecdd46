"""For schemathesis: what the published schema can't say. Grammars compile and leave a token that may be sampled, bad words have
few tokens, a chat's logprob_token_ids come with logprobs, what is to be called is among the tools, a checkpoint is there, no
deadline is shorter than an answer takes, a conversation fits the model, max_tokens has one of its names and is not 0, beams are
searched by few fields, text is asked for where it is read, and events are numbered where they are streamed.

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
    if isinstance(case.body, dict) and isinstance(timeout := case.body.get("timeout"), float) and 0 < timeout < 60:
        case.body["timeout"] = 60  # also where something else is wrong, which takes a while to be seen
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if case.path == "/v1/responses/{response_id}" and str((case.query or {}).get("stream")).lower() not in ("true", "1"):
        (case.query or {}).pop("starting_after", None)
    if not isinstance(case.body, dict):
        return
    body = case.body
    messages = body.get("messages")
    if body.get("continue_final_message") and messages and not (isinstance(messages[-1], dict) and messages[-1].get("content")):
        body["continue_final_message"] = False  # there is nothing to go on with
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
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format["type"] == "json_schema":
        named = response_format["json_schema"] | {"schema": SCHEMA}
        body["response_format"] = response_format | {"json_schema": named}
    if isinstance(response_format, dict) and response_format["type"] == "structural_tag":
        body["response_format"] = TAG | {"type": "structural_tag"}
    if case.path.startswith("/v1/chat/completions") and body.get("logprob_token_ids"):
        body["logprobs"] = True
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        sampling.pop("detokenize", None)  # stop, and output_mode beside it, need the text
        if sampling.get("logprob_token_ids"):
            sampling["logprobs"] = None  # or as many as there are ids
    for fields in (body, sampling):
        if isinstance(fields, dict):
            _repair_forms(fields)
    if body.get("tools") and body.get("tool_choice") != "none":
        _repair_tools(body)
    if case.path.startswith("/v1/messages"):
        _repair_message(body)
    if case.path == "/v1/responses" and isinstance(text := body.get("text"), dict):
        made = text.get("format")
        body["text"] = text | {"format": made and made | ({"schema": SCHEMA} if made["type"] == "json_schema" else {})}


def _repair_forms(fields: dict[str, Any]) -> None:
    if fields.get("bad_words"):
        fields["bad_words"] = [word if len(word.encode()) < MAX_BAD_WORD_TOKENS else "x" for word in fields["bad_words"]]
    patterns = fields.get("repetition_detection")
    if isinstance(patterns, dict):
        fields["repetition_detection"] = patterns | {"min_pattern_size": 0}  # which is no more than the most
    form = fields.get("structured_outputs")
    if isinstance(form, dict):
        for name in ("allowed_token_ids", "min_tokens"):  # with a form they could forbid every token
            fields.pop(name, None)
        valid = {name: FORMS[name] for name, value in form.items() if value is not None and name in FORMS}
        fields["structured_outputs"] = form | valid


def _repair_tools(body: dict[str, Any]) -> None:
    """Arguments are objects, a function that must be called is one of the tools, and a form beside them is a JSON schema."""
    choice, body["tools"] = body.get("tool_choice"), body["tools"][:64]  # a form of 1,024 is too large
    if "function" in body["tools"][0]:
        body["tools"] = [tool | {"function": tool["function"] | {"parameters": SCHEMA}} for tool in body["tools"]]
        if isinstance(choice, dict):
            body["tool_choice"] = choice | {"function": {"name": body["tools"][0]["function"]["name"]}}
    else:
        schema = "input_schema" if "input_schema" in body["tools"][0] else "parameters"
        body["tools"] = [tool | {schema: SCHEMA} for tool in body["tools"]]
        if isinstance(choice, dict) and "name" in choice:
            body["tool_choice"] = choice | {"name": body["tools"][0]["name"]}
    if body.get("structured_outputs"):
        body["structured_outputs"] = {"json": SCHEMA}


def _repair_message(body: dict[str, Any]) -> None:
    """The user speaks last: what the assistant may say there depends on what it says."""
    body["messages"] = [
        *body["messages"][-256:],
        {"role": "user", "content": "a"},
    ]  # 4,096 of them are longer than the model's context
    config = body.get("output_config")
    if isinstance(config, dict) and config.get("format"):
        body["output_config"] = config | {"format": config["format"] | {"schema": SCHEMA}}
