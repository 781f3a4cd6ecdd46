"""Steps that are certain before they are scheduled: runs of decodes in which nobody comes, ends or waits for a page.

Owns when the scheduler's next n schedules are known to be its running requests' next n tokens and nothing else, and what each of
them reads. `Scheduler.skip_decodes` then leaves the scheduler as n calls of `schedule` and `update` would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxserve.moved import forward
from jaxserve.scheduling.scheduler import Scheduler

MAX_STEPS = 512  # a run; longer ones are several


def num_certain_steps(scheduler: Scheduler, num_in_flight: int) -> int:
    """How many of the next steps decode all running requests and do nothing else, unless a request is added; 0 if that isn't sure.

    num_in_flight: 0 or 1, tokens of each running request that were scheduled and have not come back.
    """
    rows, pool = scheduler.rows, scheduler.pool
    order = rows.order
    if not len(order) or scheduler.may_admit():
        return 0
    computed, known = rows.num_computed[order], rows.num_known[order]
    if (computed < rows.prefill_end[order]).any() or (known - computed != 1 - num_in_flight).any():
        return 0  # a prompt is not finished
    n = min(MAX_STEPS, int((rows.limit[order] - known).min()) - 1)
    while n > 1 and _num_new_pages(scheduler, order, n).sum() > pool.num_free_pages:
        n //= 2
    return n if n > 1 else 0


def _num_new_pages(scheduler: Scheduler, order: np.ndarray, num_steps: int) -> np.ndarray:
    """i32[n]: pages that each row takes in so many decodes."""
    rows = scheduler.rows
    return np.maximum(0, -(-(rows.num_computed[order] + num_steps - rows.capacity[order]) // rows.page_size))


def kv_tokens_of_run(
    scheduler: Scheduler,
    decodes: np.ndarray,  # intp[n]: rows
    num_steps: int,
    window: int | None,
) -> np.ndarray:
    """i64[num_steps]: what demand.step_demand would count of each of their next steps."""
    rows = scheduler.rows
    lens = rows.num_computed[decodes].astype(np.int64) + np.arange(1, num_steps + 1)[:, None]
    if window is not None:
        lens = np.minimum(lens, window)
    return -(-lens // rows.page_size).sum(axis=1) * rows.page_size


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
