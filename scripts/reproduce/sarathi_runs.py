"""Sections of reproduce_sarathi that serve one workload a scheduler and look at the latencies: the ablation, and the stalls."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from jaxserve.cli.common.tables import table
from jaxserve.simulation.capacity import Spread
from scripts.reproduce.sarathi_session import Session
from scripts.reproduce.sarathi_setups import DATASETS, SETUPS, Contender, orca, sarathi, vllm

PIPELINES, BUBBLE_RATE, ORCA_RATE = ("llama2-70b", "falcon-180b"), 0.4, 0.14
RATES = {"openchat_sharegpt4": 1.0, "arxiv_summarization": 0.5}  # of the artifact's ablation, requests a second
PUBLISHED = {  # (P50 TTFT, P99 time between tokens), seconds
    "openchat_sharegpt4": {"hybrid only": (0.53, 0.68), "chunked only": (1.04, 0.17), "both": (0.76, 0.14)},
    "arxiv_summarization": {"hybrid only": (3.78, 1.38), "chunked only": (5.38, 0.20), "both": (3.90, 0.17)},
}


def ablation(session: Session) -> tuple[str, dict[str, Any]]:
    """Yi-34B on two A100s, 128 requests, a budget of 1024: mixing without chunks, chunks without mixing, both; over 10 seeds."""
    contenders = {
        "hybrid only": Contender("hybrid only", "sarathi", chunked=False),
        "chunked only": Contender("chunked only", "sarathi", 1024, mixed=False),
        "both": sarathi(1024),
    }
    rows, data = [], {}
    for dataset, published in PUBLISHED.items():
        found: dict[str, Any] = {}
        for name, contender in contenders.items():
            runs = [session.run(SETUPS["yi-34b"].machine, contender, dataset, RATES[dataset], 128, seed) for seed in range(10)]
            ttft = Spread.of([float(np.median(run.times.seconds("ttft"))) for run in runs])
            tbt = Spread.of([run.times.gap_quantile(0.99) for run in runs])
            found[name] = {"ttft": ttft.mean, "tbt": tbt.mean}
            theirs = published[name]
            rows.append([dataset, name, f"{ttft}", theirs[0], f"{tbt}", theirs[1]])
        data[dataset] = found
    return table(("dataset", "", "P50 TTFT (s)", "published", "P99 TBT (s)", "published"), rows) + "\n" + _order(data), data


def _order(data: dict[str, Any]) -> str:
    """Whether ours are in the published order, for each dataset and latency; and how near they are."""
    lines = []
    for dataset, found in data.items():
        for i, metric in enumerate(("ttft", "tbt")):
            ours = sorted(found, key=lambda name: found[name][metric])
            theirs = sorted(PUBLISHED[dataset], key=lambda name: PUBLISHED[dataset][name][i])
            verdict = "agrees" if ours == theirs else f"contradicts (published: {' < '.join(theirs)})"
            lines.append(f"- {dataset}, {metric.upper()}: {' < '.join(ours)}: {verdict}")
    ratios = [
        found[name][metric] / PUBLISHED[dataset][name][i]
        for dataset, found in data.items()
        for name in found
        for i, metric in enumerate(("ttft", "tbt"))
    ]
    near = sum(2 / 3 <= r <= 4 / 3 for r in ratios)
    span = f"{min(ratios):.2f} to {max(ratios):.2f}"
    lines.append(f"- {near} of {len(ratios)} figures are within a third of the published; all are {span} times it")
    return "\n".join(lines) + "\n"


def bubbles(session: Session) -> tuple[str, dict[str, Any]]:
    """What the stages of the two pipelines lose to waiting, by kind, at a rate that Sarathi and vLLM can serve, beyond Orca's
    capacity, and at one that Orca can too."""
    kinds, rows, data = ("pb1", "pb2", "pb3", "send", "idle"), [], {}
    for name, rate in itertools.product(PIPELINES, (BUBBLE_RATE, ORCA_RATE)):
        setup = SETUPS[name]
        for contender in (sarathi(setup.budgets["strict"]), vllm(), orca(setup.orca_seqs)):
            run = session.run(setup.machine, contender, "openchat_sharegpt4", rate, 256, 0)
            account = run.bubbles
            seconds = {kind: getattr(account, kind) for kind in (*kinds, "busy")}
            data[f"{name}, {contender.name}, {rate}/s"] = seconds | {"share": account.share}
            whole = sum(seconds.values())
            rows.append([name, f"{rate}/s", contender.name, *(100 * seconds[kind] / whole for kind in kinds), 100 * account.share])
    head = ("setup", "at", "", "PB1: prompts unlike (%)", "PB2: prompts beside none (%)", "PB3: decodes (%)", "sends (%)")
    head += ("idle (%)", "bubbles over bubbles and work (%)")
    verdicts = []
    for name in PIPELINES:
        for rate, other in ((BUBBLE_RATE, "vllm-128"), (ORCA_RATE, "vllm-128"), (ORCA_RATE, f"orca-{SETUPS[name].orca_seqs}")):
            ours, theirs = (data[f"{name}, {who}, {rate}/s"]["share"] for who in ("sarathi-512", other))
            verdict = "agrees" if ours < theirs else "contradicts"
            verdicts.append(f"{name}, {rate}/s, {other}: {100 * ours:.2g}% and {100 * theirs:.2g}%, {verdict}")
    note = f"{BUBBLE_RATE}/s is beyond Orca's capacity: its queue grows, and it is not judged there. "
    note += "Published: uniform batches have fewer bubbles than vLLM's and Orca's.\n\n"
    note += "".join(f"- {verdict}\n" for verdict in verdicts)
    return table(head, rows) + "\n" + note, data


def stalls(session: Session) -> tuple[str, dict[str, Any]]:
    """Yi-34B on two A100s and long prompts: how long decodes wait behind other requests' prompts."""
    from scripts.reproduce.sarathi_plots import stall_timeline

    dataset, rate = "arxiv_summarization", 0.3
    runs, rows, data = {}, [], {}
    for contender in (vllm(), sarathi(512)):
        run = session.run(SETUPS["yi-34b"].machine, contender, dataset, rate, 128, 0)
        runs[contender.name] = run
        gaps = run.times
        long = float(gaps.gap_counts[gaps.gaps > 1.0].sum() / gaps.gap_counts.sum())
        quantiles = [gaps.gap_quantile(q) for q in (0.5, 0.99, 1.0)]
        data[contender.name] = {"median": quantiles[0], "p99": quantiles[1], "longest": quantiles[2], "over_1s": long}
        rows.append([contender.name, 1e3 * quantiles[0], quantiles[1], quantiles[2], 100 * long, run.duration])
    stall_timeline(runs, session.folder / "stalls.png", f"Yi-34B, {dataset}, {rate}/s")
    head = ("", "median TBT (ms)", "P99 (s)", "longest (s)", "gaps over 1 s (%)", "to the end (s)")
    longest = [v["longest"] for v in data.values()]
    note = f"Published: stalls of several seconds with vLLM, none with Sarathi. Ours {longest[0]:.2g} s and {longest[1]:.2g} s: "
    return table(head, rows) + "\n" + note + ("agrees" if longest[0] > 1 > longest[1] else "contradicts") + ".\n", data


assert set(PUBLISHED) == set(DATASETS)
