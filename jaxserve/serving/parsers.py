"""Parses a model's text as it comes into reasoning, content and tool calls.

Owns two notations: reasoning between <think> and </think> (as Qwen3 writes it), and calls as <tool_call>{"name": ..., "arguments":
{...}}</tool_call> (Hermes). Knows nothing of HTTP or tokens: text in, pieces out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
# The text of a call before its arguments. Calls that are written in another way are parsed when they are complete.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """Part of tool call `index`. Only the first part has the name. The arguments of all parts add up to a JSON object."""

    index: int
    name: str | None
    arguments: str


Piece = Reasoning | Content | CallPart


@dataclass(frozen=True)
class Notation:
    """Which notations a model uses."""

    reasoning: bool = False
    tool_calls: bool = False

    @classmethod
    def of_template(cls, chat_template: str) -> Notation:
        """The notations that occur in a chat template."""
        return cls(reasoning=END_THINK in chat_template, tool_calls=CALL in chat_template)

    def preamble(self, prompt: str, continued: str = "") -> tuple[str, str] | None:
        """The (begin, end) marks of reasoning that may come first after this rendered chat; None where no reasoning may. begin is
        "" where the chat is within reasoning, so that it must go on. continued: as `is_thinking`'s."""
        if self.is_thinking(prompt, continued):
            return "", END_THINK
        return (THINK, END_THINK) if self.reasoning and not continued and not prompt.rstrip().endswith(END_THINK) else None

    def is_thinking(self, prompt: str, continued: str = "") -> bool:
        """Whether what follows this rendered chat is reasoning. continued: the last message, if the output goes on with it."""
        if continued:
            return self.reasoning and continued.rfind(THINK) > continued.rfind(END_THINK)
        return self.reasoning and prompt.rstrip().endswith(THINK)


class OutputParser:
    """Parses one sample's text: call `feed` with each part, then `finish`. The pieces add up to the text without its marks and the
    blanks beside them.

    Args:
      notation: the notations to parse; any other text is content.
      prompt: the rendered chat; if it ends with <think>, the output begins with reasoning.
      max_calls: later calls are dropped.
      continued: the last message of the chat, if the output goes on with it. Blanks at the output's begin are kept then.
    """

    def __init__(self, notation: Notation, prompt: str = "", max_calls: int | None = None, continued: str = ""):
        self._notation, self._max_calls = notation, max_calls
        self._text = ""  # text that is not in a piece yet
        thinking = notation.is_thinking(prompt, continued)
        self._state = "reasoning" if thinking else "start" if notation.reasoning and not continued else "content"
        self._strip = not continued  # blanks before the next piece are left out
        self._blanks = ""  # blanks that were held back, and come before more text of the same kind
        self._call: _Call | None = None
        self.num_calls: int = 0

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return list(self._pieces(final=False))

    def finish(self) -> list[Piece]:
        """The pieces of text that was held back. A call without its end mark counts if it is complete; else it is content."""
        return list(self._pieces(final=True))

    def _pieces(self, final: bool) -> Iterator[Piece]:
        while True:
            before = (self._state, len(self._text))
            if self._state == "start":
                yield from self._begin(final)
            elif self._state == "reasoning":
                yield from self._until(END_THINK, "content", Reasoning, final)
            elif self._state == "content":
                yield from self._until(CALL if self._notation.tool_calls else "", "call", Content, final)
            else:
                yield from self._in_call(final)
            if (self._state, len(self._text)) == before:
                return

    def _begin(self, final: bool) -> Iterator[Piece]:
        """Decides whether the text begins with <think>."""
        found = self._text.lstrip()
        if found.startswith(THINK):
            self._text, self._state = found[len(THINK) :], "reasoning"
        elif final or not THINK.startswith(found):
            self._state, self._strip = "content", False
        return
        yield

    def _until(self, mark: str, then: str, kind: type[Reasoning] | type[Content], final: bool) -> Iterator[Piece]:
        """The text before `mark`. An end of the text that could become the mark is held back, and blanks before it."""
        at = self._text.find(mark) if mark else -1
        end = at if at >= 0 else len(self._text) if final or not mark else len(self._text) - _overlap(self._text, mark)
        text, self._text = self._blanks + self._text[:end], self._text[end:]
        self._blanks = ""
        if self._strip:
            text = text.lstrip()
        if mark and (at >= 0 or not final):
            kept = text.rstrip()
            if at < 0:
                self._blanks = text[len(kept) :]
            text = kept
        if text:
            self._strip = False
            yield kind(text)
        if at >= 0:
            self._text, self._state, self._strip = self._text[len(mark) :], then, True

    def _in_call(self, final: bool) -> Iterator[Piece]:
        if self._call is None:
            self._call = _Call(self.num_calls)
        pieces = list(self._call.read(self._text, final))
        if self._max_calls is None or self.num_calls < self._max_calls:
            yield from pieces
        if self._call.ended is not None:
            self._text, self._state, self._strip = self._text[self._call.ended :], "content", True
            self.num_calls += self._call.is_call
            self._call = None


class _Call:
    """Parses one call. Its text begins after the mark."""

    def __init__(self, index: int):
        self._index = index
        self._arguments_at = -1  # where the arguments begin, once the head is known
        self._given = 0  # where the arguments end that are in a piece already
        self._depth, self._in_string, self._escaped = 0, False, False
        self.is_call = False
        self.ended: int | None = None  # where the text after the call begins

    def read(self, text: str, final: bool) -> Iterator[Piece]:
        """The new parts of the call. text: all of the call so far, and what follows it."""
        if self._arguments_at < 0:
            head = _HEAD.match(text)
            if head:
                self._arguments_at = self._given = head.end()
                self.is_call = True
                yield CallPart(self._index, json.loads(head[1], strict=False), "")
        if self._arguments_at < 0:
            yield from self._whole(text, final)
            return
        end = self._scan(text)
        if end > self._given:
            yield CallPart(self._index, None, text[self._given : end])
            self._given = end
        if self._depth == 0 or final:
            closed = text.find(END_CALL, end)
            if closed >= 0 or final:
                self.ended = closed + len(END_CALL) if closed >= 0 else len(text)

    def _scan(self, text: str) -> int:
        """Where the arguments end: at the end of their object, or of the text so far."""
        at = self._given
        if at > self._arguments_at and self._depth == 0:
            return at
        while at < len(text):
            c = text[at]
            at += 1
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._in_string, self._escaped = c != '"', c == "\\"
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    break
        return at

    def _whole(self, text: str, final: bool) -> Iterator[Piece]:
        """A call whose beginning does not match _HEAD. It is parsed when it is complete, and is content if it is no call."""
        closed = text.find(END_CALL)
        if closed < 0 and not final:
            return
        body = text if closed < 0 else text[:closed]
        self.ended = len(text) if closed < 0 else closed + len(END_CALL)
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError):
            yield Content(CALL + text[: self.ended])
            return
        self.is_call = True
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield CallPart(self._index, str(name), arguments)


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` are a beginning of `mark`."""
    for n in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-n:]):
            return n
    return 0
