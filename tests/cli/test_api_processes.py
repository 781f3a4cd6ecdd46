"""`jaxserve serve --api_server_count=2` as its users meet it: answers, counts, lost processes, ends."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests import alphabet_model
from tests.alphabet_model import after

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
OPTIONS = ["--max_num_seqs=4", "--max_model_len=4096", "--num_pages=600", "--page_size=16", "--max_num_batched_tokens=64"]


class Started:
    """A server's processes, and a client that opens a connection for each request."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path):
        self.process, self.url, self.log = process, url, log

    def wait_ready(self, count: int) -> None:
        """Until so many of its processes have begun to serve."""

        def ready() -> bool:
            assert self.process.poll() is None, "the server did not start"
            return self.log.read_text().count("Application startup complete") == count

        until(ready, 300)

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"temperature": 0} | body, timeout=60, headers={"X-Request-Id": "same"})

    def number(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(None, 1)[1]) for line in lines if line.startswith(f"jaxserve:{name}"))

    @contextlib.contextmanager
    def stream(self, max_tokens: int = 4000) -> Iterator[Iterator[str]]:
        body = {"prompt": "a", "temperature": 0, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            yield response.iter_lines()


def until[T](done: Callable[[], T], seconds: float = 60) -> T:
    deadline = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def started(tmp_path_factory) -> Iterator[Started]:
    """In a folder that has a module of a name that the processes import."""
    folder = alphabet_model.save(tmp_path_factory.mktemp("alphabet"), max_position_embeddings=8192)
    (folder / "uvicorn.py").write_text("raise ImportError('of the folder that the server was started in')")
    command = [sys.executable, "-P", "-m", "jaxserve.cli.serve", f"--model={folder}", "--port=0", "--api-server-count=2"]
    command += [*OPTIONS, "--grace=20", "--compilation_cache_dir="]
    with open(folder / "log", "w") as log:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=folder, env=env, stderr=log)
    made = Started(process, "", folder / "log")
    try:
        made.wait_ready(2)
        (made.url,) = until(lambda: re.findall(r"Uvicorn running on (http://127\.0\.0\.1:\d+) ", made.log.read_text()))
        yield made
    finally:
        print(made.log.read_text(), file=sys.stderr)
        children = made.children() if process.poll() is None else []
        process.kill()
        process.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_two_processes_serve_one_engine(started):
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda i: started.post("/v1/completions", prompt=chr(97 + i % 8), max_tokens=1 + i % 9), range(48))
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [after(chr(97 + i % 8), 1 + i % 9) for i in range(48)]
    said = [{"role": "user", "content": "q"}]
    chat = started.post("/v1/chat/completions", messages=said, max_tokens=3).json()
    message = started.post("/v1/messages", model=chat["model"], messages=said, max_tokens=3).json()
    assert chat["choices"][0]["message"]["content"] == message["content"][0]["text"] == "BCD"
    assert started.number("request_success_total") == 50, "both processes' requests, whichever is asked"
    assert started.number('http_requests_total{path="/v1/completions",status="200"}') == 48
    response = started.post("/v1/responses", input="q", max_output_tokens=3).json()
    assert response["output"][0]["content"][0]["text"] == "BCD" and response["store"] is False
    for path in ("/v1/responses/r/cancel", "/inference/v1/abort_requests"):
        refused = started.post(path)
        assert refused.status_code == 501 and "--api_server_count=1" in refused.json()["error"]["message"]

    for stopped in started.children():  # each of them serves where the other does not
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert started.post("/v1/completions", prompt="a", max_tokens=2).json()["choices"][0]["text"] == "bc"
        finally:
            os.kill(stopped, signal.SIGCONT)

    with started.stream() as lines:
        next(lines)
        until(lambda: started.number("num_requests_running") == 1)
        assert httpx.get(f"{started.url}/load").json()["server_load"] == 1
    until(lambda: started.number('request_success_total{finished_reason="abort"') == 1)

    with started.stream(200) as lines:
        next(lines)
        started.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]", "what runs is let finish"
    assert started.process.wait(60) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{started.url}/health")


def test_lost_processes(started):
    before = started.children()
    with contextlib.ExitStack() as stack:
        streams = []
        for stopped, length in zip(reversed(before), (4000, 600), strict=True):  # each of them has a stream, while the other rests
            os.kill(stopped, signal.SIGSTOP)
            try:
                streams.append(stack.enter_context(started.stream(length)))
                next(streams[-1])
            finally:
                os.kill(stopped, signal.SIGCONT)
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(streams[0])
        assert [line for line in streams[1] if line][-1] == "data: [DONE]", "a stream is lost with its own process alone"

    replacement = until(lambda: set(started.children()) - set(before)).pop()
    os.kill(replacement, signal.SIGKILL)  # before it serves
    started.wait_ready(3)
    assert "before it served; the next one starts in 1 s" in started.log.read_text()
    os.kill(before[1], signal.SIGKILL)
    started.wait_ready(4)
    assert len(started.children()) == 2 and not set(started.children()) & {*before, replacement}
    assert started.post("/v1/completions", prompt="a", max_tokens=2).json()["choices"][0]["text"] == "bc"
    assert started.number("num_requests_running") == 0 and started.number('request_success_total{finished_reason="abort"') == 1

    children = started.children()
    with started.stream() as lines:
        next(lines)
        started.process.kill()
        assert any("the engine's process has ended" in line for line in lines), "an error event"
    until(lambda: not any(map(is_running, children)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--enable_control", "--api_key=k"], "enable_control: not with several API processes"),
        (["--response_store=store.db"], "response_store: not with several API processes"),
        (["--ray"], "on Ray give --replicas"),
    ],
)
def test_what_needs_one_process_is_refused_at_once(flags, said):
    command = [sys.executable, "-m", "jaxserve.cli.serve", "--model=nowhere", "--api_server_count=2", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_said_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "jaxserve.cli.serve", "--model=nowhere", f"--port={port}", "--api_server_count=2"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and f"can't listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr
