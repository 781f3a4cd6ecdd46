"""Two prefill and two decode servers, each a process, behind a router: their answers are those of one server that does both."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams
from tests import alphabet_model
from tests.kv_store.transfers import skip_unless_installed
from tests.routing.test_router import value
from tests.routing.test_router_servers import free_port, process, routing, wait_until

SETTINGS = {"page_size": 4, "num_pages": 400, "max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32"}
NUM_PROMPTS, NUM_TOKENS = 48, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of random weights, so that each token depends on all before it."""
    folder, rng = alphabet_model.save(tmp_path_factory.mktemp("random")), np.random.default_rng(0)
    file = folder / "model.safetensors"
    weights = {k: (rng.standard_normal(x.shape) * 0.3).astype(x.dtype) if x.ndim == 2 else x for k, x in load_file(file).items()}
    save_file(weights, file)
    return folder


def prompts(phase: int) -> list[list[int]]:
    """Some with a prefix in common, and none with those of another phase."""
    rng = np.random.default_rng(phase)
    shared = rng.integers(0, 250, (4, 60)).tolist()
    return [shared[i % 4][: 20 * (i % 3 + 1)] + rng.integers(0, 250, 20 + 2 * i).tolist() for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def expected(folder) -> list[list[list[int]]]:
    """The answers of each phase."""
    llm = LLM(folder, compilation_cache_dir="", **SETTINGS)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=5, ignore_eos=True)
    answers = []
    for phase in range(3):
        answers.append([list(output.outputs[0].token_ids) for output in llm.generate(prompts(phase), params, use_tqdm=False)])
        assert len({tuple(answer) for answer in answers[-1]}) > NUM_PROMPTS * 0.9
    return answers


@contextlib.contextmanager
def server(folder: Path, store: str, role: str, devices: int = 1) -> Iterator[tuple[str, subprocess.Popen]]:
    """store: as --kv_store names it. devices: among which its heads are divided."""
    url = f"http://127.0.0.1:{free_port()}"
    flags = [f"--{name}={value}" for name, value in SETTINGS.items()]
    flags += [f"--port={url.rpartition(':')[2]}", f"--kv_store={store}", "--noaccess_log", f"--tensor_parallel_size={devices}"]
    some = f"--xla_force_host_platform_device_count={devices}"
    with process(url, "-m", "jaxserve", "serve", str(folder), f"--role={role}", *flags, XLA_FLAGS=some) as running:
        yield url, running


async def ask_all(url: str, phase: int, done: list[int]) -> list[list[int]]:
    """The answers, eight requests at a time. done: gets the index of each that has been answered."""
    body = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    room = asyncio.Semaphore(8)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(index: int, prompt: list[int]) -> list[int]:
            async with room:
                answer = await client.post("/v1/completions", json=body | {"prompt": prompt})
            assert answer.status_code == 200, answer.text
            done.append(index)
            return answer.json()["choices"][0]["token_ids"]

        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts(phase))))


@pytest.mark.slow
def test_two_of_each_role_and_a_prefill_server_that_is_killed(folder, expected, tmp_path):
    with contextlib.ExitStack() as stack:
        store = f"disk:{tmp_path}:64MiB"
        made = [stack.enter_context(server(folder, store, role)) for role in ("prefill", "prefill", "decode", "decode")]
        client = stack.enter_context(routing(*(url for url, _ in made), min_prefill_bytes=0))
        url = str(client.base_url)
        assert client.get("/health").json()["up_by_role"] == {"prefill": 2, "decode": 2}
        assert asyncio.run(ask_all(url, 0, [])) == expected[0]
        assert value(client, "prefills_total", result="failed") == 0
        num_stored = value(client, "prefills_total", result="stored")
        assert num_stored > NUM_PROMPTS / 2 and loaded(made[2][0]) and loaded(made[3][0])
        computed = [metric(server_url, "prefill_tokens_total") for server_url, _ in made]
        assert min(computed[:2]) > max(computed[2:]), "prompts are computed on prefill servers"

        done: list[int] = []

        async def kill_amid_load() -> list[list[int]]:
            asking = asyncio.create_task(ask_all(url, 1, done))
            while len(done) < NUM_PROMPTS // 4:
                await asyncio.sleep(0.005)
            made[0][1].kill()
            return await asking

        assert asyncio.run(kill_amid_load()) == expected[1]
        wait_until(lambda: client.get("/health").json()["up_by_role"] == {"prefill": 1, "decode": 2})
        made[1][1].kill()
        wait_until(lambda: client.get("/health").json()["up_by_role"] == {"prefill": 0, "decode": 2})
        assert asyncio.run(ask_all(url, 2, [])) == expected[2]


def stores(kind: str, folder: Path) -> tuple[str, str]:
    """Those of a prefill and of a decode server. The second finds in the first what the first has."""
    if kind == "disk":
        return f"disk:{folder}:64MiB", f"disk:{folder}:64MiB"
    skip_unless_installed(kind)
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    return f"{kind}:{first}:64MiB", f"{kind}:{second}+{first}:64MiB"


async def ask_and_leave(url: str, phase: int, count: int) -> None:
    """So many clients go when they have their first token, and as many as soon as they have asked."""
    body = {"max_tokens": 100, "temperature": 1.0, "ignore_eos": True, "stream": True}

    async def leave(client: httpx.AsyncClient, prompt: list[int], after_first: bool) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            async with (
                asyncio.timeout(None if after_first else 0.03),
                client.stream("POST", "/v1/completions", json=body | {"prompt": prompt}) as answer,
            ):
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        return

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(leave(client, prompt, i % 2 == 0) for i, prompt in enumerate(prompts(phase)[: 2 * count])))


@pytest.mark.slow
@pytest.mark.parametrize("kind,devices", [("disk", (2, 1)), ("nixl", (1, 2))])
def test_different_devices_on_both_sides_and_clients_that_leave(folder, expected, tmp_path, kind, devices):
    """Tokens are those of one server that does both; who leaves at any time leaves no page behind."""
    with contextlib.ExitStack() as stack:
        named = zip(stores(kind, tmp_path), ("prefill", "decode"), devices, strict=True)
        made = [stack.enter_context(server(folder, *one))[0] for one in named]
        client = stack.enter_context(routing(*made, min_prefill_bytes=0))
        url = str(client.base_url)
        assert asyncio.run(ask_all(url, 0, [])) == expected[0]
        assert value(client, "prefills_total", result="stored") > NUM_PROMPTS / 2 and loaded(made[1])
        assert metric(made[0], "prefill_tokens_total") > metric(made[1], "prefill_tokens_total")
        asyncio.run(ask_and_leave(url, 1, 8))
        held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(metric(server_url, name) for server_url in made for name in held))
        assert sum(metric(server_url, "request_success_total") for server_url in made) > 2 * NUM_PROMPTS
        assert asyncio.run(ask_all(url, 2, [])) == expected[2]


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"jaxserve:{name}{{"))


def loaded(url: str) -> float:
    return metric(url, "external_prefix_cache_hits_total")


def test_a_role_without_a_shared_store_is_one_line(folder):
    command = [sys.executable, "-m", "jaxserve", "serve", str(folder), "--role=prefill", "--kv_store=host:1MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].count("give all of them kv_store='disk:FOLDER:SIZE' with one folder") == 1
