"""The published OpenAPI schema: FastAPI's, with the shapes of answers and the limits of the served model added.

Owns what the schema says beyond the request models. Knows nothing of how requests are served.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from jaxserve.serving import responses
from jaxserve.serving.chat_protocol import CALLS_NEED_TOOLS, RESERVED_VARIABLES
from jaxserve.serving.strict_model import DECIMAL_TOKEN_ID

_STRUCT = "x-struct"  # where a schema is to come, of the struct of this name
_STRUCTS: dict[str, Any] = {}  # those that routes answer with
_ERRORS = {
    400: "The request is malformed, or asks for what this server can't do.",
    401: "No valid API key.",
    403: "The API key does not open this route.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    409: "Not in this state: requests are under way, or the engine is asleep.",
    413: "The body is too large.",
    429: "Too much is waiting, or a limit of the key is reached; Retry-After says when to try again.",
    500: "The engine failed.",
    503: "Nothing is taken at the moment.",
    504: "The request took longer than it was given.",
}


def _named(kind: Any) -> str:
    assert _STRUCTS.setdefault(kind.__name__, kind) is kind, f"two structs are named {kind.__name__}"
    return kind.__name__


def answers(kind: Any, *statuses: int, also: str | None = None, error: Any = responses.ErrorResponse) -> dict[str, Any]:
    """FastAPI's `responses` for a route that answers with a struct.

    statuses: of errors that it may answer with; where a key may be missing (401), its limits may be reached too (429).
    also: a media type of events that it may send instead. error: the struct of errors.
    """
    content: dict[str, Any] = {"application/json": {"schema": {_STRUCT: _named(kind)}}}
    if also is not None:
        content[also] = {"schema": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}}
    said: dict[int | str, Any] = {200: {"description": "OK", "content": content}}
    for status in sorted({*statuses, 429} if 401 in statuses else statuses):
        made = {"description": _ERRORS[status], "content": {"application/json": {"schema": {_STRUCT: _named(error)}}}}
        said[status] = made | ({"headers": {"Retry-After": {"schema": {"type": "string"}}}} if status == 429 else {})
    return {"responses": said}


@dataclass(frozen=True)
class Limits:
    """Limits of requests that depend on the model and the server's options.

    variables: the names that the chat template reads. calls: whether the server can parse tool calls. priorities: whether requests
    may have one. templates: whether requests may bring a chat template. reasons: whether tokens of reasoning can be counted.
    reasoning: whether the model thinks before it answers.
    """

    models: Sequence[str]
    vocab_size: int
    variables: frozenset[str]
    calls: bool
    priorities: bool
    templates: bool
    reasons: bool
    max_model_len: int
    reasoning: bool

    def write(self, schema: dict[str, Any]) -> None:
        """Writes the limits into the schema of a request model."""
        properties = schema.get("properties", {})
        if schema.get("additionalProperties") is not False:
            return
        if "model" in properties:
            names = {"enum": list(self.models), "type": "string"}
            properties["model"] = names if "model" in schema.get("required", ()) else _nullable(names, properties["model"])
        if "priority" in properties and not self.priorities:
            properties["priority"] = _nullable({"const": 0, "type": "integer"}, properties["priority"])
        if "chat_template_kwargs" in properties:
            names = sorted(self.variables - set(RESERVED_VARIABLES))
            kwargs = {"type": "object", "propertyNames": {"enum": names}} if names else {"type": "object", "maxProperties": 0}
            properties["chat_template_kwargs"] = _nullable(kwargs, properties["chat_template_kwargs"])
            if "tools" not in self.variables:
                properties["tools"] = _nullable({"type": "array", "maxItems": 0}, properties["tools"])
        refused = {
            "chat_template": not self.templates,
            "documents": "documents" not in self.variables,
            "reasoning_effort": self.variables.isdisjoint(("reasoning_effort", "enable_thinking")),
        }
        for name in refused.keys() & properties.keys():
            if refused[name]:
                properties[name] = {"type": "null"} | {k: v for k, v in properties[name].items() if k == "description"}
        for kept in properties.get("truncate_prompt_tokens", {}).get("anyOf", ()):
            if "maximum" in kept:
                kept["maximum"] = self.max_model_len
        if "thinking_token_budget" in properties and not self.reasons:
            budget = {"type": "integer", "const": -1}
            properties["thinking_token_budget"] = _nullable(budget, properties["thinking_token_budget"])
        if "reasoning_ended" in properties and not self.reasoning:
            properties["reasoning_ended"] = _nullable({"type": "boolean", "const": True}, properties["reasoning_ended"])
        if "tool_choice" in properties and not (self.calls and "tools" in self.variables):
            self._no_forced_calls(schema, properties)
        self._thinking(properties)
        if "strict" in properties and "parameters" in properties and not self.calls:
            properties["strict"] = _nullable({"const": False, "type": "boolean"}, properties["strict"])
        self._token_ids(properties)

    def _no_forced_calls(self, schema: dict[str, Any], properties: dict[str, Any]) -> None:
        """Tools may be chosen freely or not at all, in the words of OpenAI or of Anthropic."""
        words: dict[str, Any] = {"type": "string", "enum": ["none", "auto"]}
        if "mapping" in str(properties["tool_choice"]):  # objects of several types
            types = {"properties": {"type": words}, "required": ["type"], "additionalProperties": False}
            properties["tool_choice"] = _nullable({"type": "object", **types}, properties["tool_choice"])
        else:
            properties["tool_choice"] = _nullable(words, properties["tool_choice"])
        schema["allOf"] = [rule for rule in schema["allOf"] if rule["then"] != CALLS_NEED_TOOLS["then"]]

    def _thinking(self, properties: dict[str, Any]) -> None:
        """What may be said of thinking, by Anthropic's clients."""
        if "thinking" in properties and "anyOf" in properties["thinking"]:
            off = not self.reasoning or "enable_thinking" in self.variables
            kinds = ["ThinkingAdaptive"] + ["ThinkingDisabled"] * off + ["ThinkingEnabled"] * self.reasons
            refs = [{"$ref": f"#/components/schemas/{kind}"} for kind in kinds]
            properties["thinking"] = {"anyOf": [*refs, {"type": "null"}]}
        if "effort" in properties and self.variables.isdisjoint(("reasoning_effort", "enable_thinking")):
            properties["effort"] = {"type": "null"}

    def _token_ids(self, node: Any) -> None:
        if isinstance(node, dict):
            if node.get("exclusiveMaximum") == 2**31:
                node["exclusiveMaximum"] = self.vocab_size
            if node.get("pattern") == DECIMAL_TOKEN_ID:
                node["pattern"] = decimal_below(self.vocab_size)
            patterns = node.get("patternProperties", {})
            if DECIMAL_TOKEN_ID in patterns:
                patterns[decimal_below(self.vocab_size)] = patterns.pop(DECIMAL_TOKEN_ID)
                node["additionalProperties"] = False
            for child in node.values():
                self._token_ids(child)
        elif isinstance(node, list):
            for child in node:
                self._token_ids(child)


