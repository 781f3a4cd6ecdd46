"""`jaxserve serve` of several processes, as a user starts it: a chat over HTTP, and what clients see when a host is lost."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests import alphabet_model

ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
FLAGS = ("--dtype=float32", "--max-model-len=128", "--max-num-seqs=4", "--max-num-batched-tokens=16", "--num-pages=128")
FLAGS += ("--page-size=8", "--warm-up=all", "--no-enable-prefix-caching")
PLAN = {"format": "jaxserve-bucket-plan-1", "decode": [], "mixed": [[16, 4]], "head_rows": [4]}
IN_TIME = 15.0  # seconds from a loss until every request has its answer or its error
ENDED_IN = 30.0  # and until the processes have ended, on a machine that has much else to do


@dataclass
class Group:
    """The processes of one server. logs: what each has said, as a file."""

    url: str
    processes: list[subprocess.Popen]
    logs: list[Path]

    def said(self) -> str:
        return "\n".join(f"-- host {i}\n{log.read_text()[-3000:]}" for i, log in enumerate(self.logs))


def free_ports(num: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(num)]


@contextlib.contextmanager
def group(folder: Path, num_hosts: int) -> Iterator[Group]:
    """A server whose engine has a device of each of its processes, once it is healthy."""
    port, meeting = free_ports(2)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    plan = folder / "plan.json"
    plan.write_text(json.dumps(PLAN))
    common = [sys.executable, "-m", "jaxserve", "serve", str(alphabet_model.save(folder / "model")), *FLAGS]
    common += [f"--bucket-plan={plan}", f"--tensor-parallel-size={num_hosts}", f"--port={port}", "--served-model-name=alphabet"]
    common += [f"--num-hosts={num_hosts}", f"--coordinator=127.0.0.1:{meeting}"]
    found = Group(f"http://127.0.0.1:{port}", [], [folder / f"host{i}.log" for i in range(num_hosts)])
    try:
        for i, log in enumerate(found.logs):
            with log.open("w") as file:
                command = [*common, f"--host-id={i}"]
                found.processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + 240
        while not is_healthy(found.url):
            assert all(process.poll() is None for process in found.processes) and time.monotonic() < deadline, found.said()
            time.sleep(0.2)
        yield found
    finally:
        for process in found.processes:
            process.kill()
            process.wait()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


class Clients:
    """Threads that ask one chat after the other until one is not answered as it should be. ends: (when, what came) of each."""

    def __init__(self, url: str, num: int):
        self.num_answers = 0
        self.ends: list[tuple[float, str]] = []
        self._url = url
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while True:
                try:
                    answer = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 24, "ignore_eos": True})
                except httpx.TransportError as error:
                    what = repr(error)
                else:
                    what = answer.text
                    if answer.status_code == 200:
                        assert answer.json()["choices"][0]["message"]["content"] == alphabet_model.after("A", 24)
                        self.num_answers += 1
                        continue
                self.ends.append((time.monotonic(), what))
                return

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_hosts", "victim", "number"),
    [
        pytest.param(2, 1, signal.SIGKILL, marks=pytest.mark.exhaustive),
        (2, 0, signal.SIGKILL),
        (2, 0, signal.SIGSTOP),
        (4, 2, signal.SIGKILL),
        pytest.param(4, 3, signal.SIGSTOP, marks=pytest.mark.exhaustive),
    ],
    ids=lambda x: x.name if isinstance(x, signal.Signals) else str(x),
)
def test_a_server_of_several_hosts_and_the_loss_of_one(num_hosts, victim, number, tmp_path):
    """It answers as one process does. When a host is lost every request has ended in time, /health is red where host 0 lives, and
    all others end with the code that names the lost one."""
    with group(tmp_path, num_hosts) as found:
        answer = httpx.post(f"{found.url}/v1/chat/completions", json=CHAT | {"max_tokens": 4}, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == "BCDE", answer.text
        clients = Clients(found.url, 6)  # of which the engine runs four
        while clients.num_answers < 12:
            assert not clients.ends, found.said()
            time.sleep(0.05)
        os.kill(found.processes[victim].pid, number)
        lost_at = time.monotonic()
        clients.wait(IN_TIME)
        assert len(clients.ends) == 6 and max(when for when, _ in clients.ends) - lost_at < IN_TIME, found.said()
        if victim:
            why = "has ended" if number == signal.SIGKILL else "was not heard for 8 s"
            assert all(f"host {victim} {why}" in what for _, what in clients.ends), clients.ends
            red = httpx.get(f"{found.url}/health", timeout=5)
            assert red.status_code == 503 and f"host {victim}" in red.text
        elif number == signal.SIGSTOP:
            assert found.processes[0].wait(ENDED_IN) == -signal.SIGKILL and "stood still for 8 s" in found.said(), found.said()
        for i, process in enumerate(found.processes):
            if i != victim:
                assert process.wait(ENDED_IN) == 100 + victim, found.said()
