"""Replicas on Ray itself: the API through its proxies, control calls, a replica that is killed, replicas that come and go.

Needs `jaxserve[ray]`.
"""

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
from typing import Any, NamedTuple

import httpx
import numpy as np
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
KEY = {"Authorization": "Bearer k"}
BODY = {"model": "alphabet", "prompt": "a", "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    template = "{% if tools %}<tool_call>{% endif %}" + alphabet_model.CHAT_TEMPLATE
    return alphabet_model.save(tmp_path_factory.mktemp("alphabet"), chat_template=template)


@contextlib.contextmanager
def fleet(folder: Path, *flags: str, **variables: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """`jaxserve serve --ray` with the key k, until it is stopped as an operator would. variables: of its environment."""
    port = free_port()
    command = [sys.executable, "-m", "jaxserve", "serve", str(folder), "--ray", f"--port={port}", "--served_model_name=alphabet"]
    command += ["--api_key=k", "--middleware=tests.ray.marks.Pid"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT), **variables}
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
        return ask(url, max_tokens=1).status_code == 200
    return False


def ask(url: str, **fields: Any) -> httpx.Response:
    """The answer to a completion."""
    return httpx.post(f"{url}/v1/completions", json=BODY | fields, headers=KEY, timeout=60)


@pytest.fixture(scope="module")
def two(folder) -> Iterator[str]:
    with fleet(folder, "--replicas=2", "--enable_control", "--max_waiting=100") as (url, _):
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
    client = openai.OpenAI(base_url=f"{two}/v1", api_key="k", max_retries=0)
    assert [model.id for model in client.models.list()] == ["alphabet"]
    assert client.completions.create(model="alphabet", prompt="a", max_tokens=20, temperature=0).choices[0].text == after("a", 20)
    stream = client.completions.create(model="alphabet", prompt="b", max_tokens=20, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == after("b", 20)
    chat = client.chat.completions.create(
        model="alphabet", messages=[{"role": "user", "content": "x"}], max_tokens=5, temperature=0
    )
    assert chat.choices[0].message.content == after("A", 5)
    refused = ask(two, max_tokens=-1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    assert httpx.get(f"{two}/nothing", headers=KEY).status_code == 404
    kept = {"model": "alphabet", "input": "a", "store": True}
    kept = httpx.post(f"{two}/v1/responses", json=kept, headers=KEY)
    assert kept.status_code == 501 and "--replicas=1" in kept.json()["error"]["message"]
    assert httpx.post(f"{two}/v1/completions", json=BODY).status_code == 401
    long = ask(two, prompt="a" * 2**20)
    assert long.status_code == 400 and "max_model_len" in long.json()["error"]["message"]
    assert httpx.get(f"{two}/health").json()["status"] == "ok"
    assert "jaxserve:generation_tokens_total" in httpx.get(f"{two}/metrics").text


def test_a_stream_comes_as_it_is_made(two):
    """Chunk by chunk, and byte for byte as the server writes them."""
    with httpx.stream("POST", f"{two}/v1/completions", json=BODY | {"stream": True}, headers=KEY, timeout=60) as answer:
        events = "".join(answer.iter_text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and len(events) == 22
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]] == list(after("a", 20))


def test_a_tool_is_called(two):
    tool = {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {"x": {"enum": ["ab"]}}}}
    tool["parameters"] |= {"required": ["x"], "additionalProperties": False}
    client = openai.OpenAI(base_url=f"{two}/v1", api_key="k", max_retries=0)
    asked: Any = {"model": "alphabet", "messages": [{"role": "user", "content": "x"}], "max_tokens": 150, "temperature": 0}
    asked |= {"tools": [{"type": "function", "function": tool}], "tool_choice": "required", "parallel_tool_calls": False}
    calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert calls is not None and len(calls) == 1
    call = calls[0]
    assert call.type == "function" and (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": "ab"})


def test_more_than_may_wait_is_refused(two):
    """A replica holds 4 + 100 samples, so that two requests of three come to one that has no room for both."""

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=two, headers=KEY, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=BODY | {"prompt": ["a"] * 60}) for _ in range(3)))

    found = asyncio.run(main())
    assert {answer.status_code for answer in found} == {200, 429}
    assert all("retry-after" in answer.headers for answer in found if answer.status_code == 429)


