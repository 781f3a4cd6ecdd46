"""How API processes are started, replaced and stopped, and the sockets that they share, without a server."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.common import api_processes
from jaxserve.cli.common.api_processes import Processes
from jaxserve.cli.common.listeners import bound, listen, say_where

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


class Fake:
    """A process, and its peer."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.is_ready: bool = False

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def connect(address: tuple[str, int]) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as client:
        client.connect(address)


def test_a_process_that_fails_is_tried_again_with_growing_waits(clock, caplog):
    made = list[Fake]()

    def start(i: int) -> Any:
        if i == 4:
            raise OSError("no memory")
        made.append(Fake())
        return made[-1], made[-1]

    processes = Processes(start, 2)
    assert processes.tend() and len(made) == 2 and not processes.has_served
    made[0].is_ready = made[1].is_ready = True
    assert processes.tend() and processes.has_served
    made[0].returncode = -9  # one that served is replaced at once
    assert processes.tend() and len(made) == 3
    made[2].returncode = -9
    assert processes.tend() and processes.tend() and len(made) == 3, "not at once"
    clock[0] += 1.1
    assert processes.tend() and len(made) == 3 and "could not be started: no memory" in caplog.text
    clock[0] += 1.1
    assert processes.tend() and len(made) == 3
    clock[0] += 1.1
    assert processes.tend() and len(made) == 4
    for _ in range(40):
        made[-1].returncode = 1
        assert processes.tend()
        clock[0] += 61
        assert processes.tend()
    assert "code 1 before it served; the next one starts in 60 s" in caplog.text
    made[-1].is_ready = True
    assert processes.tend() and len(processes.all()) == 2
    made[-1].returncode = 1
    assert processes.tend() and not made[-1].returncode, "it served: the next starts at once"


@pytest.mark.parametrize("at_start", [True, False])
def test_nothing_is_tried_again_where_none_has_ever_served(clock, at_start):
    def start(i: int) -> Any:
        if at_start:
            raise OSError("no memory")
        made = Fake()
        made.returncode = 1
        return made, made

    processes = Processes(start, 2)
    assert not (processes.tend() and processes.tend())


def test_all_processes_have_one_deadline(monkeypatch):
    monkeypatch.setattr(api_processes, "KILL_SECONDS", 0.4)
    processes = [subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        process.stdout.close()
    started = time.monotonic()
    api_processes._stop(processes, 0.0)
    assert time.monotonic() - started < 1.2 and all(process.returncode == -9 for process in processes)


def test_processes_find_the_modules_of_the_one_that_starts_them(monkeypatch, tmp_path):
    """Whatever their folder: -P leaves it out, and the path is given."""
    asked = list[Any]()

    class Attached:
        def attach(self, end: socket.socket) -> Any:
            end.close()
            return self

        pipe = type("Pipe", (), {"put": lambda self, message: None})()

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: asked.append((args, options)))
    monkeypatch.setattr(sys, "path", ["/of/the/source", *sys.path])
    api_processes._start(Attached(), None, [])  # type: ignore[arg-type]
    monkeypatch.undo()
    ((command,), options) = asked[0]
    show = [*command[: command.index("-c")], "-c", "import sys; print(*sys.path, sep='\\n')"]
    found = subprocess.run(show, env=options["env"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert found[0] == "/of/the/source" and str(tmp_path) not in found and str(Path(api_processes.__file__).parents[3]) in found


def test_every_address_of_a_host_is_bound_to_one_port(monkeypatch, caplog):
    addresses = [(socket.AF_INET6, "::1", (0, 0)), (socket.AF_INET, "127.0.0.1", ()), (socket.AF_INET, "192.0.2.1", ())]
    found = [(family, socket.SOCK_STREAM, 6, "", (host, 0, *rest)) for family, host, rest in addresses]
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        found = found[1:]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [*found, found[0]])
    with bound("localhost", 0, None) as listeners:
        port = listeners[0].getsockname()[1]
        names = [listener.getsockname()[:2] for listener in listeners]
        assert names == [(entry[4][0], port) for entry in found[:-1]], "not one that this machine has not, nor one twice"
        with pytest.raises(ConnectionRefusedError):
            connect(names[-1])
        listen(listeners)
        for name in names:
            connect(name)
        with caplog.at_level(logging.INFO, "jaxserve"):
            say_where(listeners)
        assert f"Uvicorn running on http://127.0.0.1:{port} (" in caplog.text
        with pytest.raises(OSError, match=f":{port}: Address already in use"), bound("localhost", port, None):
            pass
    assert all(listener.fileno() == -1 for listener in listeners)


def test_of_two_that_have_bound_one_listens():
    with bound("127.0.0.1", 0, None) as ours, bound("127.0.0.1", ours[0].getsockname()[1], None) as theirs:
        listen(theirs)
        with pytest.raises(OSError, match="can't listen on 127.0.0.1:.*: Address already in use"):
            listen(ours)


def test_a_unix_socket_is_of_whoever_may_open_it_and_goes_at_the_end(tmp_path, caplog):
    path = tmp_path / "socket"
    for _ in range(2):
        with contextlib.suppress(KeyError), bound("", 0, str(path)) as listeners, caplog.at_level(logging.INFO, "jaxserve"):
            listen(listeners)
            say_where(listeners)
            assert path.stat().st_mode & 0o777 == 0o666 and f"running on unix socket {path} (" in caplog.text
            raise KeyError
        assert not path.exists()
    path.write_text("not a socket")
    with pytest.raises(OSError, match=f"can't listen on {path}: Address already in use"), bound("", 0, str(path)):
        pass
    assert path.exists()
