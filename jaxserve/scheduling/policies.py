"""How a step is composed and who comes first, as data: one table of policies, two orders.

Owns `BatchingPolicy` (what the scheduler asks while it composes a step) and the two keys by which waiting requests are ordered.
Knows no pages, rows or counters: the scheduler applies what is written here.

The policies that the literature compares are settings of one scheduler, so that one trace runs under each:

sarathi        Stall-free batching: every running decode, then chunks of prompts within what the budget leaves (Sarathi-Serve,
               Agrawal et al., OSDI 2024). `mixed=False` is its chunked-prefills-only ablation, where chunk steps and decode steps
               alternate, and `chunked=False` its hybrid-batching-only ablation (section 5.4.1 there).
orca           Iteration-level scheduling: whole prompts join the decodes of the step; the KV of prompt + max_tokens is reserved at
               admission, the first that does not fit stops admission, nothing is ever preempted (Orca, Yu et al., OSDI 2022).
prefill_first  A step is all prefill or all decode, prefill whenever one fits (vLLM as of Kwon et al., SOSP 2023). With
               `chunked=True` a long prompt takes several prefill steps in a row.
request_level  A batch is admitted only when nothing runs and ends with its longest member (FasterTransformer under Triton, the
               baseline of Orca's section 2). Its prompts may take several prefill steps; the first decode closes the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not at run time: the commands' --help, which reads the table below, imports no numpy
    from jaxserve.request import Request


@dataclass(frozen=True, kw_only=True)
class BatchingPolicy:
    """The batch-composition rule.

    chunked: a prompt may be split over steps. mixed: prompts and decodes may share a step. prefill_first: where they may not, a
    step is a prefill whenever one fits; otherwise prefill and decode steps alternate while there is work for both. reserve_full:
    pages for prompt + max_tokens are taken at admission, so that nothing is preempted; otherwise those of the tokens known then,
    and decodes grow a page at a time. admit_only_when_idle: nobody joins a batch once it has decoded.
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

# Smaller is served sooner; the last item, the order of adding, is unique. A preempted request keeps its key: it returns ahead of
# everything that came after it, which in arrival order is the front.
ORDER_KEYS: dict[str, Callable[[Request], OrderKey]] = {
    "fcfs": lambda request: (0, 0.0, request.order),
    "priority": lambda request: (request.priority, request.arrival, request.order),
}
ORDERS: tuple[str, ...] = tuple(ORDER_KEYS)
