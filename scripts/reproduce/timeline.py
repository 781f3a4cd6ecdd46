"""Timelines of few requests: what the scheduler put into each step, and when the step ran.

Owns the loop (a step is scheduled when the one before has returned, in virtual time) and the drawings. What is drawn are the real
scheduler's decisions.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.buckets.plan import Bucket
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.demand import step_demand
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.schedule import Schedule
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step_times.fitted import StepTimes
from jaxserve.workloads.workload import Workload

PAGE_SIZE = 16


@dataclass(frozen=True)
class Step:
    """One step. parts: what it held of each request, by letter, in the notation of Sarathi-Serve's figure 7: "d" a decode, "p" a
    whole prompt, "p0", "p1" its chunks. decodes, chunk_tokens: how many of it are which."""

    start: float
    end: float
    parts: dict[str, str]
    decodes: int
    chunk_tokens: int

    def __str__(self) -> str:
        return " ".join(f"{name}{part}" for name, part in sorted(self.parts.items()))


def timeline(workload: Workload, limits: SchedulerConfig, step_times: StepTimes, num_pages: int = 4096) -> list[Step]:
    """The steps in which requests A, B, ... (in the workload's order, at most 26) are served, one in flight, shapes not padded.

    ValueError: more requests, or one that the limits could never serve.
    """
    given = workload.requests
    if len(given) > len(string.ascii_uppercase):
        raise ValueError(f"{len(given)} requests, and {len(string.ascii_uppercase)} letters to call them by")
    scheduler = Scheduler(limits, PagePool(num_pages, PAGE_SIZE, False))
    waiting, steps, now, num_chunks = list(enumerate(given)), [], 0.0, Counter()
    while True:
        while waiting and waiting[0][1].arrived_at <= now:
            i, request = waiting.pop(0)
            params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
            name = string.ascii_uppercase[i]
            scheduler.add(Request(name, [i + 1] * request.num_prompt_tokens, params, arrival=request.arrived_at))
        schedule = scheduler.schedule()
        if schedule is None:
            if not waiting:
                return steps
            now = waiting[0][1].arrived_at
            continue
        parts = parts_of(schedule, num_chunks)
        demand = step_demand(schedule, PAGE_SIZE, step_times.window)
        bucket = Bucket(demand.tokens, demand.seqs, demand.max_q_len)
        end = now + step_times.host_seconds + step_times.seconds(bucket, demand.samples, demand.kv_tokens, demand.pairs)
        steps.append(Step(now, end, parts, schedule.num_decodes, schedule.num_tokens - schedule.num_decodes))
        scheduler.update(schedule, np.ones(schedule.num_seqs, np.int32))
        now = end


def parts_of(schedule: Schedule, num_chunks: Counter[str]) -> dict[str, str]:
    """What a step holds of each request. num_chunks: chunks of each in the steps before, which this counts on."""
    parts = {}
    for i, request in enumerate(schedule.requests):
        name = request.request_id
        if i < schedule.num_decodes:
            parts[name] = "d"
        elif schedule.samples[i] and not num_chunks[name]:
            parts[name] = "p"
        else:
            parts[name] = f"p{num_chunks[name]}"
            num_chunks[name] += 1
    return parts


def longest_gap(steps: Sequence[Step], names: Sequence[str]) -> float:
    """Seconds: the longest time between two tokens of one of these requests. A step gives a request a token if it decodes it, or
    ends its prompt; of a prompt in chunks the last one does."""
    longest = 0.0
    for name in names:
        held = [(step.end, step.parts[name]) for step in steps if name in step.parts]
        last_chunk = max((i for i, (_, part) in enumerate(held) if part != "d"), default=0)
        ends = [end for end, _ in held[last_chunk:]]
        longest = max([longest, *np.diff(ends).tolist()])
    return longest


def drawn(steps: Sequence[Step]) -> str:
    """The steps as text, equal ones in a row as one with their number."""
    cells: list[list[Any]] = []
    for step in steps:
        if cells and cells[-1][0] == str(step):
            cells[-1][1] += 1
        else:
            cells.append([str(step), 1])
    return " \\| ".join(text if times == 1 else f"{text} x{times}" for text, times in cells)


def draw(panels: Mapping[str, Sequence[Step]], path: Path, title: str) -> None:
    """Each timeline as a row of boxes over time: steps of decodes, of prompts, of both."""
    from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]  (optional)

    from jaxserve.cli.common.plots import figure, save

    made, axes = figure()
    axis = axes[0][0]
    colours = {"decodes": "C0", "prompts": "C1", "both": "C2"}
    names = list(reversed(list(panels)))
    for row, steps in enumerate(panels[name] for name in names):
        for step in steps:
            kind = "decodes" if not step.chunk_tokens else "both" if step.decodes else "prompts"
            axis.barh(
                row, step.end - step.start, left=step.start, height=0.7, color=colours[kind], edgecolor="white", linewidth=0.5
            )
    axis.set(yticks=range(len(panels)), yticklabels=names, xlabel="time (s)", title=title)
    made.legend(
        handles=[Patch(color=c, label=f"a step of {k}") for k, c in colours.items()], loc="outside lower right", ncols=3, fontsize=7
    )
    save(made, path)


def draw_stages(panels: Mapping[str, Any], path: Path, title: str) -> None:
    """Each PipelineReplay as two rows of boxes, a stage each: micro-batches with tokens of prompts, and of decodes alone. What is
    blank between two boxes of a stage is its waiting."""
    from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]  (optional)

    from jaxserve.cli.common.plots import figure, save

    made, axes = figure(len(panels), 1)
    colours = {"with prompts": "C1", "decodes alone": "C0"}
    for axis, (name, run) in zip(axes[:, 0], panels.items(), strict=True):
        prompts = run.demands.tokens > run.demands.decodes
        for stage in range(run.starts.shape[1]):
            colour = [colours["with prompts" if p else "decodes alone"] for p in prompts]
            axis.barh(
                -stage, run.seconds[:, stage], left=run.starts[:, stage], height=0.8, color=colour, edgecolor="white", linewidth=0.3
            )
        axis.set(yticks=[0, -1], yticklabels=["stage 0", "stage 1"], xlabel="time (s)", title=f"{title}, {name}")
    handles = [Patch(color=c, label=f"a micro-batch {k}") for k, c in colours.items()]
    made.legend(handles=handles, loc="outside lower right", ncols=2, fontsize=7)
    save(made, path)
