"""How a step is composed and which request comes first, as data: a table of policies and a table of orders.

Owns `BatchingPolicy`, which the scheduler reads while it composes a step, and the keys by which waiting requests are ordered. Knows
no pages, rows or counters.

The policies that the literature compares are settings of one scheduler, so one trace can run under each:

sarathi        Stall-free batching: every running decode, then chunks of prompts within the rest of the budget. With `mixed=False`
               steps of chunks and steps of decodes alternate (chunked-prefills-only); `chunked=False` is hybrid-batching-only.
               (Sarathi-Serve, Agrawal et al., OSDI 2024; both ablations: section 5.4.1 there.)
orca           Iteration-level scheduling: whole prompts join the decodes of a step. The KV of prompt + max_tokens is reserved at
               admission. The first request that does not fit stops admission. Nothing is preempted. (Orca, Yu et al., OSDI 2022.)
prefill_first  A step is all prefill or all decode, and a prefill whenever one fits. With `chunked=True` a long prompt takes several
               prefill steps in a row. (vLLM as of Kwon et al., SOSP 2023.)
request_level  A batch is admitted only when nothing runs, and ends with its longest request. Its prompts may take several prefill
               steps; the first decode closes the batch. (FasterTransformer under Triton, the baseline of Orca's section 2.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not at run time: the commands' --help, which reads the table below, imports no numpy
    from jaxserve.request import Request


@dataclass(frozen=True, kw_only=True)
class BatchingPolicy:
    """The rules by which a step is composed.

    chunked: a prompt may be split over steps.
    mixed: prompts and decodes may share a step.
    prefill_first: where they may not, a step is a prefill whenever one fits. False: prefill and decode steps alternate while there
        is work for both.
    reserve_full: pages for prompt + max_tokens are taken at admission, so nothing is preempted. False: pages for the tokens known
        then are taken, and decodes add a page at a time.
    admit_only_when_idle: no request joins a batch once it has decoded.
    """

    chunked: bool
    mixed: bool
    prefill_first: bool = False
    reserve_full: bool = False
    admit_only_when_idle: bool = False


BATCHING_POLICIES: dict[str, BatchingPolicy] = {
    "sarathi": BatchingPolicy(chunked=True, mixed=True),
    "orca": BatchingPolicy(chunked=False, mixed=True, reserve_full=True),
    "prefill_first": BatchingPolicy(chunked=False, mixed=False, prefill_first=True),
    "request_level": BatchingPolicy(chunked=False, mixed=False, prefill_first=True, reserve_full=True, admit_only_when_idle=True),
}


OrderKey = tuple[int, float, int]

# A smaller key is served sooner. The last item, the order of adding, is unique. A preempted request keeps its key, so it returns
# ahead of every request that came after it.
ORDER_KEYS: dict[str, Callable[[Request], OrderKey]] = {
    "fcfs": lambda request: (0, 0.0, request.order),
    "priority": lambda request: (request.priority, request.arrival, request.order),
}
ORDERS: tuple[str, ...] = tuple(ORDER_KEYS)
