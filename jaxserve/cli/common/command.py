"""How every command starts: its arguments parsed, its help, its logging, and one line about a mistake in what was asked for.

Owns `run_command`. Imports absl alone, so that a command's --help is quick and a peer's Python without our dependencies can use it.
"""

from __future__ import annotations

import difflib
import gc
import inspect
import logging
import os
import re
import select
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from absl import app, flags

from jaxserve.cli.common.vllm_flags import VALUES, AcceptedAsIs, Refused, translate

MISSPELT = 2  # exit code of an unknown command or flag; 1 is any other failure
READER_LEFT = 141  # as a shell says it of a process that SIGPIPE ended
_HELP = ("-h", "-?", "--help", "--helpfull", "--helpshort")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TITLES = {  # of flags that a module of common/ defines, by the module's name
    "http_server": "Where to listen",
    "workload_flags": "The workload",
    "traffic_flags": "The workload",
    "simulated_machine": "Planning",
}
_EXTRAS = {  # a package that an optional extra brings -> the extra
    **dict.fromkeys(
        ("aiohttp", "fastapi", "msgspec", "prometheus_client", "pydantic", "rich", "starlette", "uvicorn", "yaml"), "serve"
    ),
    "matplotlib": "plots",
    "torch": "verify",
    **dict.fromkeys(("pyarrow", "ray"), "ray"),
}
_groups: dict[str, str] = {}  # flag -> title, of flags that are no module's own


class Misspelt(ValueError):
    """A flag that a command does not have."""


def group(title: str, names: Sequence[str]) -> None:
    """Shows flags under a title of their own in --help."""
    _groups.update(dict.fromkeys(names, title))


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Who reads stdout may stop reading (`jaxserve simulate | head`): the process then ends without a word, with READER_LEFT."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes as it ends
        sys.exit(READER_LEFT)


def _has_lost_its_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)  # an error is told without being asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))


@reader_may_leave()
def run_command(main: Callable[[], Any], *, name: str | None = None) -> NoReturn:
    """Runs a command: parses sys.argv, calls `main`, and exits with its exit code.

    Dashes and underscores in a flag's name are one. The first argument that is no flag is --model, where there is such a flag.
    vLLM's names stand for ours. --help exits with 0, a misspelt flag with 2, a `UsageError` of main's and a bad value with 1.

    Args:
      main: of the command's module, whose docstring is the command's help.
      name: what the user calls the command; by default `python -m MODULE`, or `jaxserve ...` for a module of jaxserve.cli.
    """
    name = sys.argv[0] = name or _name_of(main)
    if asks_for_help(name, _before_dashes(sys.argv[1:])):
        print(help_text(name, inspect.cleandoc(inspect.unwrap(main).__globals__["__doc__"])))
        sys.exit(0)
    try:
        rest = parse(sys.argv)
    except Misspelt as error:
        fail(name, error, MISSPELT)
    except flags.Error as error:
        missing = r"^flag --(\w+)=None: Flag --\w+ must have a value other than None\.$"
        why = re.sub(missing, r"give --\1", str(error), flags=re.MULTILINE)
        fail(name, why.replace("\n", f"\n{name}: "), 1)
    if rest:
        fail(name, f"unknown arguments {rest}; `{name} --help` lists the flags, and a list is written with commas", 1)
    set_up_logging()
    try:
        sys.exit(main())
    except app.UsageError as error:
        fail(name, error, 1)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        fail(name, f"needs {missing}: pip install 'jaxserve[{_EXTRAS[missing]}]'", 1)


@contextmanager
def refuse_bad_input() -> Iterator[None]:
    """What was given and cannot be used becomes a UsageError, so that the command ends with one line. A context, or a decorator.

    It stands where a command reads what the user gave, and a ValueError, NotImplementedError or OSError says what is wrong with it.
    """
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        raise app.UsageError(str(error)) from error


@contextmanager
def without_collecting() -> Iterator[None]:
    """Python's garbage collector rests in here, and what was made in here it never looks at again.

    It stands around importing and making an engine or a server. There are 390,000 objects then, and every full collection
    would look at them all: a pause of 0.2 s. The one at the end lets go of what is garbage by then, 2% of them: no weight is to
    hang in that.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def complain(why: object) -> None:
    """A line on stderr under the running command's name; the command goes on."""
    print(f"{sys.argv[0]}: {why}", file=sys.stderr)


def _name_of(main: Callable[[], Any]) -> str:
    spec = inspect.unwrap(main).__globals__.get("__spec__")
    module = spec.name if spec else sys.argv[0]
    ours = module.removeprefix("jaxserve.cli.")
    return f"python -m {module}" if ours == module else "jaxserve " + ours.replace(".", " ")


def fail(name: str, why: object, code: int) -> NoReturn:
    """Ends the process with one line on stderr."""
    print(f"{name}: {why}", file=sys.stderr)
    sys.exit(code)