def metrics_of_replicas(url: str) -> dict[str, dict[str, float]]:
    """The metrics of both replicas: each answer is one of them's. Summed over labels other than a reason."""
    found: dict[str, dict[str, float]] = {}
    deadline = time.monotonic() + 60
    while len(found) < 2:
        assert time.monotonic() < deadline, "one replica alone answers"
        answer = httpx.get(f"{url}/metrics", timeout=60)
        lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
        values = {line.rpartition(" ")[0].replace('model_name="alphabet",', ""): float(line.rpartition(" ")[2]) for line in lines}
        found[answer.headers["x-pid"]] = values
    return found


def summed(found: dict[str, dict[str, float]], *names: str) -> float:
    return sum(value for values in found.values() for key, value in values.items() if all(name in key for name in names))


def test_what_clients_had_that_leave_is_free(two):
    """Ray's proxy tells a replica that its client is gone: the request ends with what it has, and no page is held."""

    async def leave(client: httpx.AsyncClient) -> None:
        asked = BODY | {"prompt": "!", "max_tokens": 220, "stream": True}
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    return

    async def all_leave() -> None:
        async with httpx.AsyncClient(base_url=two, headers=KEY, timeout=60) as client:
            await asyncio.gather(*(leave(client) for _ in range(8)))

    aborted = "request_success_total", 'finished_reason="abort"'
    before = summed(metrics_of_replicas(two), *aborted)
    asyncio.run(all_leave())
    deadline = time.monotonic() + 60
    while True:
        found = metrics_of_replicas(two)
        held = summed(found, "num_requests_running"), summed(found, "num_requests_waiting"), summed(found, "kv_cache_usage_perc")
        if held == (0, 0, 0) and summed(found, *aborted) == before + 8:
            break
        assert time.monotonic() < deadline, (held, summed(found, *aborted) - before)
        time.sleep(0.1)


def all_said(answer: httpx.Response, status: int = 200) -> list[Any]:
    """What each replica said, where all were of one mind."""
    assert answer.status_code == status, answer.text
    servers = answer.json()["servers"].values()
    assert {said["status"] for said in servers} == {status}
    return [said["answer"] for said in servers]


def test_a_control_call_reaches_every_replica(two, folder, tmp_path):
    tensors = alphabet_model.weights()
    tensors["lm_head.weight"] = np.roll(tensors["lm_head.weight"], 1, axis=0).copy()  # the letter after the next
    other = alphabet_model.save(tmp_path / "other", tensors=tensors)

    def texts() -> set[str]:
        """The answers of both replicas."""
        found = dict[str, str]()
        while len(found) < 2:
            answer = ask(two, max_tokens=3)
            found[answer.headers["x-pid"]] = answer.json()["choices"][0]["text"]
        return set(found.values())

    with httpx.Client(base_url=two, headers=KEY, timeout=60) as client:
        assert texts() == {"bcd"} and client.post("/pause", headers={"Authorization": ""}).status_code == 401
        done = client.post("/update_weights_from_path", json={"path": str(other), "weight_version": "two"})
        assert [said["weight_version"] for said in all_said(done)] == ["two", "two"] and done.json()["weight_version"] == "two"
        assert texts() == {"ceg"}
        all_said(client.post("/update_weights_from_path", json={"path": "/nowhere"}), 400)
        for begin, end, asked in (("/pause?mode=keep", "/resume", "is_paused"), ("/sleep?level=1", "/wake_up", "is_sleeping")):
            all_said(client.post(begin))
            assert all_said(client.get(f"/{asked}")) == [{asked: True}] * 2
            all_said(client.post(end))
            assert all_said(client.get(f"/{asked}")) == [{asked: False}] * 2
        assert texts() == {"ceg"} and len(all_said(client.post("/reset_prefix_cache"))) == 2
        answer = restart_one(client)
        assert sorted(said["weight_version"] for said in all_said(answer)) == ["0", "two"], "a new one has the model's own weights"
        all_said(client.post("/update_weights_from_path", json={"path": str(folder)}))
        assert texts() == {"bcd"}


