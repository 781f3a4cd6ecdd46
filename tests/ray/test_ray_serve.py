"""Replicas on Ray itself: the API through its proxy, a replica that is killed, replicas that come and go. Needs `jaxserve[ray]`."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import openai
import pytest

from tests import alphabet_model
from tests.alphabet_model import after
from tests.routing.test_router_servers import free_port

pytest.importorskip("ray", reason="Ray is not installed: pip install 'jaxserve[ray]'")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENGINE = ("--page_size=4", "--num_pages=400", "--max_num_seqs=4", "--max_num_batched_tokens=32", "--dtype=float32")
REPLICA, FOLLOWER = "ray::ServeReplica:jaxserve:jaxserve", "ray::Follower"
BODY = {"model": "alphabet", "prompt": "a", "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return alphabet_model.save(tmp_path_factory.mktemp("alphabet"))


@contextlib.contextmanager
def fleet(folder: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """`jaxserve serve --ray`, until it is stopped as an operator would."""
    port = free_port()
    command = [sys.executable, "-m", "jaxserve", "serve", str(folder), "--ray", f"--port={port}", "--served_model_name=alphabet"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_DEDUP_LOGS": "0"}
    running = subprocess.Popen([*command, *ENGINE, *flags], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while not answers(url):
            assert running.poll() is None, running.communicate()[1]
            assert time.monotonic() < deadline, "the replicas did not start"
            time.sleep(0.2)
        yield url, running
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) == 0
    finally:
        running.kill()
        running.wait()
        assert running.stderr is not None
        running.stderr.close()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 1}, timeout=60).status_code == 200
    return False


@pytest.fixture(scope="module")
def two(folder) -> Iterator[str]:
    with fleet(folder, "--replicas=2") as (url, _):
        yield url


def replica_pids(others: Sequence[int] = ()) -> list[int]:
    """Processes of replicas on this machine, as Ray names them, but for `others`."""
    return sorted(set(pids_of(REPLICA)) - set(others))


def pids_of(name: str) -> list[int]:
    """Processes whose name begins so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(name.encode()):
                found.append(int(folder.name))
    return found


def test_openais_client_and_what_is_refused(two):
    client = openai.OpenAI(base_url=f"{two}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["alphabet"]
    assert client.completions.create(model="alphabet", prompt="a", max_tokens=20, temperature=0).choices[0].text == after("a", 20)
    stream = client.completions.create(model="alphabet", prompt="b", max_tokens=20, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == after("b", 20)
    chat = client.chat.completions.create(
        model="alphabet", messages=[{"role": "user", "content": "x"}], max_tokens=5, temperature=0
    )
    assert chat.choices[0].message.content == after("A", 5)
    refused = httpx.post(f"{two}/v1/completions", json=BODY | {"max_tokens": -1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    assert httpx.get(f"{two}/nothing").status_code == 404
    kept = httpx.post(f"{two}/v1/responses", json={"model": "alphabet", "input": "a"})
    assert kept.status_code == 501 and "--replicas=1" in kept.json()["error"]["message"]
    assert httpx.get(f"{two}/health").json()["status"] == "ok"
    assert "jaxserve:generation_tokens_total" in httpx.get(f"{two}/metrics").text


def test_a_stream_comes_as_it_is_made(two):
    """Chunk by chunk, and byte for byte as the server writes them."""
    with httpx.stream("POST", f"{two}/v1/completions", json=BODY | {"stream": True}, timeout=60) as answer:
        events = "".join(answer.iter_text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and len(events) == 22
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]] == list(after("a", 20))


async def load(url: str, num_streams: int, began: asyncio.Event) -> list[str]:
    """So many streams at once. What each came to: "whole", or how it failed. began: set when all have their first chunk."""
    num_begun = 0

    async def one(client: httpx.AsyncClient) -> str:
        nonlocal num_begun
        text, begun = "", False
        try:
            async with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 60, "prompt": "!", "stream": True}) as a:
                if a.status_code != 200:
                    return f"status {a.status_code}"
                async for line in a.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            return "error"
                        text += chunk["choices"][0]["text"]
                        num_begun += not begun
                        begun = True
                        if num_begun == num_streams // 4:
                            began.set()
        except httpx.TransportError as error:
            return f"broken: {type(error).__name__}"
        return "whole" if text == after("!", 60) else f"cut: {text!r}"

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(one(client) for _ in range(num_streams)))


