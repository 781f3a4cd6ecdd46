"""Loads a server with streams and reports throughput and latencies, with vLLM's field names.

    python -m scripts.bench_http --url=http://127.0.0.1:8000 --num_prompts=200 --max_concurrency=64
    python -m scripts.bench_http --replay --max_concurrency=64

With --replay a server is started in a process of its own around an engine without a model (replay_engine.py), so that the figure
is what the HTTP path alone can carry; "chunks_per_cpu_second" says what it would be with a core to itself. Its steps take no time,
or --replay_step_ms: 256 streams at 30 ms a step are 8,000 chunks a second. "loop_lag" is what an event waits there until the event
loop turns to it. Each request asks for exactly --output_len tokens (ignore_eos); prompts are random texts. A chunk is a server-sent
event that brings text. --api_server_count: processes of that server that speak HTTP, where the engine then has one to itself; CPU
seconds are of all of them, and there is no loop_lag.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import run_command, without_collecting
from jaxserve.cli.common.http_load import Stream, Target, server_process

_URL = flags.DEFINE_string("url", None, "The server's address.")
_REPLAY = flags.DEFINE_bool("replay", False, "Start a server without a model, and load that.")
_SERVE_REPLAY = flags.DEFINE_bool("serve_replay", False, "Be that server, on --port.")
_PROCESSES = flags.DEFINE_integer("api_server_count", 1, "With --replay, the server's API processes.", lower_bound=1)
_STEP_MS = flags.DEFINE_float("replay_step_ms", 0.0, "Least time of that server's steps.", lower_bound=0)
_PORT = flags.DEFINE_integer("port", 8000, "Of --serve_replay.")
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 128, "Requests in all.", lower_bound=1)
_CONCURRENCY = flags.DEFINE_integer("max_concurrency", 64, "Requests at a time.", lower_bound=1)
_RAMP_UP = flags.DEFINE_float("ramp_up_s", 0.0, "Seconds over which the first requests begin; 0: all at once.", lower_bound=0)
_INPUT_LEN = flags.DEFINE_integer("input_len", 128, "Characters of a prompt.", lower_bound=1)
_OUTPUT_LEN = flags.DEFINE_integer("output_len", 128, "Tokens of an answer.", lower_bound=1)
_API_KEY = flags.DEFINE_string("api_key", None, "The server's key; by default JAXSERVE_API_KEY.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the prompts.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

LAG_PATH = "/event_loop_lag"  # of the server without a model


async def load(target: Target) -> tuple[list[Stream], float]:
    """All streams, and the seconds they took together."""
    rng, places = random.Random(_SEED.value), asyncio.Semaphore(_CONCURRENCY.value)

    async def one(number: int) -> Stream:
        await asyncio.sleep(_RAMP_UP.value * min(1.0, number / _CONCURRENCY.value))  # later ones must not take the places before
        prompt = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=_INPUT_LEN.value))
        async with places:
            return await target.ask(
                {"prompt": prompt, "max_tokens": _OUTPUT_LEN.value, "ignore_eos": True, "stream": True, "temperature": 0}
            )

    started = time.perf_counter()
    streams = await asyncio.gather(*map(one, range(_NUM_PROMPTS.value)))
    return streams, time.perf_counter() - started


def summarise(streams: list[Stream], seconds: float) -> dict[str, Any]:
    served = [s for s in streams if s.status == 200 and s.complete]
    chunks = sum(len(s.chunk_times) for s in served)
    ttfts = sorted(s.ttft for s in served)
    tpots = sorted((s.seconds - s.ttft) / max(1, _OUTPUT_LEN.value - 1) for s in served)
    result: dict[str, Any] = {
        "completed": len(served),
        "failed": len(streams) - len(served),
        "duration": seconds,
        "request_throughput": len(served) / seconds,
        "output_throughput": len(served) * _OUTPUT_LEN.value / seconds,
        "chunks_per_second": chunks / seconds,
        "chunks": chunks,
    }
    for name, values in (("ttft", ttfts), ("tpot", tpots)):
        if values:
            result[f"median_{name}_ms"] = 1000 * statistics.median(values)
            result[f"p99_{name}_ms"] = 1000 * values[min(len(values) - 1, int(0.99 * len(values)))]
    return result


def serve_replay(port: int) -> None:
    with without_collecting():  # as `jaxserve serve` loads a model
        import uvicorn

        from jaxserve.serving.app import make_app
        from jaxserve.serving.async_llm import AsyncLLM
        from jaxserve.serving.connections import bounded
        from jaxserve.serving.options import ServerOptions
        from scripts.bench.loop_lag import LoopLag
        from scripts.bench.replay_engine import replay_llm

        options = ServerOptions(names=("replay",))
        application = make_app(AsyncLLM(replay_llm(max_num_seqs=256, step_seconds=_STEP_MS.value / 1000)), options)
    lag, inner = LoopLag(), application.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[Any]:
        async with inner(app) as state:
            sampling = asyncio.create_task(lag.run())
            yield state
            sampling.cancel()

    application.router.lifespan_context = lifespan
    application.get(LAG_PATH)(lag.take)
    uvicorn.run(application, http=bounded(options), port=port, log_config=None, access_log=False, backlog=4096)


def serve_replay_in_processes(port: int, count: int) -> int:
    """As `jaxserve serve --api_server_count` does it. Returns the exit code."""
    from jaxserve.cli.common import api_processes, listeners
    from jaxserve.serving.metrics import make_metrics
    from jaxserve.serving.options import MAX_FAILURES, MAX_WAITING, ServerOptions
    from jaxserve.serving.pipes import EngineHub
    from scripts.bench.replay_engine import replay_llm

    llm, options = replay_llm(max_num_seqs=256, step_seconds=_STEP_MS.value / 1000), ServerOptions(names=("replay",))
    metrics = functools.partial(make_metrics, llm.engine.config, options)
    hub = EngineHub(llm, max_waiting=MAX_WAITING, max_failures=MAX_FAILURES, make_metrics=metrics)
    start = api_processes.Start(
        engine=api_processes.describe(llm),
        tokenizer=api_processes.take_apart(llm.tokenizer),
        params=llm.get_default_sampling_params(),
        limits={"max_waiting": MAX_WAITING, "request_timeout": None},
        options=options,
        stats=hub.stats,
        uvicorn={"port": port},
        access_log=False,
    )
    with listeners.bound("127.0.0.1", port, None) as sockets:
        listeners.listen(sockets)
        return api_processes.run(hub, start, count, sockets, grace=5.0)


def cpu_seconds(pid: int) -> float:
    """What a process and its children have used so far, on Linux."""
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def wait_until_idle(pid: int) -> None:
    """Waits until no process has anything left to do, as at its start."""
    before, now = -1.0, cpu_seconds(pid)
    while now - before > 0.05:
        time.sleep(1.0)
        before, now = now, cpu_seconds(pid)


def main() -> None:
    if _SERVE_REPLAY.value:
        if _PROCESSES.value > 1:
            sys.exit(serve_replay_in_processes(_PORT.value, _PROCESSES.value))
        serve_replay(_PORT.value)
        return
    if bool(_URL.value) == _REPLAY.value:
        raise app.UsageError("give either --url or --replay")
    if _PROCESSES.value > 1 and not _REPLAY.value:
        raise app.UsageError("--api_server_count is of the server that --replay starts: give it to `jaxserve serve`")
    from jaxserve.cli.common.provenance import provenance, write_json

    if _REPLAY.value:
        replay = ("--serve_replay", f"--replay_step_ms={_STEP_MS.value}", f"--api_server_count={_PROCESSES.value}")
        with server_process("scripts.bench_http", *replay) as (url, pid):
            target = Target(url)
            lag = functools.partial(target.get_json, LAG_PATH) if _PROCESSES.value == 1 else dict
            wait_until_idle(pid)
            lag()  # what was sampled before the load does not count
            spent = cpu_seconds(pid)
            streams, seconds = asyncio.run(load(target))
            spent, lags = cpu_seconds(pid) - spent, lag()
    else:
        url, spent, lags = str(_URL.value), 0.0, {}
        streams, seconds = asyncio.run(load(Target(url, _API_KEY.value or os.environ.get("JAXSERVE_API_KEY"))))
    result = summarise(streams, seconds)
    if spent:
        result |= {"server_cpu_seconds": spent, "chunks_per_cpu_second": result["chunks"] / spent, **lags}
    shown = " ".join(f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in result.items())
    print(f"bench_http {url}: {shown}", file=sys.stderr if _JSON.value == "-" else sys.stdout)
    write_json(_JSON.value, {"benchmark": "http", **provenance(), **result})


if __name__ == "__main__":
    run_command(main)
