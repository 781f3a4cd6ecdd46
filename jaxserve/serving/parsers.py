"""Parses a model's text as it comes into reasoning, content and tool calls.

Owns where a text's parts begin and end; notations.py says how models write them. Hermes' calls, <tool_call>{"name": ...,
"arguments": {...}}</tool_call>, are parsed here, so that arguments come before they are complete. A call of another format comes
when it is complete. Knows nothing of HTTP or tokens: text in, pieces out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxserve.serving.notations import (
    HERMES,
    CallFormat,
    NoCallError,
    Thinking,
    Tools,
    call_of,
    calls_of_template,
    name_of,
    reasoning_of_template,
)

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

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
    """Which notations a model uses; None: what would be one is content."""

    reasoning: Thinking | None = None
    tool_calls: CallFormat | None = None

    @classmethod
    def of_template(cls, chat_template: str) -> Notation:
        """The notations that occur in a chat template."""
        return cls(reasoning_of_template(chat_template), calls_of_template(chat_template))

    def for_tools(self, *, shown: bool, held: bool) -> Notation:
        """The notation of an answer. shown: whether the model is told of tools, without which it calls none. held: whether it must
        call one, in a form that is Hermes'."""
        return replace(self, tool_calls=None if not shown else HERMES if held and self.tool_calls else self.tool_calls)

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must not be left out of an output's text, lest it can't be parsed."""
        thinking = self.reasoning.begin + self.reasoning.end if self.reasoning else ()
        return thinking + (self.tool_calls.begin if self.tool_calls else ())

    def counts_tokens(self, tokenizer: Tokenizer | None) -> bool:
        """Whether the marks of reasoning are tokens, so that tokens of reasoning can be counted."""
        if self.reasoning is None or tokenizer is None:
            return False
        return all(tokenizer.backend.token_to_id(marks[0]) is not None for marks in (self.reasoning.begin, self.reasoning.end))

    def preamble(self, prompt: str, continued: str = "") -> tuple[str, str] | None:
        """The (begin, end) marks of reasoning that may come first after this rendered chat; None where no reasoning may. begin is
        "" where the chat is within reasoning, so that it must go on. continued: as `is_thinking`'s."""
        if self.reasoning is None:
            return None
        if self.is_thinking(prompt, continued):
            return "", self.reasoning.end[0]
        closed = continued or prompt.rstrip().endswith(self.reasoning.end)
        return None if closed else (self.reasoning.begin[0], self.reasoning.end[0])

    def is_thinking(self, prompt: str, continued: str = "") -> bool:
        """Whether what follows this rendered chat is reasoning. continued: the last message, if the output goes on with it."""
        if self.reasoning is None:
            return False
        if continued:
            return max(map(continued.rfind, self.reasoning.begin)) > max(map(continued.rfind, self.reasoning.end))
        prompt = prompt.rstrip()
        return prompt.endswith(self.reasoning.begin) or self.reasoning.implicit and not prompt.endswith(self.reasoning.end)


NO_TOOLS: Tools = {}


