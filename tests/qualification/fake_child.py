"""What tries kernels, without trying any. argv: a JSON object and the plan.

{"backend": behaviour, "backend own": of a model's shapes, "log": file, "pid": file, "start": behaviour, "slow": seconds}
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from kernels.qualification.plan import DIFFERS, ERROR, NO_MEMORY, NOT_MEANT, PASSED, UNCOMPILED, WRONG, Plan, Unit, Verdict
from tests.qualification import rows

SAID = {"pass": PASSED, "wrong": WRONG, "differ": DIFFERS, "uncompiled": UNCOMPILED, "error": ERROR, "memory": NO_MEMORY}
SAID["lacks"] = NOT_MEANT


def say(**line) -> None:
    print(json.dumps(line), flush=True)


def act(behaviour: str, options: dict, unit: Unit) -> None:
    """Ends the process, or hangs, or gives a verdict."""
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "grandchild":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(options["pid"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    if behaviour == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "exit":
        print("CUDA_ERROR_ILLEGAL_ADDRESS", file=sys.stderr)
        os._exit(3)
    verdict = {"kernel": unit.kernel, "backend": unit.backend, "result": SAID[behaviour], "reason": f"{behaviour} of a fake"}
    say(unit=unit.name, verdict=verdict | {"seconds": 0.01})


def main() -> None:
    options = json.loads(sys.argv[1])
    rows.install()
    plan, verdicts = Plan.from_json(sys.argv[2])
    with open(options["log"], "a") as log:  # of how often it was started
        log.write(f"{os.getpid()}\n")
    if options.get("start") == "hang":
        time.sleep(600)
    if options.get("start") == "exit":
        sys.exit("no device")
    time.sleep(options.get("slow", 0))
    print("noise of a library")
    while (unit := plan.next_unit(verdicts)) is not None:
        say(begin=unit.name)
        behaviour = options.get(f"{unit.backend} own" if unit.shapes else unit.backend, "pass")
        if behaviour == "hang at once":
            time.sleep(600)
        say(case="a batch")
        act(behaviour, options, unit)
        if behaviour == "error":
            sys.exit()
        verdicts[unit.name] = Verdict(unit.kernel, unit.backend, SAID[behaviour])
    say(end="fake")


if __name__ == "__main__":
    main()
