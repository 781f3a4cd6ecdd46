"""Sections of reproduce_literature that schedule requests: timelines, tail latency over load, TP across nodes, knobs.

Owns these comparisons. What a machine and a contender are is sarathi_setups.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.buckets.unpadded import UnpaddedPlan
from jaxserve.cli.common.tables import table
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.simulation.capacity import Objective, Spread, Trial, capacity
from jaxserve.simulation.pipeline import PipelineReplay, replay_stages
from jaxserve.simulation.replay import Replay, replay
from jaxserve.step_times.analytic import Deployment
from jaxserve.step_times.hardware import ETHERNET_100G
from jaxserve.workloads.traffic import at_once, at_rate
from jaxserve.workloads.workload import Workload, WorkloadRequest
from scripts.reproduce.measured_steps import MeasuredSteps
from scripts.reproduce.published import TAIL_SECONDS
from scripts.reproduce.sarathi_costs import step_seconds
from scripts.reproduce.sarathi_plots import lines
from scripts.reproduce.sarathi_setups import (
    DATASETS,
    FALCON_TP8,
    PAGE_SIZE,
    SETUPS,
    Contender,
    lengths,
    orca,
    run_at,
    sarathi,
    stages,
    vllm,
)
from scripts.reproduce.timeline import draw, draw_stages, drawn, longest_gap, timeline

MISTRAL, YI, FALCON = (SETUPS[name].machine for name in ("mistral-7b", "yi-34b", "falcon-180b"))
POLICIES = {"vLLM": "prefill_first", "Orca": "orca", "FasterTransformer": "request_level", "Sarathi-Serve": "sarathi"}
# Sarathi-Serve's figure 7: A and B decode; C and D come while their first decode runs. Prompt, output, seconds.
FOUR = ((64, 6, 0.0), (64, 8, 0.0), (900, 5, 0.05), (900, 5, 0.05))
BUDGET = 512  # of Sarathi's steps there


def four_requests(scale: int = 1) -> Workload:
    """The trace of figure 7; scale: prompts so many times as long."""
    return Workload("figure 7", tuple(WorkloadRequest(scale * p, o, at) for p, o, at in FOUR))


def policies(folder: Path) -> tuple[str, dict[str, Any]]:
    """Figure 7: one small trace under four policies, as the scheduler composed its steps (Yi-34B's step times)."""
    panels, rows, data = {}, [], {}
    for name, policy in POLICIES.items():
        limits = SchedulerConfig(
            max_model_len=2048, max_num_batched_tokens=BUDGET if policy == "sarathi" else 2048, max_num_seqs=8, policy=policy
        )
        panels[name] = steps = timeline(four_requests(), limits, stages(YI)[0])
        gap, last = longest_gap(steps, "AB"), steps[-1].end
        rows.append([name, drawn(steps), 1e3 * gap, 1e3 * last])
        data[name] = {"steps": [str(step) for step in steps], "longest_gap": gap, "end": last}
    draw(panels, folder / "timeline.png", "four requests, Yi-34B on two A100s")
    return table(("policy", "steps", "longest gap of A, B (ms)", "all done (ms)"), rows), data


def pipeline(folder: Path) -> tuple[str, dict[str, Any]]:
    """Figure 8: the same four requests, with longer prompts that come one after another, on two stages."""
    requests = tuple(WorkloadRequest(p, 24, 0.2 * i) for i, p in enumerate((1024, 4096, 512, 4096)))
    panels, rows, data = {}, [], {}
    for name, contender in (("Orca", orca(8)), ("Sarathi-Serve, 512 tokens", sarathi(512))):
        limits = contender.limits(8192)
        plan = UnpaddedPlan(limits.max_num_batched_tokens, limits.max_num_seqs)
        run = replay_stages(Workload("figure 8", requests), plan, stages(FALCON), FALCON.send_seconds, limits, 4096)
        assert isinstance(run, PipelineReplay), "Falcon's machine has two stages"
        panels[name], account = run, run.bubbles
        seconds = {kind: getattr(account, kind) for kind in ("pb1", "pb2", "pb3")}
        rows.append([name, *(1e3 * v for v in seconds.values()), 100 * account.share, 1e3 * run.duration])
        data[name] = seconds | {"share": account.share, "end": run.duration}
    draw_stages(panels, folder / "pipeline.png", "four requests, Falcon-180B TP4-PP2")
    head = ("", "PB1: prompts unlike (ms)", "PB2: prompts beside none (ms)", "PB3: decodes (ms)", "bubbles (%)", "all done (ms)")
    return table(head, rows), data


def tail(folder: Path) -> tuple[str, dict[str, Any]]:
    """Figure 1b: P99 time between tokens over load, by policy; five seeds of 128 requests, as many as the artifact's. By our step
    times, and by those that the artifact measured."""
    rates, request_level = (0.55, 0.7, 1.0), Contender("request level", "request_level", max_num_seqs=16)
    contenders = (vllm(256), replace(sarathi(1536), max_num_seqs=256), orca(16), request_level)
    (stage,) = stages(YI)
    rows, curves, data = [], {}, {}
    for name, step_times in (("ours", stage), ("measured", MeasuredSteps(stage))):
        for contender in contenders:
            found = [
                [served(YI, contender, rate, seed, step_times).times.gap_quantile(0.99) for seed in range(5)] for rate in rates
            ]
            spreads, theirs = [Spread.of(values) for values in found], TAIL_SECONDS.get(contender.name, {})
            cells = [cell for rate, spread in zip(rates, spreads, strict=True) for cell in (f"{spread}", theirs.get(rate))]
            rows.append([contender.name, name, *cells])
            curves[f"{contender.name}, steps {name}"] = [s.mean for s in spreads]
            data[f"{contender.name}, steps {name}"] = dict(zip(map(str, rates), found, strict=True))
    lines(rates, curves, folder / "tail.png", "requests a second", "P99 time between tokens (s)", "Yi-34B, openchat_sharegpt4")
    head = ("P99 TBT (s)", "step times", *(cell for rate in rates for cell in (f"{rate}/s", "read off, about")))
    return table(head, rows), data


def served(
    machine: Deployment, contender: Contender, rate: float, seed: int, step_times: Any, num_requests: int = 128, give_up: Any = None
) -> Replay:
    """Requests of openchat_sharegpt4 with Poisson arrivals on a machine of one stage, by these step times."""
    dataset = "openchat_sharegpt4"
    limits, workload = contender.limits(DATASETS[dataset]), at_rate(lengths(dataset, num_requests, seed), rate, seed)
    plan = UnpaddedPlan(limits.max_num_batched_tokens, limits.max_num_seqs)
    return replay(workload, plan, step_times, limits, machine.num_pages(PAGE_SIZE, DATASETS[dataset]), give_up=give_up)


def capacities(folder: Path) -> tuple[str, dict[str, Any]]:
    """Yi-34B's capacity (figures 10 and 12) by our step times and by those that the artifact measured; 2048 requests a trial, one
    seed, neighbouring rates 5% apart, as in benchmarks/sarathi."""
    setup, rows, data = SETUPS["yi-34b"], [], {}
    (stage,) = stages(YI)
    for kind, slo in setup.slos.items():
        for name, step_times in (("ours", stage), ("measured", MeasuredSteps(stage))):
            contenders = (sarathi(setup.budgets[kind]), vllm(), orca(setup.orca_seqs))
            found = {contender.name: capacity_of(contender, Objective(slo), step_times) for contender in contenders}
            ours, *others = found.values()
            rows.append([f"{kind}, {slo} s", name, *found.values(), *(ours / other if other else None for other in others)])
            data[f"{kind}, {name}"] = found
    head = ("objective", "step times", "sarathi", "vLLM", "Orca", "over vLLM", "over Orca")
    return table(head, rows), data


def capacity_of(contender: Contender, objective: Objective, step_times: Any) -> float:
    """Requests a second on Yi-34B's machine, with these step times."""

    def trial(rate: float) -> Trial:
        run = served(YI, contender, rate, 0, step_times, 2048, objective.missed_by)
        return Trial.of(rate, run.times, objective.quantile)

    return capacity(trial, objective, start=0.6, precision=0.05)


def nodes(folder: Path) -> tuple[str, dict[str, Any]]:
    """Figure 13a: TP8 across nodes over TP4-PP2. A decode iteration alone; what the artifact's command measures, which is the
    median time between tokens of a server at 0.75/s with chunks of 512; and both with slower networks."""
    rows, data = [], {}
    for batch in (8, 16, 32, 64, 128):
        alone = [1e3 * step_seconds(machine, batch, 2048) for machine in (FALCON_TP8, FALCON)]
        served = [served_median(machine, batch) for machine in (FALCON_TP8, FALCON)]
        medians = [1e3 * median for median, _ in served]
        rows.append([batch, *alone, alone[0] / alone[1], *medians, medians[0] / medians[1], *(100 * share for _, share in served)])
        data[str(batch)] = {"alone": alone, "served": medians, "with_prompts": [share for _, share in served]}
    head = (
        "decodes",
        "TP8 (ms)",
        "TP4-PP2 (ms)",
        "ratio",
        "served, TP8 (ms)",
        "TP4-PP2 (ms)",
        "ratio",
        "steps with prompts, TP8 (%)",
        "TP4-PP2 (%)",
    )
    text, turns = table(head, rows), []
    for name, slower in NETWORKS.items():
        for batch in (8, 32, 128):
            ratio = lambda factor, batch=batch, slower=slower: across_ratio(slower(factor), batch)  # noqa: E731
            one, two = (factor_for(ratio, wanted) for wanted in (1.0, 2.0))
            turns.append([name, batch, ratio(1.0), one, two])
            data[f"{name}, {batch}"] = {"ratio": ratio(1.0), "for_1": one, "for_2": two}
    return text + "\n" + table(("slower network", "decodes", "ratio as it is", "times for 1", "times for 2"), turns), data


NETWORKS: dict[str, Callable[[float], Any]] = {
    "latency of a hop": lambda f: replace(ETHERNET_100G, hop_seconds=tuple(f * s for s in ETHERNET_100G.hop_seconds)),
    "bandwidth": lambda f: replace(ETHERNET_100G, share=ETHERNET_100G.share / f),
}


def across_ratio(network: Any, batch: int) -> float:
    """A decode iteration of TP8 over one of TP4-PP2, over such a network."""
    across, staged = (step_seconds(replace(machine, network=network), batch, 2048) for machine in (FALCON_TP8, FALCON))
    return across / staged


def factor_for(ratio: Callable[[float], float], wanted: float) -> float:
    """By what factor, 1 to 1000, the ratio becomes `wanted`; it rises with the factor. 1 where it is there already, 1000 where it
    never is."""
    low, high = 1.0, 1000.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if ratio(middle) >= wanted else (middle, high)
    return high


def served_median(machine: Deployment, max_num_seqs: int) -> tuple[float, float]:
    """(median seconds between tokens, share of the steps that hold tokens of prompts) of figure-8/pipeline_parallel_latency.sh in
    the artifact: Sarathi with chunks of 512 at 0.75 requests a second; 512 requests here, of the artifact's 2048."""
    run = run_at(machine, replace(sarathi(512), max_num_seqs=max_num_seqs), "openchat_sharegpt4", 0.75, 512, 0)
    return run.times.gap_quantile(0.5), float((run.demands.tokens > run.demands.decodes).mean())


def offline(contender: Contender, num_requests: int = 512) -> Replay:
    """A Replay of requests that are all there at the beginning, Mistral-7B on an A100."""
    dataset = "openchat_sharegpt4"
    limits = contender.limits(DATASETS[dataset])
    plan = UnpaddedPlan(limits.max_num_batched_tokens, limits.max_num_seqs)
    return replay(at_once(lengths(dataset, num_requests, 0)), plan, stages(MISTRAL)[0], limits, MISTRAL.num_pages(PAGE_SIZE, 8192))


def knobs(folder: Path) -> tuple[str, dict[str, Any]]:
    """Throughput and time between tokens over the token budget, and over the batch, of a server that always has work."""
    sweeps = {
        "token budget": {b: replace(sarathi(b), max_num_seqs=min(128, b)) for b in (128, 256, 512, 1024, 2048, 4096)},
        "batch": {n: replace(sarathi(512), max_num_seqs=n) for n in (8, 16, 32, 64, 128, 256)},
    }
    texts, data = [], {}
    for knob, contenders in sweeps.items():
        rows = []
        for value, contender in contenders.items():
            run = offline(contender)
            gaps = [1e3 * run.times.gap_quantile(q) for q in (0.5, 0.99)]
            rows.append([value, float(run.times.num_output.sum()) / run.duration, *gaps, run.stats.num_preemptions])
        data[knob] = rows
        curves = {
            "output tokens/s": [r[1] for r in rows],
            "median time between tokens (ms)": [r[2] for r in rows],
            "P99 (ms)": [r[3] for r in rows],
        }
        values = list(contenders)
        lines(
            values,
            curves,
            folder / f"knobs_{knob.split()[-1]}.png",
            knob,
            "tokens/s; ms",
            "Mistral-7B, A100, always work",
            log=True,
        )
        texts.append(table((knob, "output tokens/s", "median TBT (ms)", "P99 TBT (ms)", "preemptions"), rows))
    return "\n".join(texts), data
