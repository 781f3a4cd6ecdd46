"""Tries the units of a plan on this process's device, and reports each as a line of JSON on stdout.

    python -m kernels.qualification "$PLAN"

PLAN is `plan.Plan.to_json`. Lines: {"begin": unit}, {"case": name}, {"unit": name, "verdict": {...}}, and {"end": device} after the
last. What anything else prints goes to stderr. It ends when its stdin does, since then nobody listens; and after an error of a
kernel, which may leave the device's context broken: whoever started it starts another for the rest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from typing import Any


def main() -> int:
    """0 after the last unit, or where the rest is for another process; 1 without the device that the plan is for."""
    with os.fdopen(os.dup(1), "w") as report:
        os.dup2(2, 1)
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        return _try_all(sys.argv[1], lambda **line: print(json.dumps(line), file=report, flush=True))


def _try_all(text: str, say: Any) -> int:
    import jax

    from kernels.qualification.checks import run_unit
    from kernels.qualification.plan import ERROR, Plan

    plan, verdicts = Plan.from_json(text)
    device = jax.local_devices()[0]
    if plan.platform == "gpu" and device.platform != "gpu" and not plan.interpreted:
        print(f"JAX has no GPU here, its device is {device}", file=sys.stderr)
        return 1
    while (unit := plan.next_unit(verdicts)) is not None:
        say(begin=unit.name)
        verdicts[unit.name] = verdict = run_unit(plan, unit, lambda name: say(case=name))
        say(unit=unit.name, verdict=dataclasses.asdict(verdict))
        if verdict.result == ERROR:
            return 0
    say(end=device.device_kind)
    return 0


def _end_with_stdin() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock a thread at the process's end would hold
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
