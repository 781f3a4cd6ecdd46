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
def server(folder: Path, store: Path, role: str) -> Iterator[tuple[str, subprocess.Popen]]:
    url = f"http://127.0.0.1:{free_port()}"
    flags = [f"--{name}={value}" for name, value in SETTINGS.items()]
    flags += [f"--port={url.rpartition(':')[2]}", f"--kv_store=disk:{store}:64MiB", "--noaccess_log"]
    with process(url, "-m", "jaxserve", "serve", str(folder), f"--role={role}", *flags) as running:
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
        made = [stack.enter_context(server(folder, tmp_path, role)) for role in ("prefill", "prefill", "decode", "decode")]
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
