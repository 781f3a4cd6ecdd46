r"""Prefill and decode together against apart, measured: two servers that do both, then one of each role, behind a router.

    taskset -c 0 python -m jaxserve tune profile --model=MODEL --max_num_batched_tokens=256 --max_num_seqs=8 --max_model_len=1024 \
        --page_size=16 --rounds=1 --max_buckets=16 --output=steps.json
    python -m scripts.bench_roles --model=MODEL --step_times=steps.json --json=FILE.json

Each server is held to a core of its own, so that the two of an arrangement do not share one. Both arrangements get the same
requests at the same times, over HTTP, in --rounds of which the first is not counted. With --step_times, a profile of one such core,
the simulator says what it expects of both: KV takes what the servers say that their stores took for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import urllib.request
from collections.abc import Iterator
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.http_load import Target, serve_at, server_process
from jaxserve.cli.common.provenance import provenance, write_json

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder or id, or a GGUF file.", required=True)
_STEP_TIMES = flags.DEFINE_string("step_times", None, "A profile of one core (`jaxserve tune profile`); unset: no simulation.")
_RATE = flags.DEFINE_float("rate", 0.4, "Requests a second.", lower_bound=1e-3)
_REQUESTS = flags.DEFINE_integer("num_requests", 30, "Of a round.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Of each arrangement; the first warms up and is not counted.", lower_bound=2)
_PROMPT = flags.DEFINE_integer("prompt", 256, "Mean tokens of a prompt; uniform from half to one and a half of it.", lower_bound=2)
_OUTPUT = flags.DEFINE_integer("output", 48, "The same of an output.", lower_bound=2)
_BUDGET = flags.DEFINE_integer("max_num_batched_tokens", 256, "Of every server.", lower_bound=1)
_SEQS = flags.DEFINE_integer("max_num_seqs", 8, "Of every server.", lower_bound=1)
_MAX_LEN = flags.DEFINE_integer("max_model_len", 1024, "Of every server.", lower_bound=1)
_PAGES = flags.DEFINE_integer("num_pages", 1024, "Of every server.", lower_bound=1)
_LATENCY = flags.DEFINE_float("kv_latency_ms", 5.0, "Simulated: of a load beside its bytes, the router's hop included.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

PAGE_SIZE = 16
ARRANGEMENTS = {"together": (None, None), "apart": ("prefill", "decode")}  # the roles of the two servers
METRICS = ("p50_ttft_ms", "p90_ttft_ms", "p50_itl_ms", "p99_itl_ms", "output_throughput")


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes that start in here have this core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def arranged(roles: tuple[str | None, ...], folder: str) -> Iterator[tuple[str, list[str]]]:
    """(the router's address, those of the servers) of one server a role, each on a core."""
    cores = sorted(os.sched_getaffinity(0))
    limits = {f.name: f.value for f in (_BUDGET, _SEQS, _MAX_LEN, _PAGES)}
    shared = [f"--{name}={value}" for name, value in limits.items()]
    shared += [f"--model={_MODEL.value}", f"--page_size={PAGE_SIZE}", "--warm_up=all", "--noaccess_log"]
    with contextlib.ExitStack() as stack:
        urls = []
        for core, role in zip(cores, roles, strict=False):
            own = [] if role is None else [f"--role={role}", f"--kv_store=disk:{folder}:4GiB"]
            with on_core(core):
                urls.append(stack.enter_context(server_process("jaxserve.cli.serve", *shared, *own))[0])
        router = ["--backends=" + ",".join(urls), "--policy=least_loaded", "--min_prefill_bytes=0", "--noaccess_log"]
        yield stack.enter_context(server_process("jaxserve.cli.router", *router))[0], urls


def metrics_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return answer.read().decode()


def measured(name: str, workload: Any) -> tuple[dict[str, list[float]], tuple[float, float]]:
    """(each metric of each counted round, seconds of a token's KV to be saved and to be loaded)."""
    from scripts.bench.expected_roles import seconds_a_token

    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    with tempfile.TemporaryDirectory() as folder, arranged(ARRANGEMENTS[name], folder) as (url, servers):
        vocab_size = Target(servers[0]).get_json("/tokenizer_info")["vocab_size"]
        for of_round in range(_ROUNDS.value):
            times = asyncio.run(serve_at(Target(url), workload, vocab_size, of_round))
            summary = times.summary(percentiles=(50, 90, 99))
            print(f"{name}, round {of_round}: " + ", ".join(f"{metric} {summary[metric]:.1f}" for metric in METRICS), flush=True)
            for metric in METRICS if of_round else ():
                found[metric].append(summary[metric])
        moved = seconds_a_token({"prefill": metrics_of(servers[0]), "decode": metrics_of(servers[-1])}, PAGE_SIZE)
        if name == "apart" and not moved[1]:
            raise app.UsageError("the decode server has loaded nothing: prompts must be longer than a page")
    return found, moved


def simulated(step_times: Any, workload: Any, moved: tuple[float, float]) -> dict[str, dict[str, float]]:
    """What the simulator makes of both arrangements with these step times."""
    from jaxserve.scheduling.config import SchedulerConfig
    from scripts.bench.expected_roles import KVSeconds, expected

    limits = SchedulerConfig(max_model_len=_MAX_LEN.value, max_num_batched_tokens=_BUDGET.value, max_num_seqs=_SEQS.value)
    kv = KVSeconds(*moved, _LATENCY.value / 1e3)
    runs = expected(step_times, limits, _PAGES.value, workload, kv)
    summaries = {name: times.summary(percentiles=(50, 90, 99)) for name, times in runs.items()}
    return {name: {metric: summary[metric] for metric in METRICS} for name, summary in summaries.items()}


def main() -> None:
    with refuse_bad_input():
        if len(os.sched_getaffinity(0)) < 2:
            raise app.UsageError("two servers need a core each, and this process has one")
        if 3 * (_PROMPT.value + _OUTPUT.value) // 2 > _MAX_LEN.value:
            raise app.UsageError(f"--max_model_len={_MAX_LEN.value} must hold the longest prompt and output")
        from jaxserve.step_times.fitted import StepTimeModel

        step_times = StepTimeModel.load(_STEP_TIMES.value) if _STEP_TIMES.value else None
    from jaxserve.workloads.traffic import at_rate
    from jaxserve.workloads.workload import random_lengths

    workload = at_rate(random_lengths(_REQUESTS.value, _PROMPT.value, _OUTPUT.value, 0.5), _RATE.value, 0)
    rounds, moved = {}, (0.0, 0.0)
    for name in ARRANGEMENTS:
        rounds[name], moved = measured(name, workload)
    found = {name: {metric: statistics.median(of) for metric, of in metrics.items()} for name, metrics in rounds.items()}
    played = {} if step_times is None else simulated(step_times, workload, moved)
    print(f"{'':10} " + " ".join(f"{metric:>18}" for metric in METRICS))
    for kind, table in (("measured", found), ("simulated", played)):
        for name, row in table.items():
            print(f"{name:10} " + " ".join(f"{row[metric]:18.1f}" for metric in METRICS) + f"  {kind}")
    about = {"benchmark": "roles measured", "model": _MODEL.value, "rate": _RATE.value, "num_requests": _REQUESTS.value}
    about |= {"prompt": _PROMPT.value, "output": _OUTPUT.value, "rounds": rounds}
    about |= {"kv_seconds_a_token": dict(zip(("save", "load"), moved, strict=True))}
    write_json(_JSON.value, {**about, "measured": found, "simulated": played, **provenance()})


if __name__ == "__main__":
    run_command(main)