def restart_one(client: httpx.Client) -> httpx.Response:
    """Kills a replica; what `/weight_info` says when it is there again. Before that a call says which replica has not answered."""
    (victim, _), named, deadline = replica_pids(), False, time.monotonic() + 120
    os.kill(victim, signal.SIGKILL)
    while True:
        assert time.monotonic() < deadline, "the replica is not started again"
        with contextlib.suppress(httpx.TransportError):
            answer = client.get("/weight_info")
            servers = answer.json()["servers"].values() if answer.status_code in (200, 502) else ()
            if answer.status_code == 502 and len(servers) == 2:
                (named_error,) = [said["error"] for said in servers if "error" in said]
                named = bool(named_error)
            if named and answer.status_code == 200 and len(servers) == 2:
                return answer
        time.sleep(0.1)


class End(NamedTuple):
    """How a stream ended. pid: of the replica that had begun its answer. how: "whole", or how it failed."""

    pid: int | None
    how: str


async def load(url: str, num_streams: int, began: asyncio.Event) -> list[End]:
    """So many streams at once, and what each came to. began: set when a quarter have their first chunk."""
    num_begun = 0

    async def one(client: httpx.AsyncClient) -> End:
        nonlocal num_begun
        text, begun, pid = "", False, None
        try:
            async with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 60, "prompt": "!", "stream": True}) as a:
                pid = int(a.headers["x-pid"]) if "x-pid" in a.headers else None
                if a.status_code != 200:
                    return End(pid, f"status {a.status_code}")
                async for line in a.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            return End(pid, "error")
                        text += chunk["choices"][0]["text"]
                        num_begun += not begun
                        begun = True
                        if num_begun == num_streams // 4:
                            began.set()
        except httpx.TransportError as error:
            return End(pid, f"broken: {type(error).__name__}")
        return End(pid, "whole" if text == after("!", 60) else f"cut: {text!r}")

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=KEY, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(one(client) for _ in range(num_streams)))


def test_the_controller_that_is_killed_under_load(two):
    """It only watches: no stream is lost, requests are answered while it is away, and another one takes its place."""
    replicas, (controller,) = replica_pids(), pids_of("ray::ServeController")

    async def main() -> list[End]:
        began = asyncio.Event()
        loading = asyncio.create_task(load(two, 64, began))
        await asyncio.wait_for(began.wait(), 120)
        os.kill(controller, signal.SIGKILL)
        async with httpx.AsyncClient(base_url=two, headers=KEY, timeout=60) as client:
            for _ in range(8):
                assert (await client.post("/v1/completions", json=BODY | {"max_tokens": 1})).status_code == 200
        return await loading

    assert [end.how for end in asyncio.run(main())] == ["whole"] * 64
    deadline = time.monotonic() + 60
    while not pids_of("ray::ServeController"):
        assert time.monotonic() < deadline, "the controller is not started again"
        time.sleep(0.2)
    assert pids_of("ray::ServeController") != [controller] and replica_pids() == replicas


