"""How models write reasoning and tool calls: a table of each, under vLLM's names of its parsers.

Owns the marks, and how a call's text is read. parsers.py finds them in an output as it comes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]  # name of a function -> the JSON schema of its parameters
ReadCall = tuple[str, str]  # (name, arguments as JSON)


@dataclass(frozen=True)
class Thinking:
    """What stands around reasoning.

    begin, end: marks, any of which counts; a grammar writes the first. implicit: an output begins with reasoning unless the prompt
    ends with an end mark, whether it says so or not.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    implicit: bool = False


_THINK = Thinking(("<think>",), ("</think>",))
_OPEN = Thinking(("<think>",), ("</think>",), implicit=True)
REASONING: dict[str, Thinking] = {
    "qwen3": _THINK,
    "deepseek_r1": _OPEN,
    "deepseek_v3": _THINK,
    "ernie45": _OPEN,
    "glm45": _THINK,
    "granite": Thinking(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "kimi_k2": _THINK,
    "minimax_m2": _OPEN,
    "mistral": Thinking(("[THINK]",), ("[/THINK]",)),
    "olmo3": _OPEN,
    "seed_oss": Thinking(("<seed:think>",), ("</seed:think>",)),
    "step3": _OPEN,
}


@dataclass(frozen=True, slots=True)
class Taken:
    """What could be read of calls so far. used: characters that are done with. ended: no call follows them."""

    calls: list[ReadCall]
    used: int
    ended: bool


WAIT = Taken([], 0, False)
Take = Callable[[str, bool, Tools], Taken]  # of (text behind a mark, whether it is all, tools); ValueError: it begins with no call


class NoCallError(ValueError):
    """What stands behind a mark is no call. used: the characters of it that are content then; what follows is read anew."""

    def __init__(self, used: int):
        super().__init__("no call")
        self.used = used


@dataclass(frozen=True)
class CallFormat:
    """How calls are written.

    begin: marks, any of which begins one. take: reads what follows; None: parsers.py's own, which gives arguments as they come.
    opens: a text that begins a call where content begins with it. hint: what a chat template holds that writes calls so.
    """

    begin: tuple[str, ...]
    take: Take | None
    opens: str = ""
    hint: str = ""


def _between(end: str, read: Callable[[str, Tools], list[ReadCall]]) -> Take:
    """Reads a text up to its end mark, or to the end of the output."""

    def take(text: str, final: bool, tools: Tools) -> Taken:
        at = text.find(end)
        if at < 0 and not final:
            return WAIT
        used = len(text) if at < 0 else at + len(end)
        try:
            return Taken(read(text if at < 0 else text[:at], tools), used, True)
        except (ValueError, RecursionError):
            raise NoCallError(used) from None

    return take


def _all_of(pattern: str) -> Callable[[str, Tools], list[ReadCall]]:
    """Reads calls that a regular expression finds: groups 1 and 2 are the name and the arguments' JSON."""
    found = re.compile(pattern, re.DOTALL)

    def read(text: str, _: Tools) -> list[ReadCall]:
        calls = [(match[1].strip(), _arguments(json.loads(match[2] or "{}"))) for match in found.finditer(text)]
        if not calls:
            raise ValueError("no call")
        return calls

    return read


def call_of(value: Any) -> ReadCall:
    """A call as JSON: {"name": ..., "arguments" or "parameters": ...}. ValueError for anything else."""
    if not (isinstance(value, dict) and isinstance(value.get("name"), str)):
        raise ValueError(f"{value!r} is no call")
    return name_of(value["name"]), _arguments(value.get("arguments", value.get("parameters", {})))


def name_of(text: str) -> str:
    """The name of a function. ValueError for half a surrogate pair, which no answer can hold."""
    text.encode()
    return text


def _arguments(value: Any) -> str:
    """A call's arguments as JSON; a text is taken for JSON. Half a surrogate pair is escaped, as no answer could hold it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _read_json(text: str, _: Tools) -> list[ReadCall]:
    value = json.loads(text)
    return [call_of(one) for one in (value if isinstance(value, list) else [value])]


def _complete(text: str, final: bool) -> tuple[Any, int] | None:
    """(the JSON value that a text begins with, where it ends); None while it may not be complete. ValueError at the end."""
    begin = len(text) - len(text.lstrip())
    if not final and not text.rstrip().endswith(("}", "]", ";")):
        return None
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, begin)
    except ValueError:
        if final:
            raise
        return None


def _take_list(text: str, final: bool, _: Tools) -> Taken:
    """A JSON list of calls, or one call, with no end mark."""
    found = _complete(text, final)
    if found is None:
        return WAIT
    return Taken([call_of(one) for one in (found[0] if isinstance(found[0], list) else [found[0]])], found[1], True)


def _take_objects(text: str, final: bool, _: Tools) -> Taken:
    """Calls as JSON objects, with semicolons between them; each is read when it is complete."""
    calls, at = [], 0
    while True:
        at += len(text[at:]) - len(text[at:].lstrip("; \n\t\r"))
        rest = text[at:]
        if rest and not rest.startswith("{"):
            if not calls and not final:
                raise ValueError("no call")
            return Taken(calls, at, True)
        found = _complete(rest, final) if rest else None
        if found is None:
            return Taken(calls, at, final)
        calls.append(call_of(found[0]))
        at += found[1]


# What reading a text as a Python literal and writing that as JSON may raise: `{1}` is no JSON, and `-----...1` no end of parsing.
_NO_JSON = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
_SURROGATE = re.compile("[\ud800-\udfff]")
_DOTTED = re.compile(r"[\w.]+")
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def _take_mistral(text: str, final: bool, tools: Tools) -> Taken:
    """A JSON list of calls, or name{...}, as newer templates have it."""
    if text.lstrip().startswith(("[", "{")):
        return _take_list(text, final, tools)
    head = _NAMED.match(text)
    if head is None:
        if final:
            raise ValueError("no call")
        return WAIT
    found = _complete(text[head.end() :], final)
    return WAIT if found is None else Taken([(head[1], _arguments(found[0]))], head.end() + found[1], True)


def _take_pythonic(text: str, final: bool, _: Tools) -> Taken:
    """A Python list of calls with keyword arguments, as [f(a=1), g(b="x")]."""
    if not final:
        return WAIT
    try:
        tree = ast.parse(text.strip().removesuffix("<|python_end|>"), mode="eval").body
        if not (isinstance(tree, ast.List) and tree.elts):
            raise ValueError("no list")
        return Taken([_python_call(node) for node in tree.elts], len(text), True)
    except _NO_JSON:
        raise ValueError("no list of calls") from None


def _python_call(node: ast.expr) -> ReadCall:
    """A call with keyword arguments that are literals. Raises one of _NO_JSON for anything else."""
    if not isinstance(node, ast.Call) or node.args or not _DOTTED.fullmatch(name := ast.unparse(node.func)):
        raise ValueError("no call")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("**keywords")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    json.dumps(arguments, allow_nan=False)
    return name, _arguments(arguments)


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_INVOKE = re.compile(r"<invoke name=\"?([^\">]+)\"?>(.*?)</invoke>", re.DOTALL)
_NAMED_PARAMETER = re.compile(r"<parameter name=\"?([^\">]+)\"?>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_qwen3_coder(text: str, tools: Tools) -> list[ReadCall]:
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ValueError("no <function=...>")
    return [_typed(found[1].strip(), _PARAMETER.findall(found[2]), tools)]


def _read_glm(text: str, tools: Tools) -> list[ReadCall]:
    name = re.match(r"\s*([\w.-]+)\s*(?:$|\n|<arg_key>)", text)
    if name is None:
        raise ValueError("no name")
    return [_typed(name[1], _GLM_PAIR.findall(text), tools)]


def _read_minimax(text: str, tools: Tools) -> list[ReadCall]:
    calls = [_typed(name, _NAMED_PARAMETER.findall(body), tools) for name, body in _INVOKE.findall(text)]
    if not calls:
        raise ValueError("no <invoke>")
    return calls


def _typed(name: str, pairs: list[tuple[str, str]], tools: Tools) -> ReadCall:
    """A call whose arguments came as texts: those that the function's parameters do not call strings are read as JSON."""
    properties = _object(tools.get(name, {}).get("properties"))
    arguments = {}
    for key, text in pairs:
        schema = _object(properties.get(key.strip()))
        types = schema.get("type", "string" if key.strip() in properties or not properties else "")
        arguments[key.strip()] = text if "string" in (types if isinstance(types, list) else [types]) else _value(text)
    return name, _arguments(arguments)


def _object(value: Any) -> dict[str, Any]:
    """A part of a schema, as far as it is an object: true and false are schemas too."""
    return value if isinstance(value, dict) else {}


def _value(text: str) -> Any:
    """What a text means as JSON, or as a Python literal that JSON can say; itself where it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
            return value
        except _NO_JSON:
            continue
    return text


HERMES = CallFormat(("<tool_call>",), None, hint="<tool_call>")
_CODER = CallFormat(("<tool_call>",), _between("</tool_call>", _read_qwen3_coder), hint="<function=")
_LLAMA3 = CallFormat(("<|python_tag|>",), _take_objects, opens="{", hint="Environment: ipython")
_PYTHONIC = CallFormat(("<|python_start|>",), _take_pythonic, opens="[")
CALLS: dict[str, CallFormat] = {  # of several whose hint a template holds, the first one counts
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
    "glm45": CallFormat(("<tool_call>",), _between("</tool_call>", _read_glm), hint="<arg_key>"),
    "minimax_m2": CallFormat(("<minimax:tool_call>",), _between("</minimax:tool_call>", _read_minimax), hint="<minimax:tool_call>"),
    "kimi_k2": CallFormat(
        ("<|tool_calls_section_begin|>",),
        _between(
            "<|tool_calls_section_end|>",
            _all_of(
                r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
            ),
        ),
        hint="<|tool_calls_section_begin|>",
    ),
    "deepseek_v3": CallFormat(
        ("<｜tool▁calls▁begin｜>",),
        _between(
            "<｜tool▁calls▁end｜>",
            _all_of(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(.*?)\n```json\n(.*?)\n```\s*<｜tool▁call▁end｜>"),
        ),
        hint="tool['type'] + '<｜tool▁sep｜>'",
    ),
    "deepseek_v31": CallFormat(
        ("<｜tool▁calls▁begin｜>",),
        _between("<｜tool▁calls▁end｜>", _all_of(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>")),
        hint="<｜tool▁calls▁begin｜>",
    ),
    "mistral": CallFormat(("[TOOL_CALLS]",), _take_mistral, hint="[TOOL_CALLS]"),
    "granite": CallFormat(("<|tool_call|>", "<tool_call>"), _take_list, hint="<|tool_call|>"),
    "internlm": CallFormat(
        ("<|action_start|><|plugin|>",), _between("<|action_end|>", _read_json), hint="<|action_start|><|plugin|>"
    ),
    "jamba": CallFormat(("<tool_calls>",), _between("</tool_calls>", _read_json), hint="<tool_calls>"),
    "phi4_mini_json": CallFormat(("functools",), _take_list, hint="functools"),
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "hermes": HERMES,
}


def calls_of_template(chat_template: str) -> CallFormat | None:
    """The format in which a chat template writes calls, as far as a text in it tells."""
    return next((row for row in CALLS.values() if row.hint and row.hint in chat_template), None)


def reasoning_of_template(chat_template: str) -> Thinking | None:
    """The marks of reasoning that a chat template holds."""
    rows = ("qwen3", "mistral", "seed_oss", "granite")
    return next((row for row in map(REASONING.__getitem__, rows) if any(mark in chat_template for mark in row.end)), None)


def chosen[T](option: str, name: str, table: Mapping[str, T], found: T | None) -> T | None:
    """The row of a table by its name; None for "none", `found` for "auto". ValueError names the option where there is no row."""
    if name in ("auto", "none"):
        return found if name == "auto" else None
    if name not in table:
        raise ValueError(f"{option}={name!r} must be auto, none, or one of {', '.join(table)}")
    return table[name]