class OutputParser:
    """Parses one sample's text: call `feed` with each part, then `finish`. The pieces add up to the text without its marks and the
    blanks beside them.

    Args:
      notation: the notations to parse; any other text is content.
      prompt: the rendered chat; if it ends with <think>, the output begins with reasoning.
      max_calls: later calls are dropped.
      continued: the last message of the chat, if the output goes on with it. Blanks at the output's begin are kept then.
      tools: the functions that may be called, for formats that write arguments without their types.
    """

    def __init__(
        self,
        notation: Notation,
        prompt: str = "",
        max_calls: int | None = None,
        continued: str = "",
        tools: Tools = NO_TOOLS,
    ):
        self._reasoning, self._calls = notation.reasoning, notation.tool_calls
        self._max_calls, self._tools = max_calls, tools
        self._text = ""  # text that is not in a piece yet
        thinking = notation.is_thinking(prompt, continued)
        begins = "opening" if self._calls and self._calls.opens else "content"
        self._state = "reasoning" if thinking else "content" if continued else "start" if self._reasoning else begins
        self._may_say = thinking  # whether the reasoning may begin with its mark all the same
        self._strip = not continued  # blanks before the next piece are left out
        self._blanks = ""  # blanks that were held back, and come before more text of the same kind
        self._call: _Call | None = None
        self._mark = ""  # that began the calls which are being read
        self._read_any = False  # whether any of these was read
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
                self._begin(final)
            elif self._state == "reasoning":
                yield from self._think(final)
            elif self._state == "opening":
                self._open(final)
            elif self._state == "content":
                yield from self._until(self._calls.begin if self._calls else (), "call", Content, final)
            elif self._calls is not None and self._calls.take is not None:
                yield from self._in_section(final)
            else:
                yield from self._in_call(final)
            if (self._state, len(self._text)) == before:
                return

    def _begin(self, final: bool) -> None:
        """Decides whether the text begins with a mark of reasoning."""
        assert self._reasoning is not None
        found = self._text.lstrip()
        mark = next((mark for mark in self._reasoning.begin if found.startswith(mark)), None)
        if mark is not None:
            self._text, self._state = found[len(mark) :], "reasoning"
        elif final or not any(mark.startswith(found) for mark in self._reasoning.begin):
            self._state, self._strip = "opening" if self._calls and self._calls.opens else "content", False

    def _think(self, final: bool) -> Iterator[Piece]:
        """Reasoning up to its end. Where the prompt or the model's way has begun it, the output may begin it too."""
        assert self._reasoning is not None
        if self._may_say:
            found = self._text.lstrip()
            mark = next((mark for mark in self._reasoning.begin if found.startswith(mark)), None)
            if mark is None and not final and any(mark.startswith(found) for mark in self._reasoning.begin):
                return
            self._may_say, self._text = False, self._text if mark is None else found[len(mark) :]
        behind = "opening" if self._calls and self._calls.opens else "content"
        yield from self._until(self._reasoning.end, behind, Reasoning, final)

    def _open(self, final: bool) -> None:
        """Decides whether content begins with a call that has no mark."""
        assert self._calls is not None
        found = self._text.lstrip()
        if found.startswith(self._calls.opens):
            self._state, self._mark, self._read_any = "call", "", False
        elif final or found:
            self._state = "content"

    def _until(self, marks: Sequence[str], then: str, kind: type[Reasoning] | type[Content], final: bool) -> Iterator[Piece]:
        """The text before the first of `marks`. An end of the text that could become a mark is held back, and blanks before it."""
        found = [(at, -len(mark), mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        at, _, mark = min(found) if found else (-1, 0, "")
        held = 0 if final else max((_overlap(self._text, mark) for mark in marks), default=0)
        end = at if at >= 0 else len(self._text) - held
        text, self._text = self._blanks + self._text[:end], self._text[end:]
        self._blanks = ""
        if self._strip:
            text = text.lstrip()
        if marks and (at >= 0 or not final):
            kept = text.rstrip()
            if at < 0:
                self._blanks = text[len(kept) :]
            text = kept
        if text:
            self._strip = False
            yield kind(text)
        if at >= 0:
            self._text, self._state, self._strip = self._text[len(mark) :], then, True
            self._mark, self._read_any = mark, False

    def _in_section(self, final: bool) -> Iterator[Piece]:
        """Calls of a format that notations.py reads."""
        assert self._calls is not None and self._calls.take is not None
        try:
            taken = self._calls.take(self._text, final, self._tools)
        except (ValueError, RecursionError) as error:
            self._state, self._strip = "content", self._read_any
            if not self._read_any:  # what looked like a call is content
                used = error.used if isinstance(error, NoCallError) else 0
                text, self._text = self._mark + self._text[:used], self._text[used:]
                self._strip = used > 0
                if text:
                    yield Content(text)
            return
        if final and not (taken.calls or self._read_any) and (text := self._mark + self._text[: taken.used]):
            yield Content(text)  # a mark at the very end
            self._mark = ""
        self._text = self._text[taken.used :]
        for name, arguments in taken.calls:
            self._read_any = True
            if self._max_calls is None or self.num_calls < self._max_calls:
                yield CallPart(self.num_calls, name, "")
                yield CallPart(self.num_calls, None, arguments)
            self.num_calls += 1
        if taken.ended:
            self._state, self._strip = "content", True

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
            if head and (name := _read_name(head[1])) is not None:
                self._arguments_at = self._given = head.end()
                self.is_call = True
                yield CallPart(self._index, name, "")
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
            name, arguments = call_of(json.loads(body))
        except (ValueError, RecursionError):
            yield Content(CALL + text[: self.ended])
            return
        self.is_call = True
        yield CallPart(self._index, name, arguments)


def _read_name(quoted: str) -> str | None:
    """A name as JSON has it; None if it is no JSON."""
    try:
        return name_of(json.loads(quoted, strict=False))
    except ValueError:
        return None


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` are a beginning of `mark`."""
    for n in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-n:]):
            return n
    return 0