def _nullable(schema: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    description = {"description": before["description"]} if "description" in before else {}
    return {"anyOf": [schema, {"type": "null"}]} | description


def decimal_below(limit: int) -> str:
    """A regular expression of the numbers 0 to limit - 1 in decimal."""
    most = str(limit - 1)
    parts = ["0", most] if limit > 1 else ["0"]
    if len(most) > 1:
        parts.append(f"[1-9][0-9]{{0,{len(most) - 2}}}")
    for i, digit in enumerate(most):
        low, high = int(i == 0), int(digit) - 1
        if low <= high:
            parts.append(f"{most[:i]}[{low}-{high}][0-9]{{{len(most) - i - 1}}}")
    return f"^({'|'.join(parts)})$"


def publish(app: FastAPI, limits: Limits, *, open_paths: Collection[str] | None) -> None:
    """Makes `app.openapi()` return the schema of what this server accepts and answers. open_paths: those that need no key; None:
    none does."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            components = made.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                components.pop(name, None)
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            _insert_structs(made, components)
            for schema in components.values():
                limits.write(schema)
            if open_paths is not None:
                _require_key(made, open_paths)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi


def _insert_structs(made: dict[str, Any], components: dict[str, Any]) -> None:
    """Replaces the names of structs that `answers` wrote by their schemas."""
    found: list[tuple[dict[str, Any], Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if _STRUCT in node:
                found.append((node, _STRUCTS[node.pop(_STRUCT)]))
            for child in node.values():
                walk(child)

    walk(made["paths"])
    kinds = list(dict.fromkeys(kind for _, kind in found))
    references, structs = responses.schemas(*kinds)
    for node, kind in found:
        node.update(references[kinds.index(kind)])
    components.update(structs)


def _require_key(made: dict[str, Any], open_paths: Collection[str]) -> None:
    made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in made["paths"].items():
        if path not in open_paths:
            for operation in operations.values():
                operation["security"] = [{"key": []}]
