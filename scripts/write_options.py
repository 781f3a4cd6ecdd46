"""Writes docs/options.md, docs/fields.md, docs/routes.md and docs/metrics.md from the tables that the code has: the engine's
options, vLLM's flags, the fields of requests, vLLM's routes, and a server's metrics.

    python -m scripts.write_options

tests/test_config.py fails while a page is not what this writes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.common import vllm_flags
from jaxserve.cli.common.command import run_command
from jaxserve.config import Option, Switch, options

if TYPE_CHECKING:
    from prometheus_client import Metric

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
FIELDS, ROUTES, METRICS = (PAGE.with_name(f"{name}.md") for name in ("fields", "routes", "metrics"))
_HEAD = """# Options of an engine

Fields of `EngineConfig`: keyword arguments of `LLM(model, ...)`, and flags of every command that makes an engine
(`--max_num_seqs=64`; dashes do as well). The page is written by `python -m scripts.write_options`. *Unset* says what None, the
default, means. A command's `--help` shows its own defaults: `jaxserve serve` has `--warm_up=background`.
"""
_VLLM = """
## vLLM's flags

All flags of `vllm serve` (0.32, and some of versions before): those that are the same here, those that have another name, and those
that are not here. Both names of a flag work.

A flag that is not here is refused by name, and the command says what to use instead. *Accepted* lists the values that ask for what
is so here anyway: the flag is taken and changes nothing. *Given*: the switch itself is taken. A switch that `--no-` turns off is
taken too. A part of a flag's JSON, such as `--compilation-config.level`, is answered as the whole flag is.

"""
_FIELDS = """# Fields of a request

What `/v1/completions` and `/v1/chat/completions` take. Names and meanings are OpenAI's and, for the others, vLLM's (0.32). Any
other field is a 400 that names it. Null is the same as leaving a field out. `python -m scripts.write_options` writes this page.

"""

_ROUTES = """# vLLM's routes

All routes of vLLM's servers (0.32): those that are here, with what differs, and those that are not. An unknown field of a body is
refused here, and vLLM ignores it. `/pause` and what follows it need `--enable_control` and a key, where vLLM needs
`VLLM_SERVER_DEV_MODE=1`. [Server](server.md#routes) has the routes that are jaxserve's own. `python -m scripts.write_options`
writes this page.

"""

_METRICS = """# Metrics

What `/metrics` answers, in Prometheus's text format. Names have the prefix `jaxserve:`, and with `--vllm_metric_names` `vllm:`.
They are vLLM's names (0.32), but for those of steps, buckets, padding, programs, tiers and keys. Stores of KV, keys with names and
roles have theirs only where there are any. `python -m scripts.write_options` writes this page.

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


def server_flags() -> dict[str, str]:
    """The flags of `jaxserve serve`, and what its --help says of each. It runs on its own: a process defines a flag once."""
    done = subprocess.run([sys.executable, "-m", "jaxserve", "serve", "--help"], capture_output=True, text=True, check=True)
    found = re.findall(r"^  --(?:\[no\])?(\w+).*\n((?: {6}.*\n)+)", done.stdout, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def page() -> str:
    """The page's text."""
    groups = dict.fromkeys(option.group for _, option in options().values())
    parts = [_HEAD]
    for group in groups:
        rows = [_row(name, field.default, option) for name, (field, option) in options().items() if option.group == group]
        parts.append(
            "\n".join([f"\n## {group}\n", "| option | values | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])
        )
    return "".join([*parts, _VLLM, vllm_flags.markdown(server_flags())])


def fields_page() -> str:
    """The text of the page about fields of requests."""
    from jaxserve.serving.chat_protocol import ChatRequest
    from jaxserve.serving.protocol import CompletionRequest, GenerationRequest
    from jaxserve.serving.vllm_fields import MISSING

    models: tuple[type[GenerationRequest], ...] = (CompletionRequest, ChatRequest)
    lines = ["| field | completions | chats | what it does here |", "| --- | --- | --- | --- |"]
    for name in sorted({name for model in models for name in model.model_fields}):
        there = " | ".join("yes" if name in model.model_fields else "" for model in models)
        said = [str(model.model_fields[name].description) for model in models if name in model.model_fields]
        text = said[0] if len({*said}) == 1 else f"Completions: {said[0]} Chats: {said[1]}"
        lines.append(f"| `{name}` | {there} | {text} |")
    lines += ["", "## Fields of vLLM's that are refused", ""]
    lines += ["Null passes, and so does a value that asks for what is so anyway.", ""]
    lines += ["| field | of | passes | why it is refused, or what to do |", "| --- | --- | --- | --- |"]
    for name, row in MISSING.items():
        passes = ", ".join(f"`{json.dumps(x)}`" for x in row.accepts)
        lines.append(f"| `{name}` | {f'`{row.of}`' if row.of else 'several'} | {passes} | {row.instead} |")
    return _FIELDS + "\n".join(lines) + "\n"


def routes_page() -> str:
    """The text of the page about vLLM's routes."""
    from jaxserve.serving.vllm_routes import MISSING_ROUTES
    from jaxserve.serving.vllm_routes import ROUTES as HERE

    lines = ["| route | what differs |", "| --- | --- |"]
    lines += [f"| `{name}` | {differs} |" for name, differs in HERE.items()]
    lines += ["", "## Not here", "", "A request is answered with 404 and the reason.", ""]
    lines += ["| route | why, or what to ask |", "| --- | --- |"]
    lines += [f"| `{name}` | {why} |" for name, why in MISSING_ROUTES.items()]
    return _ROUTES + "\n".join(lines) + "\n"


def all_families() -> list[Metric]:
    """The families of a server that has a store of KV, API keys with names, a role and drafts."""
    from jaxserve.engine.stats import KVStoreStats
    from jaxserve.serving.keys import ApiKey, KeyRing, KeyUse
    from jaxserve.serving.messages import LoopStats
    from jaxserve.serving.metrics import Metrics

    keys = KeyRing(("given",))
    keys.named = (KeyUse(ApiKey(name="name", digest=b"")),)
    metrics = Metrics("model", LoopStats(kv_store=KVStoreStats()), {"block_size": 16}, role="prefill", keys=keys)
    return sorted(metrics.registry.collect(), key=lambda family: family.name)


def metrics_page() -> str:
    """The text of the page about metrics."""
    from jaxserve.serving.metrics import PREFIX
    from jaxserve.serving.vllm_metrics import MISSING_METRICS

    lines = ["| family | kind | what |", "| --- | --- | --- |"]
    for family in all_families():
        name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        lines.append(f"| `{name}` | {family.type} | {family.documentation} |")
    lines += ["", "## Families of vLLM's that are not here", "", "| family | why, or what tells the same |", "| --- | --- |"]
    lines += [f"| `{name}{'*' if name.endswith('_') else ''}` | {why} |" for name, why in MISSING_METRICS.items()]
    return _METRICS + "\n".join(lines) + "\n"


def main() -> None:
    for path, text in ((PAGE, page()), (FIELDS, fields_page()), (ROUTES, routes_page()), (METRICS, metrics_page())):
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    run_command(main)
