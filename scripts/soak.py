"""Serves for as long as asked under a mix of good requests, bad ones and clients that leave, and reports what leaks.

    python -m scripts.soak --model=FOLDER --minutes=10
    python -m scripts.soak --url=http://127.0.0.1:8000 --pid=1234 --num_requests=10000
    python -m scripts.soak --url=http://127.0.0.1:8000 --metrics_urls=http://127.0.0.1:8001,http://127.0.0.1:8002   # a router

With --model the server runs in a process of its own. Every --check_every requests the load stops, and the server's memory, threads
and files are read (Linux's /proc) once no request is left: each of these rounds must find all pages free. The exit code is 1 if a
page, a request, a file or a thread stayed behind, an answer was a 5xx, or memory grew by more than --max_growth_mb after the first
third.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence

from absl import app, flags

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import define_layout_flags, layout_arguments, layout_options
from jaxserve.cli.common.http_load import server_process
from scripts.bench.soak_load import Reading, faults, request

_MODEL = flags.DEFINE_string("model", None, "Serve this model.")
_URL = flags.DEFINE_string("url", None, "Or load this server.")
_METRICS = flags.DEFINE_list("metrics_urls", [], "Whose /metrics say what is held: the servers behind a router at --url.")
_MAX_LEN = flags.DEFINE_integer("max_model_len", 1024, "Of --model's server.", lower_bound=1)
_PID = flags.DEFINE_integer("pid", None, "The process of --url, to read its memory.")
_MINUTES = flags.DEFINE_float("minutes", 0, "Go on for so long.", lower_bound=0)
_NUM_REQUESTS = flags.DEFINE_integer("num_requests", 1000, "Go on for so many requests at least.", lower_bound=1)
_CONCURRENCY = flags.DEFINE_integer("max_concurrency", 32, "Requests at a time.", lower_bound=1)
_CHECK_EVERY = flags.DEFINE_integer("check_every", 500, "Requests of a round.", lower_bound=1)
_GROWTH = flags.DEFINE_float("max_growth_mb", 64, "Memory that may be gained after the first third.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the requests.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_layout_flags()


async def load(url: str, rng: random.Random, num_requests: int, statuses: Counter[str]) -> None:
    import httpx

    places = asyncio.Semaphore(_CONCURRENCY.value)

    async def one(client: httpx.AsyncClient) -> None:
        path, body, patience = request(rng)
        async with places:
            try:
                async with asyncio.timeout(patience):
                    statuses[str((await client.post(path, json=body)).status_code)] += 1
            except TimeoutError:
                statuses["left"] += 1
            except httpx.TransportError as error:
                statuses[type(error).__name__] += 1

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=_CONCURRENCY.value)) as client:
        await asyncio.gather(*(one(client) for _ in range(num_requests)))


def left_over(urls: Sequence[str], seconds: float = 30) -> float:
    """What is still held (running and waiting samples, and the share of pages) after at most so long; 0 when nothing is."""
    deadline = time.monotonic() + seconds
    while True:
        held = sum(held_at(url) for url in urls)
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.1)


def held_at(url: str) -> float:
    import httpx

    text, held = httpx.get(f"{url}/metrics").text, 0.0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        values = re.findall(rf"^jaxserve:{name}{{.*}} (\S+)$", text, re.MULTILINE)
        if not values:
            raise app.UsageError(f"{url}/metrics has no jaxserve:{name}; for a router give --metrics_urls")
        held += sum(map(float, values))
    return held


def read(pid: int | None, num_requests: int) -> Reading:
    if pid is None:
        return Reading(num_requests, None, None, None)
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":", 1) for line in file)
    rss = int(status["VmRSS"].split()[0]) / 1024
    return Reading(num_requests, rss, int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))


@contextlib.contextmanager
def server():
    """(address, process id) of the server to load."""
    if _URL.value:
        yield _URL.value.rstrip("/"), _PID.value
        return
    sizes = (f"--max_model_len={_MAX_LEN.value}", "--max_num_seqs=16", "--max_num_batched_tokens=256")
    with server_process("jaxserve.cli.serve", f"--model={_MODEL.value}", "--noaccess_log", *sizes, *layout_arguments()) as found:
        yield found


def main() -> None:
    if bool(_URL.value) == bool(_MODEL.value):
        raise app.UsageError("give either --model or --url")
    given = [f"--{name}" for name, value in layout_options().items() if value != 1]
    if _URL.value and given:
        raise app.UsageError(f"{', '.join(given)}: of a server that is started here with --model, and --url names one that runs")
    from jaxserve.cli.common.provenance import write_json

    logging.getLogger("httpx").setLevel(logging.WARNING)
    rng, statuses, readings, done, held = random.Random(_SEED.value), Counter[str](), list[Reading](), 0, 0.0
    started = time.monotonic()
    with server() as (url, pid):
        while not held and (done < _NUM_REQUESTS.value or time.monotonic() - started < 60 * _MINUTES.value):
            asyncio.run(load(url, rng, _CHECK_EVERY.value, statuses))
            done += _CHECK_EVERY.value
            held = left_over(_METRICS.value or [url])
            readings.append(read(pid, done))
            print(f"{time.monotonic() - started:.0f} s: {readings[-1]}, {dict(statuses)}", file=sys.stderr, flush=True)
    found = faults(readings, held, statuses, _GROWTH.value)
    result = {"requests": done, "seconds": time.monotonic() - started, "statuses": dict(statuses), "faults": found}
    rss = [r.rss_mb for r in readings if r.rss_mb is not None]
    print(f"soak: {done} requests, {dict(statuses)}, memory {rss[0]:.0f} -> {rss[-1]:.0f} MB" if rss else f"soak: {done} requests")
    write_json(_JSON.value, result)
    if found:
        raise app.UsageError("; ".join(found))


if __name__ == "__main__":
    run_command(main)
