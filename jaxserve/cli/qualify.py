"""Tries our kernels on this machine's GPU, each against a reference and twice for equal bits, and keeps the verdict.

    jaxserve qualify
    jaxserve qualify --again --json

An engine does the same on its first start on a card, driver, JAX or revision of the kernels, for the kernels that it needs and with
its model's shapes. This command tries all that the card can run. What failed is left out by "auto" from then on: --again tries it
anew. Verdicts lie in the folder "qualification" of jaxserve's cache folder. Exits with 1 if a kernel failed or could not be tried.
On a machine without a GPU there is nothing to try: the kernels that run there are XLA's.
"""

from __future__ import annotations

import json
import os

from absl import flags

from jaxserve.cli.common.command import run_command

_AGAIN = flags.DEFINE_bool("again", False, "Try what this card has tried before, too.")
_JSON = flags.DEFINE_bool("json", False, "Print the verdict as JSON.")


def main() -> int:
    from jaxserve.qualification.card import find_card
    from jaxserve.qualification.qualify import qualify
    from kernels.qualification.plan import NOT_MEANT, PASSED, TABLES, Ask, Plan

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # where JAX must be asked, it leaves the memory alone
    card = find_card(ask_jax=False) or find_card(ask_jax=True)
    if card is None:
        nothing = "JAX uses no GPU here: nothing to qualify, XLA's kernels run"
        print(json.dumps({"card": None, "reason": nothing}) if _JSON.value else nothing)
        return 0
    plan = Plan({kernel: Ask() for kernel in TABLES}, platform=card.platform, every=True)
    found = qualify(card, plan, again=_AGAIN.value)
    if _JSON.value:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        print(f"{card}, kernels {card.kernels}: {found.record.seconds:g} s, {found.record.date}")
        print("\n".join(f"  {verdict}, {verdict.seconds:g} s" for verdict in found.verdicts))
    return int(any(verdict.result not in (PASSED, NOT_MEANT) for verdict in found.verdicts))


if __name__ == "__main__":
    run_command(main)
