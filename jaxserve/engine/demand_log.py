"""What each step asked for, as lines of JSON: what bucket plans are searched from."""

from __future__ import annotations

import json

from jaxserve.batching.layout import StepInputs
from jaxserve.scheduling.demand import step_demand
from jaxserve.scheduling.schedule import Schedule


class DemandWriter:
    """Appends a line a step to a file. Close it."""

    def __init__(self, path: str, page_size: int):
        self._file = open(path, "a", buffering=1)
        self._page_size = page_size

    def write(self, step: int, schedule: Schedule, inputs: StepInputs, num_waiting: int) -> None:
        """step: its number, counted from 1. num_waiting: requests that wait for a row."""
        demand = step_demand(schedule, self._page_size)._asdict()
        record = {"step": step, **{name: int(value) for name, value in demand.items()}}
        record |= {"bucket": [inputs.bucket.tokens, inputs.bucket.seqs], "waiting": num_waiting}
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()
