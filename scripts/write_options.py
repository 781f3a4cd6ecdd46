"""Writes docs/options.md: the engine's options, and vLLM's names for them, from the tables that the code has.

    python -m scripts.write_options

tests/test_config.py fails while the page is not what this writes.
"""

from __future__ import annotations

from pathlib import Path

from jaxserve.cli.common import vllm_flags
from jaxserve.cli.common.command import run_command
from jaxserve.config import Option, Switch, options

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
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


def main() -> None:
    PAGE.write_text(page())
    print(PAGE)


if __name__ == "__main__":
    run_command(main)
