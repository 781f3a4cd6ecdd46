"""What Ray costs: a server without it, on Ray, behind Ray's HAProxy, and with a policy of the router's there, by turns.

    python -m scripts.bench_ray --json=benchmarks/results/cpu/ray.json

It needs `jaxserve[ray]`. Each round starts each server anew, alone on the machine, with a model that is hardly there. It is asked
for one token at a time over a connection that is kept, one request after the other. Reported are seconds from the command to the
first answer (JAX's compilation cache is full), milliseconds of a request, and the memory of all processes of the server: the sum of
their proportional set sizes, in which a page that several share counts once. Medians are of the rounds'.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from absl import app, flags

from jaxserve.cli.common.command import run_command
from scripts.bench.ray_servers import FIGURES, memory_of, processes_of, summary

_ROUNDS = flags.DEFINE_integer("rounds", 3, "Starts of each server.", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("num_requests", 300, "Timed requests of a round; a third as many come before.", lower_bound=3)
_SERVERS = flags.DEFINE_list("servers", ["plain", "ray", "ray_haproxy", "ray_policy"], "Those to measure.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

# What each server is given beside the model: (flags, environment).
SERVERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "plain": ((), {}),
    "ray": (("--ray",), {}),
    "ray_haproxy": (("--ray",), {"RAY_SERVE_ENABLE_HA_PROXY": "1"}),
    "ray_policy": (("--ray", "--router_policy=prefix_aware"), {}),
}
ENGINE = ("--page_size=16", "--num_pages=64", "--max_num_seqs=4", "--max_num_batched_tokens=64", "--warm_up=all")
PROMPT = list(range(1, 17))
ANSWERS_WITHIN = 120.0  # seconds from the start


@contextlib.contextmanager
def connected(url: str) -> Iterator[http.client.HTTPConnection]:
    """A connection that is kept between requests."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


def ask(connection: http.client.HTTPConnection) -> float | None:
    """Seconds of one request; None if it was not answered with 200."""
    body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return time.perf_counter() - begin if answer.status == 200 else None


def wait_for_answer(url: str) -> None:
    """Returns when the server has answered a request."""
    deadline = time.monotonic() + ANSWERS_WITHIN
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException), connected(url) as connection:
            if ask(connection) is not None:
                return
        time.sleep(0.05)
    raise app.UsageError(f"{url}: no answer within {ANSWERS_WITHIN:.0f} s")


def measured(name: str, model: Path) -> dict[str, float]:
    """One start of this server, by FIGURES."""
    from jaxserve.cli.common.http_load import server_process

    own, variables = SERVERS[name]
    command = (f"--model={model}", "--served_model_name=tiny", "--skip_tokenizer_init", "--noaccess_log", *ENGINE, *own)
    begin = time.monotonic()
    with server_process("jaxserve.cli.serve", *command, env={**os.environ, **variables}) as (url, pid):
        wait_for_answer(url)
        started = time.monotonic() - begin
        with connected(url) as connection:
            for _ in range(_REQUESTS.value // 3):
                ask(connection)
            seconds = [ask(connection) for _ in range(_REQUESTS.value)]
        memory = memory_of(processes_of(pid))
    answered = [1e3 * s for s in seconds if s is not None]
    if len(answered) < len(seconds):
        raise app.UsageError(f"{name}: {len(seconds) - len(answered)} of {len(seconds)} requests were not answered with 200")
    percentiles = statistics.quantiles(answered, n=10)
    return dict(zip(FIGURES, (started, statistics.median(answered), percentiles[-1], memory / 2**20), strict=True))


def main() -> None:
    if wrong := [name for name in _SERVERS.value if name not in SERVERS]:
        raise app.UsageError(f"--servers: {', '.join(wrong)} must be of {', '.join(SERVERS)}")
    from jaxserve.cli.common.provenance import provenance, write_json
    from scripts.bench import tiny_checkpoint

    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in _SERVERS.value}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_checkpoint.save(Path(folder))
        measured("plain", model)  # so that the compilation cache is full
        for _ in range(_ROUNDS.value):
            for name, of in rounds.items():
                of.append(measured(name, model))
                print(f"{name}: " + ", ".join(f"{f} {of[-1][f]:.2f}" for f in FIGURES), file=sys.stderr, flush=True)
    medians = summary(rounds)
    shown = sys.stderr if _JSON.value == "-" else sys.stdout
    print(f"{'':12} " + " ".join(f"{f:>16}" for f in FIGURES), file=shown)
    for name, row in medians.items():
        print(f"{name:12} " + " ".join(f"{row[f]:16.2f}" for f in FIGURES), file=shown)
    ray = {}
    if any(name != "plain" for name in rounds):
        from importlib.metadata import version

        ray = {"ray": version("ray")}
    write_json(_JSON.value, {"benchmark": "ray", **provenance(), **ray, "rounds": rounds, "medians": medians})


if __name__ == "__main__":
    run_command(main)
