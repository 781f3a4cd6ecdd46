"""The `jaxserve` command: which command a user means, and what there is.

Owns the table of commands. A command's own module is imported when it runs.
"""

from __future__ import annotations

import difflib
import importlib
import sys

from jaxserve.cli.common.command import MISSPELT, fail, run_command

COMMANDS = {  # as a user says it -> a line; its module is that of jaxserve.cli with dots for spaces
    "serve": "Serve a model over HTTP with OpenAI's API.",
    "generate": "Generate completions of prompts, from flags or a file.",
    "chat": "Chat in the terminal, with a model here or with a server.",
    "bench throughput": "Throughput of a workload that is given all at once.",
    "bench latency": "Latency of one batch.",
    "bench serve": "Latency and throughput under a load, of an engine or a server.",
    "tune profile": "Measure how long this machine's steps take.",
    "tune buckets": "Fit the compiled shapes to a workload.",
    "tune budget": "Find the token budget that keeps an objective.",
    "tune capacity": "Find the highest rate that meets an objective.",
    "autotune": "Choose all limits for a workload, and write a config file.",
    "simulate": "Serve a workload on GPUs in virtual time.",
    "convert": "Convert between Hugging Face, GGUF and Orbax.",
    "verify": "Compare a model with transformers.",
    "router": "Join several servers behind one address.",
    "version": "Print jaxserve's version and those of what it stands on.",
}


def main() -> None:
    """Runs the command that sys.argv names. Exit codes as `run_command`'s; without a command or with --help, the list of them."""
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help", "help"):
        print(commands_text(""))
        sys.exit(0 if args else MISSPELT)
    if args[0] in ("--version", "version"):
        print(version_text())
        return
    if args[0] in COMMANDS:
        name, rest = args[0], args[1:]
    elif any(command.startswith(f"{args[0]} ") for command in COMMANDS):
        if len(args) == 1 or args[1] in ("-h", "--help"):
            print(commands_text(args[0]))
            sys.exit(0 if len(args) > 1 else MISSPELT)
        name, rest = f"{args[0]} {args[1]}", args[2:]
    else:
        name, rest = args[0], args[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "bench", "tune"], n=1, cutoff=0.5)
        hint = f"did you mean `jaxserve {near[0]}`?" if near else "`jaxserve --help` lists them"
        fail("jaxserve", f"unknown command {name}; {hint}", MISSPELT)
    sys.argv = [f"jaxserve {name}", *rest]
    module = importlib.import_module("jaxserve.cli." + name.replace(" ", "."))
    run_command(module.main, name=f"jaxserve {name}")


def commands_text(family: str) -> str:
    """The commands, a line each; of a family ("bench", "tune") or all."""
    shown = {name: line for name, line in COMMANDS.items() if not family or name.startswith(f"{family} ")}
    width = max(map(len, shown))
    lines = [f"  {name:{width}}  {line}" for name, line in shown.items()]
    called = f"jaxserve {family} COMMAND" if family else "jaxserve COMMAND"
    head, foot = f"usage: {called} [MODEL] [--flag=value ...]", f"`{called} --help` lists a command's flags."
    return "\n".join([head, "", *lines, "", foot])


def version_text() -> str:
    """Our version, and those of Python and the libraries that results depend on, none of which is imported."""
    from importlib import metadata

    import jaxserve

    found = []
    for name in ("jax", "jaxlib", "flax", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return f"jaxserve {jaxserve.__version__} (Python {sys.version.split()[0]}, {', '.join(found)})"


if __name__ == "__main__":
    main()
