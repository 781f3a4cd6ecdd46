"""Chat templates: from the messages of a conversation to the text of its prompt.

Owns the checks of messages and the errors. transformers compiles templates in its sandbox and renders them: a prompt is what its
`apply_chat_template` makes.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jaxserve.text.pretrained import import_transformers


@lru_cache(maxsize=64)
def compile_template(source: str) -> ChatTemplate:
    """The template of a Jinja source; the same source is compiled once."""
    return ChatTemplate(source)


class ChatTemplate:
    """A Jinja chat template.

    `variables`: the names that it reads from outside. Raises ValueError if the source is not valid Jinja.
    """

    def __init__(self, source: str):
        import jinja2.meta

        import_transformers()
        from transformers.utils import chat_template_utils

        try:
            # underscored, but the one door to the environment in which the template will run
            environment = chat_template_utils._compile_jinja_template(source).environment
            undeclared = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja (line {error.lineno}): {error.message}") from error
        self.variables: frozenset[str] = frozenset(undeclared - environment.globals.keys())
        self._source, self._render = source, chat_template_utils.render_jinja_template

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], continue_final: bool = False) -> str:
        """The text of a conversation.

        Args:
          messages: dicts with "role" and "content" (a string, a list of {"type": "text", "text": ...} parts, which are joined by
            newlines, or None beside tool calls), and whatever else the template reads. A key whose value is None is left out.
          variables: what else the template reads, JSON values. `tools` and `documents` are None unless given.
          continue_final: end with the text of the last message.

        Raises:
          ValueError: a malformed message (named by its index), a variable that is not JSON, or an error of the template itself
            (with the first message that brings it about).
        """
        if not messages:
            raise ValueError("messages is empty; a chat needs at least one message")
        plain = [_plain_message(i, message) for i, message in enumerate(messages)]
        if continue_final and not plain[-1].get("content"):
            raise ValueError(f"continue_final_message: message {len(plain) - 1} has no content to go on with")
        scope = {name: _plain(name, value) for name, value in variables.items()}
        if continue_final:
            scope["continue_final_message"] = True
        try:
            return self._text(plain, scope)
        except Exception as error:  # a template can raise anything: its own complaint, or a TypeError for a None it did not expect
            raise ValueError(f"the chat template fails{self._culprit(plain, scope, error)}: {error}") from error

    def _text(self, messages: list[dict[str, Any]], scope: Mapping[str, Any]) -> str:
        texts, _ = self._render([messages], chat_template=self._source, **scope)
        return texts[0]

    def _culprit(self, messages: list[dict[str, Any]], scope: Mapping[str, Any], error: Exception) -> str:
        def brings_it(i: int) -> bool:
            try:
                self._text(messages[: i + 1], scope)
            except Exception as other:
                return str(other) == str(error)
            return False

        last = len(messages) - 1
        i = bisect.bisect_left(range(last), True, key=brings_it)  # by halves: one by one a long chat would take its square
        return f" at message {i} (role {messages[i]['role']!r})" if i < last or brings_it(last) else ""


def _plain_message(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of message `i` that is plain JSON, its content one string, without the keys whose value is None."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {i} must be a dict with a string under 'role', found {message!r}")
    plain = {key: value for key, value in _plain(f"message {i}", dict(message)).items() if value is not None}
    if not isinstance(plain.get("content"), list):
        return plain
    texts = []
    for part in plain["content"]:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(f"message {i}: content may hold only parts like {{'type': 'text', 'text': ...}}, found {part!r}")
        texts.append(part["text"])
    return plain | {"content": "\n".join(texts)}


def _plain(name: str, value: Any) -> Any:
    """A copy made of JSON types only, so that a template meets no object with methods of its own."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be made of JSON values: {error}") from error
