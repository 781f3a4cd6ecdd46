"""How answers are parsed for tool calls and for reasoning: flags that `jaxserve serve` and `jaxserve run-batch` share."""

from __future__ import annotations

from absl import flags

from jaxserve.serving.notations import CALLS, REASONING

_TOOLS = flags.DEFINE_enum("tool_call_parser", "auto", ["auto", "none", *CALLS], "auto: as the chat template has it.")
_REASONING = flags.DEFINE_enum("reasoning_parser", "auto", ["auto", "none", *REASONING], "auto: as the chat template has it.")


def parsers() -> dict[str, str]:
    """What was given, as arguments of ServerOptions."""
    return {"tool_call_parser": _TOOLS.value, "reasoning_parser": _REASONING.value}