def test_the_controller_that_is_killed_under_load(two):
    """It only watches: no stream is lost, requests are answered while it is away, and another one takes its place."""
    replicas, (controller,) = replica_pids(), pids_of("ray::ServeController")

    async def main() -> list[str]:
        began = asyncio.Event()
        loading = asyncio.create_task(load(two, 64, began))
        await asyncio.wait_for(began.wait(), 120)
        os.kill(controller, signal.SIGKILL)
        async with httpx.AsyncClient(base_url=two, timeout=60) as client:
            for _ in range(8):
                assert (await client.post("/v1/completions", json=BODY | {"max_tokens": 1})).status_code == 200
        return await loading

    assert asyncio.run(main()) == ["whole"] * 64
    deadline = time.monotonic() + 60
    while not pids_of("ray::ServeController"):
        assert time.monotonic() < deadline, "the controller is not started again"
        time.sleep(0.2)
    assert pids_of("ray::ServeController") != [controller] and replica_pids() == replicas


def test_a_replica_that_is_killed_under_load(two):
    """Its streams are lost and no others, and answers come again."""

    async def main() -> tuple[list[str], float]:
        began = asyncio.Event()
        loading = asyncio.create_task(load(two, 64, began))
        await asyncio.wait_for(began.wait(), 120)
        (victim, _) = replica_pids()
        os.kill(victim, signal.SIGKILL)
        killed, answered = time.monotonic(), 0
        async with httpx.AsyncClient(base_url=two, timeout=60) as client:
            while answered < 4:  # in a row
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.post("/v1/completions", json=BODY | {"max_tokens": 1})
                    answered = answered + 1 if answer.status_code == 200 else 0
                await asyncio.sleep(0.05)
        return await loading, time.monotonic() - killed

    ends, seconds = asyncio.run(main())
    print(f"answers again after {seconds:.1f} s; {ends.count('whole')} of {len(ends)} streams whole: {sorted(set(ends))}")
    assert ends.count("whole") >= 16, "streams of the other replica were lost"
    assert seconds < 60
    deadline = time.monotonic() + 120
    while len(replica_pids()) < 2:
        assert time.monotonic() < deadline, "the replica is not started again"
        time.sleep(0.5)


async def milestones(was: dict[str, int], others: set[int]) -> dict[str, float]:
    """Seconds from now until the process of each name was gone, and until there was a new one, `others` aside."""
    began, found = time.monotonic(), dict[str, float]()
    while len(found) < 2 * len(was):
        for name, pid in was.items():
            now = set(pids_of(name)) - others
            if pid not in now:
                found.setdefault(f"{name.removeprefix('ray::')} gone", time.monotonic() - began)
            if now - {pid}:
                found.setdefault(f"{name.removeprefix('ray::')} anew", time.monotonic() - began)
        await asyncio.sleep(0.1)
    return found


