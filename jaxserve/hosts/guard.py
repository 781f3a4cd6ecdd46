"""A process that ends this one if it stands still: clients of a server that was stopped would wait for ever otherwise.

Owns the watching process and the pipe to it. Only another process can tell: whatever thread would look, stands still too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

# What the watching process runs: it imports nothing of ours and takes 0.02 s to start. Where it was stopped itself, with all others
# of this machine, it hears for one second more before it believes the silence.
_WATCH = """
import os, select, signal, sys
watched, silence = int(sys.argv[1]), float(sys.argv[2])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while select.select([0], [], [], silence)[0] or select.select([0], [], [], 1)[0]:
    if not os.read(0, 64):
        sys.exit(0)
what = f"jaxserve: process {watched} stood still for {silence:.0f} s and is ended, so that nobody waits for it"
print(what, file=sys.stderr, flush=True)
os.kill(watched, signal.SIGKILL)
"""


class Guard:
    """Kills this process when `beat` was not called for `silence` seconds (at most one more), until `close`. A process that has the
    number 1, as a container's first one without an init, can't be killed from inside: there this does nothing but say so."""

    def __init__(self, silence: float):
        command = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid()), str(silence)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a beat waits for nobody

    def beat(self) -> None:
        """This process lives. Does nothing after `close`, or where the watching process is gone."""
        if (pipe := self._process.stdin) is not None and not pipe.closed:
            with contextlib.suppress(OSError, ValueError):
                pipe.write(b".")

    def close(self) -> None:
        """Nobody watches from here on. More often than once does no harm."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