def test_a_replica_that_is_killed_under_load(two):
    """Its streams are lost and no others, and answers come again."""
    (victim, _) = replica_pids()

    async def main() -> tuple[list[End], float]:
        began = asyncio.Event()
        loading = asyncio.create_task(load(two, 64, began))
        await asyncio.wait_for(began.wait(), 120)
        os.kill(victim, signal.SIGKILL)
        killed, answered = time.monotonic(), 0
        async with httpx.AsyncClient(base_url=two, headers=KEY, timeout=60) as client:
            while answered < 4:  # in a row
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.post("/v1/completions", json=BODY | {"max_tokens": 1})
                    answered = answered + 1 if answer.status_code == 200 else 0
                await asyncio.sleep(0.05)
        return await loading, time.monotonic() - killed

    ends, seconds = asyncio.run(main())
    lost = [end for end in ends if end.pid == victim]
    print(f"answers again after {seconds:.1f} s; {len(lost)} of {len(ends)} streams were the replica's: {sorted(set(lost))}")
    assert len(lost) < len(ends) and {end.how for end in ends if end.pid not in (victim, None)} == {"whole"}, "others are lost too"
    assert not [end for end in ends if end.how.startswith("cut")], "a stream ends as if it were whole"
    assert all(end.how.startswith(("status 5", "broken")) for end in ends if end.pid is None), ends
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
        assert ask(url).json()["choices"][0]["text"] == after("a", 20)
        (leader,), (follower,) = replica_pids(others[0]), set(pids_of(FOLLOWER)) - set(others[1])

        async def main() -> tuple[list[End], float, dict[str, float]]:
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
        print(f"answers again after {seconds:.1f} s; {seen}; its streams: {sorted({end.how for end in ends})}")
        assert not any("Timeout" in end.how or end.how.startswith("cut") for end in ends), (
            "a stream hangs, or ends as if it were whole"
        )
        (again,), (new,) = replica_pids(others[0]), set(pids_of(FOLLOWER)) - set(others[1])
        assert again != leader and new != follower
        assert ask(url).json()["choices"][0]["text"] == after("a", 20)
    assert set(pids_of(FOLLOWER)) <= set(others[1]), "followers end with the fleet"


def test_replicas_come_and_go_without_a_failed_request(folder):
    """One, two under load, one again."""
    others = replica_pids()  # of the fleet above
    delays = ("--scale_up_seconds=1", "--scale_down_seconds=5")
    with fleet(folder, "--max_replicas=2", "--grace=60", *delays) as (url, _):
        assert len(replica_pids(others)) == 1
        ends: list[End] = []
        deadline = time.monotonic() + 240
        while len(replica_pids(others)) < 2:
            assert time.monotonic() < deadline, "no replica is added"
            ends += asyncio.run(load(url, 24, asyncio.Event()))
        deadline = time.monotonic() + 240
        while len(replica_pids(others)) > 1:
            assert time.monotonic() < deadline, "no replica is taken away"
            ends += asyncio.run(load(url, 1, asyncio.Event()))
        assert {end.how for end in ends} == {"whole"} and len(ends) > 48


def test_haproxy_in_place_of_rays_own(folder):
    others = replica_pids()
    with fleet(folder, "--replicas=2", RAY_SERVE_ENABLE_HA_PROXY="1") as (url, _):
        test_openais_client_and_what_is_refused(url)
        test_a_stream_comes_as_it_is_made(url)
        deadline = time.monotonic() + 30
        answering = set[int]()
        while answering != set(replica_pids(others)):
            assert time.monotonic() < deadline, answering
            answering.add(int(ask(url, max_tokens=1).headers["x-pid"]))
        assert len(answering) == 2


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
        (None, ("--num_pages=3", "--max_model_len=64", "--page_size=16"), "the pool has 3"),  # as the engine of a replica says
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


def test_a_policy_of_the_routers_sends_a_prefix_where_it_was_before(folder):
    """Ray's proxy asks it: what came once is in the cache of the replica that gets it again. Streams come through as without. Until
    HAProxy has heard of a new replica, Ray's other proxy chooses, and sees no prompts: so the first rounds may not hold."""
    with fleet(folder, "--replicas=2", "--router_policy=prefix_aware", "--enable_prompt_tokens_details") as (url, _):
        for attempt in range(26):
            prompts = [[97 + i, *[97 + attempt] * 160] for i in range(7)]  # longer than a block; odd, not to suit turns
            homes, cached = zip(*[home_of(url, prompt) for prompt in prompts * 3], strict=True)
            if len(set(homes)) == 2 and homes == homes[:7] * 3:
                break
            time.sleep(1)
        assert len(set(homes)) == 2 and homes == homes[:7] * 3
        assert all(cached[7:]) and not any(cached[:7])
        assert [end.how for end in asyncio.run(load(url, 16, asyncio.Event()))] == ["whole"] * 16
        assert httpx.get(f"{url}/v1/models", headers=KEY).status_code == 200


def home_of(url: str, prompt: list[int]) -> tuple[str, int]:
    """The process that answers this prompt, and how many of its tokens were cached there."""
    answer = ask(url, prompt=prompt, max_tokens=1)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-pid"], (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