def test_a_replica_of_two_hosts_and_a_follower_that_is_killed(folder):
    """The replica leads and an actor follows, each with one of the engine's devices. Without the follower all begins anew."""
    others = replica_pids(), pids_of(FOLLOWER)
    with fleet(folder, "--hosts_per_replica=2", "--tensor_parallel_size=2") as (url, _):
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"] == after("a", 20)
        (leader,), (follower,) = replica_pids(others[0]), set(pids_of(FOLLOWER)) - set(others[1])

        async def main() -> tuple[list[str], float, dict[str, float]]:
            began = asyncio.Event()
            loading = asyncio.create_task(load(url, 4, began))
            await asyncio.wait_for(began.wait(), 120)
            os.kill(follower, signal.SIGKILL)
            killed = time.monotonic()
            seen = asyncio.create_task(milestones({REPLICA: leader, FOLLOWER: follower}, {*others[0], *others[1]}))
            ends = await loading
            assert time.monotonic() - killed < 100, "a client is left without an end of its stream"
            while not await asyncio.to_thread(answers, url):
                assert time.monotonic() - killed < 120, "the replica is not started again"
                await asyncio.sleep(0.2)
            return ends, time.monotonic() - killed, await asyncio.wait_for(seen, 10)

        ends, seconds, seen = asyncio.run(main())
        print(f"answers again after {seconds:.1f} s; {seen}; its streams: {sorted(set(ends))}")
        assert not any("Timeout" in end or end.startswith("cut") for end in ends), "a stream hangs, or ends as if it were whole"
        (again,), (new,) = replica_pids(others[0]), set(pids_of(FOLLOWER)) - set(others[1])
        assert again != leader and new != follower
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"] == after("a", 20)
    assert set(pids_of(FOLLOWER)) <= set(others[1]), "followers end with the fleet"


def test_replicas_come_and_go_without_a_failed_request(folder):
    """One, two under load, one again."""
    others = replica_pids()  # of the fleet above
    delays = ("--scale_up_seconds=1", "--scale_down_seconds=5")
    with fleet(folder, "--max_replicas=2", "--grace=60", *delays) as (url, _):
        assert len(replica_pids(others)) == 1
        ends: list[str] = []
        deadline = time.monotonic() + 240
        while len(replica_pids(others)) < 2:
            assert time.monotonic() < deadline, "no replica is added"
            ends += asyncio.run(load(url, 24, asyncio.Event()))
        deadline = time.monotonic() + 240
        while len(replica_pids(others)) > 1:
            assert time.monotonic() < deadline, "no replica is taken away"
            ends += asyncio.run(load(url, 1, asyncio.Event()))
        assert set(ends) == {"whole"} and len(ends) > 48


def test_what_a_cluster_does_not_have_is_one_line(folder):
    command = [sys.executable, "-m", "jaxserve", "serve", str(folder), "--ray", "--replicas=999"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("jaxserve serve: ")]
    assert done.returncode == 1 and "999 replicas of 1 CPU each need 999, and Ray's cluster has" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "model,flags,why",
    [
        ("/nowhere", (), "'/nowhere' is not a file or folder here"),
        (None, ("--port=PORT",), "can't listen on 127.0.0.1:PORT: Address already in use"),
        (None, ("--num_pages=3", "--max_model_len=64"), "num_pages=3"),  # which only the engine of a replica can say
    ],
)
def test_what_a_replica_could_not_start_with_is_one_line(folder, model, flags, why):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, free = str(taken.getsockname()[1]), free_port()
        given = [f"--port={free}", *(flag.replace("PORT", port) for flag in flags)]
        command = [sys.executable, "-m", "jaxserve", "serve", model or str(folder), "--ray", *given]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("jaxserve serve: ")]
    assert done.returncode == 1 and why.replace("PORT", port) in line and "Traceback" not in done.stderr


def test_serve_run_takes_our_builder(folder, tmp_path):
    """As a config file, which says where to listen; the arguments are those of a command line."""
    port = free_port()
    arguments = {"model": str(folder), "served_model_name": "alphabet", "gpus_per_replica": 0, "page_size": "4", "num_pages": 96}
    application = {"name": "a", "route_prefix": "/", "import_path": "jaxserve.ray:app", "args": arguments}
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    (tmp_path / "serve.yaml").write_text(json.dumps(config))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    command = [str(Path(sys.executable).with_name("serve")), "run", str(tmp_path / "serve.yaml")]
    with open(tmp_path / "log", "w") as log:
        running = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 240
        while not answers(f"http://127.0.0.1:{port}"):
            assert running.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.5)
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, timeout=60)
        assert answer.json()["choices"][0]["text"] == after("a", 20)
    finally:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