def asks_for_help(name: str, args: Sequence[str]) -> bool:
    """Whether --help is among the arguments of a command. Ends the process where --help has a value."""
    for arg in args:
        flag, has_value, _ = arg.partition("=")
        if flag in _HELP:
            if has_value:
                fail(name, f"{arg}: {flag} takes no value", MISSPELT)
            return True
    return False


def set_up_logging() -> None:
    """Our own INFO lines and everybody's warnings to stderr."""
    logging.basicConfig(level=logging.WARNING, format=_LOG_FORMAT)
    logging.getLogger("jaxserve").setLevel(logging.INFO)


def _before_dashes(args: Sequence[str]) -> Sequence[str]:
    return args[: args.index("--")] if "--" in args else args


def parse(argv: Sequence[str], known: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Sets the flags from a command line; the arguments that are none.

    Raises:
      Misspelt: a flag that there is not, with the nearest one; or vLLM's, with what to use instead.
      flags.Error: a value that a flag does not take, or a flag that is missing.
    """
    given, rest = normalise(argv[1:], known)
    if rest and "model" in known and not any(flag.startswith("--model=") for flag in given):
        given.append(f"--model={rest.pop(0)}")
    known([argv[0], *given])
    return rest


def normalise(args: Sequence[str], known: flags.FlagValues) -> tuple[list[str], list[str]]:
    """(flags as --name=value with our names, all other arguments)."""
    given: list[str] = []
    rest: list[str] = []
    ahead = list(args)
    while ahead:
        arg = ahead.pop(0)
        if arg == "--":
            return given, rest + ahead
        if not re.match(r"--?[A-Za-z]", arg):
            rest.append(arg)
            continue
        written, has_value, value = arg.partition("=")
        name = written.lstrip("-").replace("-", "_")
        try:
            name = translate(name, known)
        except AcceptedAsIs as accepted:
            if accepted.takes_value and not has_value:
                value = ahead.pop(0) if ahead else ""
            if accepted.values and value not in accepted.values:
                raise Misspelt(f"{written}={value}: {accepted.instead}") from None
            continue
        except Refused as refused:
            raise Misspelt(f"{written} is vLLM's: {refused}") from None
        if name not in known and not (name.startswith("no") and name[2:] in known and known[name[2:]].boolean):
            raise Misspelt(_unknown(written, name, known))
        if not has_value and name in known and not known[name].boolean:
            if not ahead:
                raise Misspelt(f"{written} needs a value")
            has_value, value = "=", ahead.pop(0)
        given.append(f"--{name}{has_value}{VALUES.get(name, {}).get(value, value)}")
    return given, rest


def _unknown(written: str, name: str, known: flags.FlagValues) -> str:
    shown = {flag for flag in known if flag not in _of_absl(known)}
    near = difflib.get_close_matches(name, shown, n=1, cutoff=0.7)
    return f"unknown flag {written}" + (f"; did you mean --{near[0]}?" if near else "; --help lists the flags")


def _of_absl(known: flags.FlagValues) -> set[str]:
    """Flags that absl defines itself: they work, and are no command's business."""
    by_module = known.flags_by_module_dict()
    return {flag.name for module, found in by_module.items() if module.startswith("absl.") for flag in found}


def help_text(name: str, doc: str, known: flags.FlagValues = flags.FLAGS) -> str:
    """Usage, the command's docstring, and its flags with their defaults, by title."""
    usage = f"usage: {name}" + (" MODEL" if "model" in known else "") + " [--flag=value ...]"
    titled: dict[str, list[Any]] = {"Flags": []}
    for module, found in known.flags_by_module_dict().items():
        if not module.startswith("absl."):
            for flag in found:
                title = _groups.get(flag.name) or _TITLES.get(module.rpartition(".")[2], "Flags")
                titled.setdefault(title, []).append(flag)
    parts = [usage, doc]
    for title, found in titled.items():
        lines = [line for flag in dict.fromkeys(found) for line in _flag_lines(flag)]
        if lines:
            parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts)


def _flag_lines(flag: Any) -> list[str]:
    """A flag with its values and default, and its help below."""
    choices = getattr(flag, "enum_values", None) or getattr(flag.parser, "enum_values", None)
    kind = "a,b,..." if isinstance(flag.parser, flags.ListParser) else flag.flag_type().removeprefix("multi ")
    values = "" if flag.boolean else "=" + ("|".join(choices) if choices else kind)
    unset = flag.default in (None, [], "")
    default = "" if unset else f" (default {','.join(flag.default) if isinstance(flag.default, list) else flag.default})"
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    text = flag.help.removeprefix(f"<{'|'.join(choices or ())}>: ").partition(";\n    repeat this option")[0]
    return [f"  {name}{values}{default}", *textwrap.wrap(text, 110, initial_indent="      ", subsequent_indent="      ")]
