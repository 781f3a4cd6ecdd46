"""A server of our own beside a script, for clients that speak HTTP: `scripts.serve` on a free port while a `with` lasts."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 600  # it compiles all of its programs first


@contextlib.contextmanager
def local_server(model: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Yields (URL, process id) once the server takes requests. flags: `scripts.serve`'s, as "--name=value".

    Raises RuntimeError if it ends before, or takes longer than START_SECONDS; what it said is on stderr.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "scripts.serve", f"--model={model}", f"--port={port}", "--noaccess_log", *flags]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(process: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} before it took requests")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server took no requests within {START_SECONDS} s")
