"""Tool calls and reasoning as models write them: outputs in the form that each model's chat template or card has."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.serving.notations import CALLS, REASONING, calls_of_template, chosen
from jaxserve.serving.parsers import CallPart, Notation, OutputParser
from tests.serving.test_parsers import parse

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = {"city": "Köln", "days": 3, "exact": True, "tags": ["a", 'b"c']}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
WEATHER = ("get_weather", ARGUMENTS)
NOW = ("now", {})

NO_JSON = ("...", "{1, 2}", 'b"x"', "{[]: 1}", "1j", "1e999", "-" * 6000 + "1")


def days_of(said: str) -> list[tuple[str, str]]:
    """(parser, a call of get_weather whose `days` are this text), for formats that write arguments without their types."""
    return [
        (
            "qwen3_coder",
            f"<tool_call>\n<function=get_weather>\n<parameter=days>\n{said}\n</parameter>\n</function>\n</tool_call>",
        ),
        ("glm45", f"<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>{said}</arg_value>\n</tool_call>"),
        (
            "minimax_m2",
            f'<minimax:tool_call><invoke name="get_weather"><parameter name="days">{said}</parameter></invoke></minimax:tool_call>',
        ),
    ]


# (parser, what the model writes, content, calls)
OUTPUTS = [
    ("hermes", f'Sure.\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>', "Sure.", [WEATHER]),
    (
        "qwen3_coder",
        "Let me look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n"
        '<parameter=exact>\nTrue\n</parameter>\n<parameter=tags>\n["a", "b\\"c"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Let me look.",
        [WEATHER, NOW],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        '<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a", "b\\"c"]</arg_value>\n'
        "</tool_call>\n<tool_call>now\n</tool_call>",
        "",
        [WEATHER, NOW],
    ),
    (
        "minimax_m2",
        'I will.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="exact">true</parameter>\n'
        '<parameter name="tags">["a", "b\\"c"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "I will.",
        [WEATHER, NOW],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [WEATHER, NOW],
    ),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [WEATHER, NOW],
    ),
    (
        "deepseek_v31",
        f"Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Yes.",
        [WEATHER, NOW],
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        [WEATHER, NOW],
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]now[CALL_ID]abc123DEF[ARGS]{{}}", "", [WEATHER, NOW]),
    ("mistral", f"Well.[TOOL_CALLS]get_weather{JSON}", "Well.", [WEATHER]),
    (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        [WEATHER, NOW],
    ),
    ("granite", f'<tool_call>[{{"name": "get_weather", "arguments": {JSON}}}]', "", [WEATHER]),
    (
        "internlm",
        f'Yes.<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {JSON}}}<|action_end|>',
        "Yes.",
        [WEATHER],
    ),
    ("jamba", f'<tool_calls>[\n  {{"name": "get_weather", "arguments": {JSON}}}\n]</tool_calls>', "", [WEATHER]),
    ("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {JSON}}}]', "", [WEATHER]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {JSON}}}', "", [WEATHER]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
        "",
        [WEATHER, NOW],
    ),
    ("pythonic", "[get_weather(city='Köln', days=3, exact=True, tags=['a', 'b\"c']), now()]", "", [WEATHER, NOW]),
    ("llama4_pythonic", "<|python_start|>[now()]<|python_end|>", "", [NOW]),
    ("qwen3_xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [NOW]),
    ("llama4_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", [NOW]),
    # a parameter that is a Python literal, but no JSON, is a text
    *((name, text, "", [("get_weather", {"days": said})]) for said in NO_JSON for name, text in days_of(said)),
    *(("pythonic", f"[get_weather(days={said})]", f"[get_weather(days={said})]", []) for said in NO_JSON),
    ("pythonic", "[now(**{'a': 1})]", "[now(**{'a': 1})]", []),
    ("pythonic", "[f()()]", "[f()()]", []),
    # what no answer can hold: half a surrogate pair
    ("hermes", r'<tool_call>{"name": "now", "arguments": {}, "id": "\ud800"}</tool_call>', "", [NOW]),
    ("hermes", r'<tool_call>{"arguments": {"city": "\ud800"}, "name": "now"}</tool_call>', "", [("now", {"city": "\ud800"})]),
    ("jamba", r'<tool_calls>{"name": "now", "arguments": "{\"a\": \"\ud800\"}"}</tool_calls>', "", [("now", {"a": "\ud800"})]),
    ("pythonic", r"[now(city='\ud800')]", "", [("now", {"city": "\ud800"})]),
    *(("hermes", text, text, []) for text in (r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',)),
    *(("hermes", text, text, []) for text in (r'<tool_call>{"name": "\q", "arguments": {}}</tool_call>',)),
    # what is no call is content
    ("llama3_json", '{"temperature": 3}', '{"temperature": 3}', []),
    ("llama3_json", "It is { warm }.", "It is { warm }.", []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("pythonic", "[f(__import__('os').name)]", "[f(__import__('os').name)]", []),
    ("qwen3_coder", "<tool_call>what?</tool_call>", "<tool_call>what?</tool_call>", []),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>oh<｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>oh<｜tool▁calls▁end｜>", []),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("granite", "<|tool_call|>[1]", "<|tool_call|>[1]", []),
    ("kimi_k2", "Nothing to call.", "Nothing to call.", []),
]


def read(name: str, parts: list[str], **options):
    reasoning, content, calls = parse(parts, Notation(None, CALLS[name]), tools=TOOLS, **options)
    assert not reasoning
    json.dumps([content, calls], ensure_ascii=False).encode()  # as the answer is
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name,text,content,calls", OUTPUTS, ids=[f"{i}-{row[0]}" for i, row in enumerate(OUTPUTS)])
def test_calls_whole_and_a_character_at_a_time(name, text, content, calls):
    assert read(name, [text]) == (content, calls)
    assert read(name, list(text)) == (content, calls)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(OUTPUTS), st.lists(st.integers(0, 250), max_size=8))
def test_calls_however_an_output_is_cut(row, cuts):
    name, text, content, calls = row
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read(name, [text[a:b] for a, b in zip(at, at[1:], strict=False)]) == (content, calls)


# Parts of what each format writes between its marks, in no order.
PIECES = st.one_of(
    st.sampled_from(
        sorted({part for row in OUTPUTS for part in re.findall(r"<[^<>]*>|\w+|\W", row[1]) if part.isascii() and len(part) < 50})
    ),
    st.text(max_size=5),
    st.sampled_from([*NO_JSON[:-1], "\\ud800", "\\q", "-" * 6000, "[" * 6000, "9" * 5000]),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CALLS)), st.lists(PIECES, max_size=12))
@example("llama3_json", ["<|python_tag|>"])
@example("llama3_json", ["<|python_tag|> ; "])
def test_nothing_that_a_model_writes_is_an_error(name, parts):
    begin = CALLS[name].opens or CALLS[name].begin[0]
    text = begin + "".join(parts)
    whole = parse([text], Notation(None, CALLS[name]), tools=TOOLS)
    assert parse([begin, *parts], Notation(None, CALLS[name]), tools=TOOLS) == whole
    json.dumps(whole, ensure_ascii=False).encode()
    assert whole[2] or "".join(whole[1].split()) == "".join(text.split()), "what is no call is content"


@pytest.mark.parametrize("name", CALLS)
def test_what_is_nested_too_deeply_is_no_call(name):
    text = (CALLS[name].opens or CALLS[name].begin[0]) + '{"name": "now", "arguments": ' * 50_000
    _, content, calls = parse([text], Notation(None, CALLS[name]), tools=TOOLS)
    assert content or calls


def test_parameters_that_are_no_objects():
    for properties in ([], True, {"days": True}, {"days": {"type": 1}}, {"days": {"type": ["integer", "null"]}}):
        tools = {"get_weather": {"properties": properties}}
        found = parse([days_of("3")[0][1]], Notation(None, CALLS["qwen3_coder"]), tools=tools)
        assert [name for name, _ in found[2]] == ["get_weather"]


@pytest.mark.parametrize("name,text,content,calls", [row for row in OUTPUTS if len(row[3]) > 1], ids=str)
def test_calls_beyond_the_most_are_left_out(name, text, content, calls):
    assert read(name, [text], max_calls=1) == (content, calls[:1])


@pytest.mark.parametrize("name", ["llama3_json", "mistral", "qwen3_coder", "glm45"])
def test_a_call_comes_before_the_next_is_written(name):
    text = next(row[1] for row in OUTPUTS if row[0] == name and len(row[3]) > 1 and row[1].count("[TOOL_CALLS]") != 1)
    parser = OutputParser(Notation(None, CALLS[name]), tools=TOOLS)
    pieces = [piece for character in text[: text.index("now")] for piece in parser.feed(character)]
    assert [piece.name for piece in pieces if isinstance(piece, CallPart) and piece.name] == ["get_weather"]


# (parser, the prompt's end, what the model writes, reasoning, content)
THOUGHTS = [
    ("qwen3", "", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
    ("qwen3", "<think>\n", "hm\n</think>\n\nYes.", "hm", "Yes."),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("qwen3", "<think>\n", "<think>\nhm</think>Yes.", "hm", "Yes."),
    ("qwen3", "", "Yes.", "", "Yes."),
    ("deepseek_r1", "", "hm\n</think>\n\nYes.", "hm", "Yes."),
    ("deepseek_r1", "", "<think>\nhm\n</think>\nYes.", "hm", "Yes."),
    ("deepseek_r1", "</think>", "Yes.", "", "Yes."),
    ("granite", "", "Here is my thought process: hm Here is my response: Yes.", "hm", "Yes."),
    ("granite", "", "Here's my thought process:\n\nhm\n\nHere's my response:\n\nYes.", "hm", "Yes."),
    ("granite", "", "Here is the answer.", "", "Here is the answer."),
    ("mistral", "", "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    ("seed_oss", "", "<seed:think>hm</seed:think>Yes.", "hm", "Yes."),
    *((name, "", "<think>hm</think>Yes.", "hm", "Yes.") for name in ("deepseek_v3", "glm45", "kimi_k2")),
    *((name, "", "Yes.", "", "Yes.") for name in ("deepseek_v3", "glm45", "kimi_k2")),
    *((name, "", "hm</think>Yes.", "hm", "Yes.") for name in ("ernie45", "minimax_m2", "olmo3", "step3")),
    *((name, "</think>", "Yes.", "", "Yes.") for name in ("ernie45", "minimax_m2", "olmo3", "step3")),
]


@pytest.mark.parametrize("name,prompt,text,reasoning,content", THOUGHTS)
def test_reasoning_whole_and_a_character_at_a_time(name, prompt, text, reasoning, content):
    for parts in ([text], list(text)):
        assert parse(parts, Notation(REASONING[name], None), prompt=prompt) == (reasoning, content, [])


def test_every_row_has_an_output():
    assert {row[0] for row in OUTPUTS if row[3]} == set(CALLS)
    assert {row[0] for row in THOUGHTS if row[3]} == set(REASONING)


def test_a_call_without_a_mark_behind_reasoning():
    text = '<think>hm</think>\n\n{"name": "now", "parameters": {}}'
    for parts in ([text], list(text)):
        assert parse(parts, Notation(REASONING["qwen3"], CALLS["llama3_json"])) == ("hm", "", [("now", "{}")])


@pytest.mark.parametrize(
    "template,name",
    [
        ("{%- if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\\n<function=' + name{% endif %}", "qwen3_coder"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{- 'Environment: ipython' }}", "llama3_json"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'", "deepseek_v31"),
        ("plain", None),
    ],
)
def test_the_format_of_a_template(template, name):
    assert calls_of_template(template) is (None if name is None else CALLS[name])


def test_a_parser_is_chosen_by_name():
    assert (
        chosen("tool_call_parser", "auto", CALLS, None) is None
        and chosen("tool_call_parser", "none", CALLS, CALLS["hermes"]) is None
    )
    assert chosen("tool_call_parser", "mistral", CALLS, None) is CALLS["mistral"]
    with pytest.raises(ValueError, match="tool_call_parser='grok' must be auto, none, or one of qwen3_coder"):
        chosen("tool_call_parser", "grok", CALLS, None)
