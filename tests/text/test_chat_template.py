"""Chat templates: what they see, what they may do, and which is used."""

import json
import re
from datetime import datetime

import pytest

from jaxserve.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import BYTE_LEVEL, HI, byte_level_backend, save

CHATML = (
    "{% for message in messages %}\n    {% if message.role == 'skip' %}{% continue %}{% endif %}\n"
    "<|turn|>{{ message.role }}\n{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def templated(*templates: str, **named: str) -> Tokenizer:
    """A tokenizer that adds BOS to any text, with one default template or with named ones."""
    chat_templates = named or {"default": templates[0]}
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(byte_level_backend(bos=True), special_tokens=specials, chat_templates=chat_templates)


def test_blocks_are_trimmed_and_loops_can_be_left():
    tokenizer = templated(CHATML)
    messages = [{"role": "skip", "content": "x"}, *HI]
    assert tokenizer.apply_chat_template(messages) == "<|turn|>user\nhi\n<|turn|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<|turn|>user\nhi\n"


def test_special_tokens_are_seen_by_their_names_and_others_are_empty():
    tokenizer = templated("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ messages | length }}")
    assert tokenizer.apply_chat_template(HI) == "<s>|</s>||1"


def test_bos_is_not_added_twice():
    tokenizer = templated("{{ bos_token }}{{ messages[0].content }}")
    assert tokenizer.encode_chat(HI) == tokenizer.encode("hi") == [0, *tokenizer.encode("hi", add_special_tokens=False)]


def test_tojson_keeps_unicode_and_html_and_takes_options():
    tokenizer = templated("{{ tools | tojson }}\n{{ tools | tojson(indent=2) }}")
    tools = [{"b": "<ü> & 'x'", "a": None}]
    expected = json.dumps(tools, ensure_ascii=False) + "\n" + json.dumps(tools, ensure_ascii=False, indent=2)
    assert tokenizer.apply_chat_template(HI, tools=tools) == expected


def test_strftime_now_and_generation_blocks():
    tokenizer = templated(
        "{{ strftime_now('%Y') }}{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    )
    assert tokenizer.apply_chat_template(HI) in {f"{datetime.now().year - late}[hi]" for late in (0, 1)}


def test_text_parts_are_joined_by_newlines():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tokenizer = templated("{{ messages[0].content }}")
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(ValueError, match=r"message 1: content may hold only parts like .* found \{'type': 'image'"):
        tokenizer.apply_chat_template([*HI, {"role": "user", "content": [*parts, {"type": "image", "url": "x"}]}])


def test_other_fields_reach_the_template_and_a_content_of_none_is_left_out():
    tokenizer = templated("{{ messages[0].content is defined }} {{ messages[0].tool_calls[0].name }}")
    message = {"role": "assistant", "content": None, "tool_calls": ({"name": "f"},)}
    assert tokenizer.apply_chat_template([message]) == "False f"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_seen_under_each_of_its_names(name):
    tokenizer = templated("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}")
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": "x", name: "why"}]) == "why why"


@pytest.mark.parametrize(
    "messages, says",
    [
        ([], "messages is empty"),
        (["hi"], "message 0 must be a dict with a string under 'role', found 'hi'"),
        ([*HI, {"content": "x"}], "message 1 must be a dict with a string under 'role'"),
        ([*HI, {"role": 3, "content": "x"}], "message 1 must be a dict"),
        ([{"role": "user", "content": {1, 2}}], "message 0 must be made of JSON values"),
    ],
)
def test_malformed_messages_are_named(messages, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        templated(CHATML).apply_chat_template(messages)


def test_an_error_of_the_template_names_the_message_that_brings_it_about():
    alternate = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate, got ' + m.role) }}{% endif %}{% endfor %}"
    )
    messages = [*HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, *HI]
    says = re.escape("the chat template fails at message 2 (role 'assistant'): Roles must alternate, got assistant")
    with pytest.raises(ValueError, match=f"^{says}$"):
        templated(alternate).apply_chat_template(messages)
    last_is_user = "{% if messages[-1].role != 'user' %}{{ raise_exception('ends with ' + messages[-1].role) }}{% endif %}"
    with pytest.raises(ValueError, match=re.escape("fails at message 2 (role 'tool'): ends with tool")):
        templated(last_is_user).apply_chat_template([messages[1], *HI, {"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match=r"fails at message 1 \(role 'user'\): .*no attribute 'content'"):
        templated("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}").apply_chat_template(
            [*HI, {"role": "user", "content": None}]
        )


def test_templates_cannot_reach_python_or_change_the_messages():
    messages = [{"role": "user", "content": "hi", "tags": ["a"]}]
    for attack in ("{{ messages[0].tags.append('b') }}", "{{ messages[0].content.__class__.__mro__ }}", "{{ messages.clear() }}"):
        with pytest.raises(ValueError, match="the chat template fails.*(unsafe|undefined|not safely callable)"):
            templated(attack).apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "hi", "tags": ["a"]}]


def test_variables_that_the_template_does_not_read_are_refused():
    tokenizer = templated("{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}")
    assert tokenizer.apply_chat_template(HI, enable_thinking=False) == "quiet"
    assert tokenizer.apply_chat_template(HI, tools=None) == ""
    with pytest.raises(ValueError, match="the chat template does not read thinking, tokenize; it reads enable_thinking"):
        tokenizer.apply_chat_template(HI, thinking=False, tokenize=False)
    with pytest.raises(ValueError, match="enable_thinking must be made of JSON values"):
        tokenizer.apply_chat_template(HI, enable_thinking=object())


def test_which_template_is_used():
    tokenizer = templated(default="D{{ tools is none }}", tool_use="T{{ tools[0].name }}", rag="R")
    tools = [{"name": "f"}]
    assert tokenizer.apply_chat_template(HI) == "DTrue"
    assert tokenizer.apply_chat_template(HI, tools=tools) == "Tf"
    assert tokenizer.apply_chat_template(HI, tools=tools, chat_template="default") == "DFalse"
    assert tokenizer.apply_chat_template(HI, chat_template="rag") == "R"
    assert tokenizer.apply_chat_template(HI, chat_template="own {{ messages[0].content }}") == "own hi"
    assert BYTE_LEVEL.apply_chat_template(HI, chat_template="x") == "x"
    with pytest.raises(ValueError, match="this model has no chat template: give one with chat_template="):
        BYTE_LEVEL.apply_chat_template(HI)
    with pytest.raises(ValueError, match=r"no default chat template: choose with chat_template= from \['a', 'b'\]"):
        templated(a="A", b="B").apply_chat_template(HI)
    with pytest.raises(ValueError, match=r"the chat template is not valid Jinja \(line 2\)"):
        templated("\n{% if %}").apply_chat_template(HI)


def test_where_a_folder_keeps_its_templates(tmp_path):
    chat = lambda **kwargs: Tokenizer.from_folder(tmp_path).apply_chat_template(HI, **kwargs)  # noqa: E731
    save(tmp_path, {"chat_template": "config"})
    assert chat() == "config"
    save(tmp_path, {"chat_template": [{"name": "default", "template": "listed"}, {"name": "rag", "template": "rag"}]})
    assert chat() == "listed" and chat(chat_template="rag") == "rag"
    (tmp_path / "chat_template.jinja").write_text("file ü", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("additional")
    assert Tokenizer.from_folder(tmp_path).chat_templates == {
        "default": "file ü",
        "short": "additional",
    }  # in place of the config's
    assert chat() == "file ü" and chat(chat_template="short") == "additional"
