"""Flags that say when a workload's requests arrive, with vLLM's names, and the workload with its times."""

from __future__ import annotations

import math
import sys

from absl import flags

from jaxserve.cli.common.workload_flags import read_workload
from jaxserve.workloads.traffic import as_recorded, at_once, at_rate, fitting
from jaxserve.workloads.workload import Workload

flags.DEFINE_alias("dataset_name", "workload")
flags.DEFINE_alias("num_prompts", "num_requests")
_BURSTINESS = flags.DEFINE_float("burstiness", 1.0, "Shape of the Gamma gaps between requests: 1 is Poisson, less is burstier.")
_FROM_TRACE = flags.DEFINE_bool("arrivals_from_trace", False, "Requests arrive at the trace's own times.")


def read_traffic(
    model: str, max_model_len: int | None, request_rate: float, seed: int, workload_seed: int | None = None
) -> Workload:
    """The workload of the flags, its requests `request_rate` a second (inf: all at once) or at the trace's own times. seed: of the
    arrivals; workload_seed: of the requests, in the flag's place.

    Raises:
      ValueError: flags that contradict each other or mean nothing here, a source that has no request to give, a rate that is not
        above 0.
    """
    if _FROM_TRACE.value and flags.FLAGS.workload != "trace":
        raise ValueError(
            f"--arrivals_from_trace means nothing to --workload={flags.FLAGS.workload}, which has no times: give --request_rate"
        )
    if flags.FLAGS["burstiness"].present and math.isinf(request_rate):
        raise ValueError(f"--burstiness={_BURSTINESS.value:g} is of the gaps between requests at a rate: give --request_rate")
    workload = read_workload(model, None, workload_seed)
    if max_model_len is not None:
        workload, num_longer = fitting(workload, max_model_len)
        if num_longer:
            print(f"{num_longer} requests are longer than max_model_len={max_model_len} and left out", file=sys.stderr)
    if _FROM_TRACE.value:
        if not math.isinf(request_rate):
            raise ValueError(f"--request_rate={request_rate:g} contradicts --arrivals_from_trace; give one of them")
        if len({r.arrived_at for r in workload.requests}) == 1 < len(workload.requests):
            path = flags.FLAGS.dataset_path
            raise ValueError(f"--arrivals_from_trace: {path} has no times; give it a column arrived_at, or give --request_rate")
        return as_recorded(workload)
    if math.isinf(request_rate):
        return at_once(workload)
    return at_rate(workload, request_rate, seed, _BURSTINESS.value)
