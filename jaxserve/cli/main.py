"""The `jaxserve` command: which command a user means, and what there is.

Owns the table of commands. A command's own module is imported when it runs.
"""

from __future__ import annotations

import difflib
import importlib
import sys

from jaxserve.cli.common.command import MISSPELT, asks_for_help, fail, reader_may_leave, run_command

COMMANDS = {  # as a user says it -> a line; its module is that of jaxserve.cli with dots for spaces
    "serve": "Serve a model over HTTP with OpenAI's API.",
    "generate": "Generate completions of prompts, from flags or a file.",
    "run-batch": "Answer a file of requests in OpenAI's batch format.",
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
    "train-draft": "Train a head that drafts for a model.",
    "convert": "Convert between Hugging Face, GGUF and Orbax.",
    "verify": "Compare a model with transformers.",
    "qualify": "Try our kernels on this GPU, and keep the verdict.",
    "router": "Join several servers behind one address.",
    "top": "Watch a running server in the terminal.",
    "version": "Print jaxserve's version and those of what it stands on.",
}
FAMILIES = tuple(dict.fromkeys(name.partition(" ")[0] for name in COMMANDS if " " in name))  # first words of commands of two


@reader_may_leave()
def main() -> None:
    """Runs the command that sys.argv names. Exit codes as `run_command`'s; without a command or with --help, the list of them."""
    args = sys.argv[1:]
    if not args:
        print(commands_text(""))
        sys.exit(MISSPELT)
    if args[0] == "help":  # before what it is about, where others have --help behind it
        args = [*args[1:], "--help"]
    if asks_for_help("jaxserve", args[:1]):
        print(commands_text(""))
        sys.exit(0)
    name, rest = named(args)
    if name in FAMILIES:
        print(commands_text(name))
        sys.exit(0 if rest else MISSPELT)
    if name == "version":
        version(rest)
        return
    sys.argv = [f"jaxserve {name}", *rest]
    module = importlib.import_module("jaxserve.cli." + name.replace(" ", ".").replace("-", "_"))
    run_command(module.main, name=f"jaxserve {name}")


def named(args: list[str]) -> tuple[str, list[str]]:
    """(command, its arguments); of a family alone or with --help, the family. Ends the process where there is no such command."""
    name, rest = "version" if args[0] == "--version" else args[0], args[1:]
    if name in FAMILIES:
        if not rest or asks_for_help(f"jaxserve {name}", rest[:1]):
            return name, rest
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, *FAMILIES], n=1, cutoff=0.5)
        hint = f"did you mean `jaxserve {near[0]}`?" if near else "`jaxserve --help` lists them"
        fail("jaxserve", f"unknown command {name}; {hint}", MISSPELT)
    return name, rest


def version(rest: list[str]) -> None:
    """Prints our version, or the command's help. Ends the process where there are arguments, which it has none of."""
    if asks_for_help("jaxserve version", rest[:1]):
        print(f"usage: jaxserve version\n\n{COMMANDS['version']}")
    elif rest:
        fail("jaxserve version", f"unknown arguments {rest}; it takes none", 1)
    else:
        print(version_text())


def commands_text(family: str) -> str:
    """The commands, a line each; of a family or all."""
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
