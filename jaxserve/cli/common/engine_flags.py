"""The flags of every script that makes an engine, and the one place that turns them into options of `jaxserve.LLM`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.config import BACKENDS, MOE_BACKENDS, WARM_UPS, EngineConfig
from jaxserve.models.config import DTYPES
from jaxserve.scheduling.policies import BATCHING_POLICIES, ORDERS

_NAMES: list[str] = []


def _define(kind: Any, name: str, default: Any, text: str, **kwargs: Any) -> None:
    kind(name, default, help=text, **kwargs)
    _NAMES.append(name)


def define_engine_flags(*, model: str | None = None) -> None:
    """Defines --model (required unless a default is given) and a flag for each engine option worth one at a shell."""
    logging.getLogger("jax").setLevel(logging.WARNING)  # below that it names every backend that this machine lacks
    flags.DEFINE_string("model", model, "A Hugging Face folder or id, or a GGUF file.", required=model is None)
    flags.DEFINE_string(
        "config", None, "A JSON file of engine options, such as `jaxserve autotune` writes; flags given win over it."
    )
    _define(
        flags.DEFINE_enum,
        "dtype",
        "auto",
        "Of weights and activations; auto: the checkpoint's own.",
        enum_values=DTYPES,
    )
    _define(flags.DEFINE_integer, "max_model_len", None, "Most tokens of a request, prompt and output.", lower_bound=1)
    _define(flags.DEFINE_integer, "max_num_seqs", None, "Most sequences at once (default 128).", lower_bound=1)
    _define(flags.DEFINE_integer, "max_num_batched_tokens", None, "Token budget of a step (default 2048).", lower_bound=1)
    _define(flags.DEFINE_integer, "page_size", None, "Tokens a KV page (default 64).", lower_bound=1)
    _define(flags.DEFINE_integer, "num_pages", None, "KV pages of the pool; by default what fits.", lower_bound=1)
    _define(flags.DEFINE_float, "gpu_memory_utilization", 0.9, "Share of the device's memory to use.")
    _define(flags.DEFINE_bool, "enable_prefix_caching", True, "Share the KV pages of equal prefixes.")
    _define(
        flags.DEFINE_bool,
        "enable_chunked_prefill",
        None,
        "Split long prompts over steps; by default the policy's choice.",
    )
    _define(flags.DEFINE_enum, "batching_policy", "sarathi", "How a step is composed.", enum_values=tuple(BATCHING_POLICIES))
    _define(flags.DEFINE_enum, "scheduling_policy", "fcfs", "Who comes first.", enum_values=ORDERS)
    _define(flags.DEFINE_float, "tbt_slo_ms", None, "Dynamic budget: milliseconds that a step with decodes may take.")
    _define(flags.DEFINE_string, "step_times", None, "Dynamic budget: the JSON of `jaxserve tune profile` for this machine.")
    _define(flags.DEFINE_integer, "seed", 0, "Seeds requests that bring no seed.")
    _define(flags.DEFINE_string, "bucket_plan", None, "A bucket plan's JSON file.")
    _define(
        flags.DEFINE_enum,
        "warm_up",
        "first_use",
        "Compile all programs at start, or each at first use.",
        enum_values=WARM_UPS,
    )
    _define(flags.DEFINE_bool, "async_scheduling", True, "Schedule a step before the last one's tokens are back.")
    _define(flags.DEFINE_enum, "attention_backend", "auto", "Which attention kernel.", enum_values=BACKENDS)
    _define(flags.DEFINE_enum, "moe_backend", "auto", "Which grouped matmul, for experts.", enum_values=MOE_BACKENDS)
    _define(
        flags.DEFINE_string,
        "speculative_config",
        None,
        """Speculation, as JSON: '{"method": "ngram", "num_speculative_tokens": 4}'.""",
    )
    _define(flags.DEFINE_string, "demand_log", None, "Append each step's demand to this file, one JSON line a step.")


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
    known = {field.name for field in fields(EngineConfig)}
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


@contextmanager
def exit_on_bad_input(script: str) -> Iterator[None]:
    """What was given and cannot be used ends the script with status 1 and one line that says so. A context, or a decorator."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        sys.exit(f"{script}: {error}")
