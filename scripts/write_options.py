"""Writes docs/options.md and docs/fields.md from the tables that the code has: the engine's options, vLLM's names for them, and the
fields of requests.

    python -m scripts.write_options

tests/test_config.py fails while a page is not what this writes.
"""

from __future__ import annotations

import json
from pathlib import Path

from jaxserve.cli.common import vllm_flags
from jaxserve.cli.common.command import run_command
from jaxserve.config import Option, Switch, options

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
FIELDS = PAGE.with_name("fields.md")
_HEAD = """# Options of an engine

Fields of `EngineConfig`: keyword arguments of `LLM(model, ...)`, and flags of every command that makes an engine
(`--max_num_seqs=64`; dashes do as well). The page is written by `python -m scripts.write_options`. *Unset* says what None, the
default, means. A command's `--help` shows its own defaults: `jaxserve serve` has `--warm_up=background`.
"""
_VLLM = """
## vLLM's flags

Flags of vLLM's that are not listed here, and that jaxserve has, are called the same: `--max-model-len`, `--max-num-seqs`,
`--max-num-batched-tokens`, `--gpu-memory-utilization`, `--served-model-name`, `--dtype`, `--seed`, `--host`, `--port`, `--api-key`,
`--tokenizer`, `--enable-prefix-caching`, `--enable-chunked-prefill`, `--scheduling-policy`, `--speculative-config`. A few have
another name here, and both names work.

All other flags of `vllm serve` (0.32, and some of versions before) are refused by name, and the command says what to use instead.
*Accepted* lists the values that ask for what is so here anyway: the flag is taken and changes nothing. *Given*: the switch itself
is taken. A switch that `--no-` turns off is taken too. A part of a flag's JSON, such as `--compilation-config.level`, is answered
as the whole flag is.

"""
_FIELDS = """# Fields of a request

What `/v1/completions` and `/v1/chat/completions` take. Names and meanings are OpenAI's and, for the others, vLLM's (0.32). Any
other field is a 400 that names it. Null is the same as leaving a field out. `python -m scripts.write_options` writes this page.

"""


def _values(option: Option) -> str:
    """What a field may be, in a few words."""
    if isinstance(option, Switch):
        return "True, False"
    return ", ".join(f"`{choice}`" for choice in option.choices) or option.must


def _row(name: str, default: object, option: Option) -> str:
    values = _values(option)
    means = f"*Unset*: {option.unset}." if option.unset else f"`{default}`"
    return f"| `{name}` | {values} | {means} | {option.help.replace('|', chr(92) + '|')} |"


def page() -> str:
    """The page's text."""
    groups = dict.fromkeys(option.group for _, option in options().values())
    parts = [_HEAD]
    for group in groups:
        rows = [_row(name, field.default, option) for name, (field, option) in options().items() if option.group == group]
        parts.append(
            "\n".join([f"\n## {group}\n", "| option | values | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])
        )
    return "".join([*parts, _VLLM, vllm_flags.markdown()])


def fields_page() -> str:
    """The text of the page about fields of requests."""
    from jaxserve.serving.chat_protocol import ChatRequest
    from jaxserve.serving.protocol import CompletionRequest, GenerationRequest
    from jaxserve.serving.vllm_fields import MISSING

    models: tuple[type[GenerationRequest], ...] = (CompletionRequest, ChatRequest)
    lines = ["| field | completions | chats | what it does here |", "| --- | --- | --- | --- |"]
    for name in sorted({name for model in models for name in model.model_fields}):
        there = " | ".join("yes" if name in model.model_fields else "" for model in models)
        said = [field.description for model in models if (field := model.model_fields.get(name)) and field.description]
        lines.append(f"| `{name}` | {there} | {said[0] if said else 'As in the API of OpenAI or vLLM.'} |")
    lines += ["", "## Fields of vLLM's that are refused", ""]
    lines += ["Null passes, and so does a value that asks for what is so anyway.", ""]
    lines += ["| field | passes | why it is refused, or what to do |", "| --- | --- | --- |"]
    for name, row in MISSING.items():
        lines.append(f"| `{name}` | {', '.join(f'`{json.dumps(x)}`' for x in row.accepts)} | {row.instead} |")
    return _FIELDS + "\n".join(lines) + "\n"


def main() -> None:
    for path, text in ((PAGE, page()), (FIELDS, fields_page())):
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    run_command(main)
