"""Tries our kernels on this machine's GPU, each against a reference and twice for equal bits, and keeps the verdict.

    jaxserve qualify
    jaxserve qualify --again --json
    jaxserve qualify --model=FOLDER --page_size=32

An engine does the same on its first start on a card, driver, JAX or revision of the kernels, for the kernels that it needs and with
its model's shapes. This command tries all that the card can run; with --model also with that model's shapes, so that its engine
finds a record. Of a model the config alone is read. What failed is left out by "auto" from then on: --again tries it anew. Verdicts
lie in the folder "qualification" of jaxserve's cache folder. Exits with 1 if a kernel failed or could not be tried. On a machine
without a GPU there is nothing to try: the kernels that run there are XLA's.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from absl import flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_option, refuse_flags
from jaxserve.config import options

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder or id, or a GGUF file, whose shapes are tried too.")
_OF_MODEL = ("dtype", "page_size", "speculative_config")  # what else an engine's shapes depend on
for _name in _OF_MODEL:
    define_option(_name, options()[_name][0].default)
_AGAIN = flags.DEFINE_bool("again", False, "Try what this card has tried before, too.")
_JSON = flags.DEFINE_bool("json", False, "Print the verdict as JSON.")


def model_asked() -> tuple[Any, str, Any, Any] | None:
    """(ModelConfig, dtype, EngineConfig, ModelConfig of what drafts if that attends) of --model; None where it is not given.

    Raises ValueError, NotImplementedError or OSError for what can't be read or used.
    """
    if _MODEL.value is None:
        refuse_flags("of a model's shapes: give --model", *_OF_MODEL)
        return None
    from jaxserve.config import EngineConfig
    from jaxserve.engine.drafting import attention_config, find_draft
    from jaxserve.models.files import find_model

    given: dict[str, Any] = {name: flags.FLAGS[name].value for name in _OF_MODEL}
    config = EngineConfig(**given)
    files = find_model(_MODEL.value)
    draft = attention_config(find_draft(config, files.config))
    return files.config, files.dtype(config.dtype), config, draft


def plan_of(asked: tuple[Any, str, Any, Any] | None, platform: str) -> Any:
    """All kernels, on the batches that every card is asked and those of the model. ValueError as `check_options`."""
    from kernels.qualification.plan import TABLES, Ask, Plan

    if asked is None:
        return Plan({kernel: Ask() for kernel in TABLES}, platform=platform, every=True)
    from jaxserve.engine.kernel_choice import kernel_plan
    from jaxserve.engine.resolution import check_options

    model, dtype, config, draft = asked
    check_options(config, model, dtype, platform)
    return dataclasses.replace(kernel_plan(model, dtype, config, platform, draft), every=True)


def main() -> int:
    from jaxserve.qualification.card import find_card
    from jaxserve.qualification.qualify import qualify
    from kernels.qualification.plan import NOT_MEANT, PASSED

    with refuse_bad_input():
        asked = model_asked()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # where JAX must be asked, it leaves the memory alone
    card = find_card(ask_jax=False) or find_card(ask_jax=True)
    if card is None:
        nothing = "JAX uses no GPU here: nothing to qualify, XLA's kernels run"
        print(json.dumps({"card": None, "reason": nothing}) if _JSON.value else nothing)
        return 0
    with refuse_bad_input():
        plan = plan_of(asked, card.platform)
    found = qualify(card, plan, again=_AGAIN.value)
    if _JSON.value:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        print(f"{card}, kernels {card.kernels}: {found.record.seconds:g} s, {found.record.date}")
        print("\n".join(f"  {verdict}, {verdict.seconds:g} s" for verdict in found.verdicts))
    return int(any(verdict.result not in (PASSED, NOT_MEANT) for verdict in found.verdicts))


if __name__ == "__main__":
    run_command(main)
