"""What it costs host 0 to tell the other hosts of a step: the time of one message, beside how many bytes it has.

    python -m scripts.bench_hosts --num_hosts=2 --num_seqs=256

The hosts are processes here. A message is the packed step of --num_seqs decodes, and after it that of its head.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import socket
import statistics
import time

import numpy as np
from absl import flags

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.provenance import provenance, write_json

_HOSTS = flags.DEFINE_integer("num_hosts", 2, "Processes, host 0 among them.", lower_bound=2)
_SEQS = flags.DEFINE_integer("num_seqs", 256, "Sequences that decode in a step.", lower_bound=1)
_WORK = flags.DEFINE_integer("work_list_bytes", 0, "Bytes of attention's plan, which a Hopper GPU's steps have too.", lower_bound=0)
_STEPS = flags.DEFINE_integer("num_steps", 2000, "Steps to send.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Where the figures are written too.")


def follow(num_hosts: int, host_id: int, address: str) -> None:
    """Another host: takes messages until there are no more."""
    from jaxserve import join_hosts

    hosts = join_hosts(num_hosts, host_id, address)
    while hosts.receive() is not None:
        hosts.num_commands += 1
    hosts.close()


def main() -> None:
    from jaxserve import join_hosts
    from jaxserve.batching.layout import StepInputs, StepLayout
    from jaxserve.buckets.plan import Bucket

    with socket.create_server(("", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    n, num_seqs = _HOSTS.value, _SEQS.value
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=follow, args=(n, i, address)) for i in range(1, n)]
    for other in others:
        other.start()
    hosts = join_hosts(n, 0, address)
    layout = StepLayout(Bucket(num_seqs, num_seqs, 1), num_seqs, 64, num_seqs)
    inputs = StepInputs.padding(layout, num_seqs, with_logprobs=False)
    packed = np.concatenate([inputs.packed, np.zeros(_WORK.value // 4, np.int32)])
    step = StepInputs(inputs.bucket, packed, num_seqs, num_seqs, False, inputs.extra_page_updates, [], num_seqs)
    body, head = [], []
    for _ in range(_STEPS.value):
        start = time.perf_counter()
        hosts.send(("dispatch_body", (step,)))
        middle = time.perf_counter()
        hosts.send(("dispatch_head", (None,)))
        body.append(middle - start)
        head.append(time.perf_counter() - middle)
        time.sleep(0.002)
    hosts.close()
    for other in others:
        other.join()
    figures = {
        "num_hosts": n,
        "num_seqs": num_seqs,
        "bytes": len(pickle.dumps(("dispatch_body", (step,)), protocol=5)),
        "body_us": round(1e6 * statistics.median(body), 1),
        "head_us": round(1e6 * statistics.median(head), 1),
        "body_p90_us": round(1e6 * statistics.quantiles(body, n=10)[-1], 1),
    }
    print(json.dumps(figures))
    write_json(_JSON.value, figures | provenance())


if __name__ == "__main__":
    run_command(main)
