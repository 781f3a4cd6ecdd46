"""The process that tries kernels, watched: a wrong barrier hangs, and a wrong address ends the process.

Owns its start, its limits of time and its end, that of everything it started included. After a unit that hung, crashed or left the
device in an unknown state, another process is started for the rest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels
from kernels.qualification.plan import CRASHED, HUNG, NOT_TRIED, Plan, Unit, Verdict

logger: logging.Logger = logging.getLogger("jaxserve")

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "kernels.qualification")  # the plan, as JSON, is its argument
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the system, or somebody, ended the process
MEMORY_FRACTION = ".2"  # of the device, at most


@dataclass(frozen=True)
class Limits:
    """Seconds. start: until the process tries its first unit, with imports and CUDA's start. batch: of a kernel, to compile, to run
    and to compare. whole: all processes together. ending: until one that is done, or was killed, is gone."""

    start: float = 90.0
    batch: float = 60.0
    whole: float = 300.0
    ending: float = 10.0


def environment() -> dict[str, str]:
    """Of the process: it takes memory as it needs it and a part of the device at most, since this process may hold the rest."""
    given = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    paths = [str(Path(kernels.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return given | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_CLIENT_MEM_FRACTION": MEMORY_FRACTION,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def watch(
    plan: Plan, known: Mapping[str, Verdict], *, command: Sequence[str] = COMMAND, limits: Limits = Limits()
) -> dict[str, Verdict]:
    """Verdicts on all units of the plan, those that are known included. Units that could not be tried are NOT_TRIED, with why."""
    verdicts, trouble, end = dict(known), "", time.monotonic() + limits.whole
    ours = {unit.name for unit in plan.all_units}  # a command line holds no more than it must
    while not trouble and plan.next_unit(verdicts) is not None:
        if time.monotonic() >= end:
            trouble = f"no time was left of {limits.whole:g} s"
            break
        count = len(verdicts)
        try:
            with _started(command, plan.to_json({name: v for name, v in verdicts.items() if name in ours}), limits) as child:
                trouble = _follow(child, plan, verdicts, limits, end)
        except OSError as error:
            trouble = f"the process that tries them could not be started: {error}"
        if not trouble and len(verdicts) == count:
            trouble = "the process that tries them ended without a verdict"
    while (unit := plan.next_unit(verdicts)) is not None:
        verdicts[unit.name] = Verdict(unit.kernel, unit.backend, NOT_TRIED, trouble)
    return verdicts


def _follow(child: _Child, plan: Plan, verdicts: dict[str, Verdict], limits: Limits, end: float) -> str:
    """Takes the verdicts of one process, until it ends or has to be ended. What kept it from trying anything; "" if nothing."""
    unit: Unit | None = None
    case, began = "", time.monotonic()
    until = min(end, began + limits.start)
    while True:
        try:
            line = child.read_line(until)
        except TimeoutError:
            seconds = time.monotonic() - began
            if unit is None:
                return f"the process that tries them did not begin within {seconds:.1f} s{child.last_words()}"
            if seconds < limits.batch:
                return f"no time was left of {limits.whole:g} s"
            verdicts[unit.name] = Verdict(unit.kernel, unit.backend, HUNG, f"{case}no end after {seconds:.1f} s", round(seconds, 2))
            return ""
        if line is None:
            how, words = child.ended(), child.last_words()
            if how in {_signal(number) for number in FROM_OUTSIDE}:
                return f"the process that tries them was ended from outside by {how}{words}"
            if unit is not None:
                seconds = round(time.monotonic() - began, 2)
                verdicts[unit.name] = Verdict(unit.kernel, unit.backend, CRASHED, f"{case}{how}{words}", seconds)
            return f"the process that tries them ended with {how}{words}" if unit is None and how != "status 0" else ""
        if "end" in line:
            return ""
        if "begin" in line:
            unit, case, began = plan.next_unit(verdicts), "", time.monotonic()
            until = min(end, began + limits.batch)
            if unit is None or unit.name != line["begin"]:
                return f"the process that tries them tries {line['begin']}, which nobody asked for"
        if "case" in line:
            case, began = f"{line['case']}: ", time.monotonic()
            until = min(end, began + limits.batch)
        if "verdict" in line and unit is not None:
            verdicts[unit.name] = Verdict(**line["verdict"])
            unit, began = None, time.monotonic()
            until = min(end, began + limits.start)


def _signal(number: int) -> str:
    """A signal's name, or its number where it has none (real-time signals)."""
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


class _Child:
    """A process in a group of its own, with its lines, and its last words on stderr."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Any, limits: Limits):
        assert process.stdout is not None
        self.process, self._errors, self._limits = process, errors, limits
        self._file = process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)
        self._read = b""

    def read_line(self, until: float) -> dict[str, Any] | None:
        """The next line that is a JSON object; None if there are no more. TimeoutError at `until`, of the monotonic clock."""
        while True:
            while b"\n" in self._read:
                line, _, self._read = self._read.partition(b"\n")
                with contextlib.suppress(ValueError):  # what is no JSON is not for us
                    found = json.loads(line)
                    if isinstance(found, dict):
                        return found
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            has_ended = self._has_ended()  # asked before its last words are read
            if not self._poll.poll(1e3 * min(left, 0.05)):
                if has_ended:  # something that it started holds its stdout open
                    return None
                continue
            text = os.read(self._file, 1 << 16)
            if not text:
                return None
            self._read += text

    def _has_ended(self) -> bool:
        """Without collecting it: until then its group's number is its own."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ended(self) -> str:
        """How the process ended, which has closed its stdout, in words."""
        end = time.monotonic() + self._limits.ending
        while not self._has_ended() and time.monotonic() < end:
            time.sleep(0.01)
        if not self._has_ended():
            return "a closed stdout"
        self.kill()
        code = self.process.returncode
        return _signal(-code) if code < 0 else f"status {code}"

    def kill(self) -> None:
        """Ends the process and all of its group, at once. One that the system can't end is left behind, with a warning."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(self._limits.ending)
        except subprocess.TimeoutExpired:
            logger.warning("process %d, which tried kernels, was killed and is not gone yet", self.process.pid)

    def last_words(self) -> str:
        """The last line that it wrote to stderr, behind a colon; "" if none."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4096))
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        return next((f": {line[:300]}" for line in reversed(lines) if line), "")


@contextlib.contextmanager
def _started(command: Sequence[str], plan: str, limits: Limits) -> Iterator[_Child]:
    """The process, which is gone afterwards, whatever happens here. Its stdin ends with this process."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, plan],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(),
            start_new_session=True,
        )
        child = _Child(process, errors, limits)
        try:
            yield child
        finally:
            child.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
