"""What it costs host 0 to tell the other hosts of a step: the time of one message, beside how many bytes it has.

    python -m scripts.bench_hosts --num_hosts=2 --num_seqs=256

The hosts are processes here. A message is the packed step of --num_seqs decodes, as the scheduler and the packer make it, and after
it that of its head. Sequences begin at different places of a page of 64 tokens.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import socket
import statistics
import time
from collections.abc import Iterator

import numpy as np
from absl import flags

from jaxserve.batching.layout import StepInputs
from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.provenance import provenance, write_json
from scripts.bench.decode_steps import make_packer, make_scheduler

_HOSTS = flags.DEFINE_integer("num_hosts", 2, "Processes, host 0 among them.", lower_bound=2)
_SEQS = flags.DEFINE_integer("num_seqs", 256, "Sequences that decode in a step.", lower_bound=1)
_PLANNERS = flags.DEFINE_boolean("planners", False, "With attention's plan, which a Hopper GPU's steps have too.")
_STEPS = flags.DEFINE_integer("num_steps", 2000, "Steps to send.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Where the figures are written too.")


def follow(num_hosts: int, host_id: int, address: str) -> None:
    """Another host: takes messages until there are no more."""
    from jaxserve import join_hosts

    hosts = join_hosts(num_hosts, host_id, address)
    while hosts.receive() is not None:
        hosts.num_commands += 1
    hosts.close()


def steps(num_seqs: int, num_steps: int, planned: bool) -> Iterator[StepInputs]:
    """Packed steps of `num_seqs` decodes each, made one by one."""
    scheduler = make_scheduler(num_seqs, 64, True, "fcfs", num_steps + 3)
    packer, rng = make_packer(scheduler, planned), np.random.default_rng(0)
    while num_steps:
        schedule = scheduler.schedule()
        assert schedule is not None
        packer.newcomers(schedule)
        inputs = packer.pack(schedule)
        if schedule.num_decodes == num_seqs:
            num_steps -= 1
            yield inputs
        scheduler.update(schedule, rng.integers(10, 100_000, num_seqs).astype(np.int32))


def main() -> None:
    from jaxserve import join_hosts

    with socket.create_server(("", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    n, num_seqs = _HOSTS.value, _SEQS.value
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=follow, args=(n, i, address)) for i in range(1, n)]
    for other in others:
        other.start()
    hosts = join_hosts(n, 0, address)
    body, head, num_bytes = [], [], []
    for step in steps(num_seqs, _STEPS.value, _PLANNERS.value):
        start = time.perf_counter()
        hosts.send(("dispatch_body", (step,)))
        middle = time.perf_counter()
        hosts.send(("dispatch_head", (None,)))
        body.append(middle - start)
        head.append(time.perf_counter() - middle)
        num_bytes.append(len(pickle.dumps(("dispatch_body", (step,)), protocol=5)))
        time.sleep(0.002)
    hosts.close()
    for other in others:
        other.join()
    figures = {
        "num_hosts": n,
        "num_seqs": num_seqs,
        "bytes": round(statistics.median(num_bytes)),
        "body_us": round(1e6 * statistics.median(body), 1),
        "head_us": round(1e6 * statistics.median(head), 1),
        "body_p90_us": round(1e6 * statistics.quantiles(body, n=10)[-1], 1),
    }
    print(json.dumps(figures))
    write_json(_JSON.value, figures | provenance())


if __name__ == "__main__":
    run_command(main)
