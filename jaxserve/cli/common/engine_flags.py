"""The flags of every script that makes an engine, and the one place that turns them into options of `jaxserve.LLM`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import group
from jaxserve.config import Count, Measure, Option, Switch, options

_NAMES: list[str] = []
_LAYOUT = ("tensor_parallel_size", "pipeline_parallel_size", "attention_groups")


def define_engine_flags(*, model: str | None = None, **defaults: Any) -> None:
    """Defines --model (required unless a default is given), --config, and a flag for each field of EngineConfig's table.

    defaults: of options, in the place of the table's.
    """
    flags.DEFINE_string("model", model, "A Hugging Face folder or id, or a GGUF file.", required=model is None)
    flags.DEFINE_string(
        "config", None, "A JSON file of engine options, such as `jaxserve autotune` writes; flags given win over it."
    )
    group("The model and its options", ("model", "config"))
    for name, (field, option) in options().items():
        define_option(name, defaults.get(name, field.default))
        group(option.group, (name,))
        _NAMES.append(name)


def define_option(name: str, default: Any, text: str = "") -> flags.FlagHolder[Any]:
    """The flag of a row of EngineConfig's table: of the row's kind, with its choices and range.

    default: None is unset, where the row may be. text: of the help, in the row's place.
    """
    option = options()[name][1]
    text = text or option.help + (f" Unset: {option.unset}." if default is None and option.unset else "")
    match option:
        case Switch():
            flag: flags.FlagHolder[Any] = flags.DEFINE_bool(name, default, text)
        case Count():
            flag = flags.DEFINE_integer(name, default, text)
        case Measure():
            flag = flags.DEFINE_float(name, default, text)
        case Option(choices=choices) if choices:
            flag = flags.DEFINE_enum(name, default, choices, text)
        case _:
            flag = flags.DEFINE_string(name, default, text)

    def in_range(value: Any) -> bool:
        """The row's own check; a flag that is not given is unset."""
        try:
            if value is not None:
                option.check(name, value)
        except ValueError as error:
            why = str(error).removeprefix(f"{name}={value!r} ").removesuffix(", or None")
            raise flags.ValidationError(why) from None
        return True

    flags.register_validator(flag, in_range)
    return flag


def define_layout_flags() -> None:
    """Flags of the options that say how an engine lies on several devices, for a script that chooses the others itself."""
    for name in _LAYOUT:
        field, option = options()[name]
        define_option(name, field.default)
        group(option.group, (name,))


def layout_options() -> dict[str, Any]:
    """The options that these flags give, for EngineConfig."""
    return {name: flags.FLAGS[name].value for name in _LAYOUT}


def layout_arguments() -> list[str]:
    """The same as arguments of `jaxserve serve`."""
    return [f"--{name}={value}" for name, value in layout_options().items()]


def engine_flags() -> tuple[str, ...]:
    """Names of the flags that engine_options() reads: all that `define_engine_flags` defined but --model and --config."""
    return tuple(_NAMES)


def engine_options() -> dict[str, Any]:
    """The options that the flags give, for `jaxserve.LLM(model, **options)`: a flag's own value, then --config's, then the flag's
    default. ValueError if the file is not an object of engine options."""
    options, chosen = {name: flags.FLAGS[name].value for name in _NAMES}, _options_of_file()
    return options | {name: value for name, value in chosen.items() if name not in _NAMES or not flags.FLAGS[name].present}


def _options_of_file() -> dict[str, Any]:
    """What --config's file says."""
    path = flags.FLAGS.config
    if path is None:
        return {}
    try:
        chosen = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--config={path} cannot be read: {error}") from None
    known = set(options())
    unknown = sorted(set(chosen) - known) if isinstance(chosen, dict) else [f"a {type(chosen).__name__}"]
    if unknown:
        listed = ", ".join(sorted(known))
        raise ValueError(f"--config={path} must be a JSON object of engine options, found {', '.join(unknown)}; they are {listed}")
    return chosen


def refuse_flags(why: str, *names: str) -> None:
    """UsageError naming those of the flags that were given, none of which this run would read."""
    given = [f"--{name}" for name in names if flags.FLAGS[name].present]
    if given:
        raise app.UsageError(f"{', '.join(given)}: {why}")


def refuse_options(why: str, *names: str) -> None:
    """ValueError naming those of the engine options that a flag or --config gives, none of which this run would read."""
    chosen = _options_of_file()
    given = [f"--{name}" for name in names if name in flags.FLAGS and flags.FLAGS[name].present]
    given += [f"{name} of --config" for name in names if chosen.get(name) is not None and f"--{name}" not in given]
    if given:
        raise ValueError(f"{', '.join(given)}: {why}")
