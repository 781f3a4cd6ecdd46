"""Sections of reproduce_sarathi that search for capacities: the four setups, objectives against batch sizes, across nodes, budgets.

Owns which contenders meet where. Trials are kept in a Finished, so that objectives share the rates that they both ask for and a run
that broke off goes on.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxserve.simulation.analytic import Deployment
from jaxserve.simulation.capacity import Objective, Spread, Trial, capacity, ratio
from scripts.finished import Finished
from scripts.sarathi_costs import DECODE_BATCH, DECODE_KV, step_seconds
from scripts.sarathi_report import agreement, table
from scripts.sarathi_setups import DATASETS, FALCON_TP8, MAX_REQUESTS, SETUPS, Contender, orca, run_at, sarathi, vllm

# Where a search begins, requests a second; prompts of the second dataset are four times as long.
START = {"mistral-7b": 3.0, "yi-34b": 1.2, "llama2-70b": 0.6, "falcon-180b": 0.6}
SHARE = {"openchat_sharegpt4": 1.0, "arxiv_summarization": 0.3}


@dataclass
class Search:
    """Capacities over seeds. trial_seconds: requests arrive for at least so long, 128 to MAX_REQUESTS of them: many more must come
    than find a place at once, or a rate beyond capacity passes for good. precision: between neighbouring rates."""

    finished: Finished
    progress: Any
    seeds: int
    trial_seconds: float
    precision: float

    def trial(self, machine: Deployment, contender: Contender, dataset: str, rate: float, seed: int, quantile: float) -> Trial:
        key = f"{machine}, {contender.name}, {dataset}, seed {seed}, {rate:.6g}/s"
        if key not in self.finished:
            self.progress.set_postfix_str(key, refresh=False)
            num_requests = min(MAX_REQUESTS, max(128, math.ceil(rate * self.trial_seconds)))
            run = run_at(machine, contender, dataset, rate, num_requests, seed)
            self.finished[key] = asdict(Trial.of(rate, run.times, quantile))
            self.progress.update()
        return Trial(**self.finished[key])

    def capacities(
        self, machine: Deployment, contender: Contender, dataset: str, slo: float, seeds: int | None = None, precision: float = 0.0
    ) -> list[float]:
        """One a seed; each search begins where the last one ended."""
        objective, found = Objective(slo), []
        for seed in range(seeds or self.seeds):
            start = next((c for c in reversed(found) if c), START[machine.model.name] * SHARE[dataset])
            found.append(
                capacity(
                    lambda rate, seed=seed: self.trial(machine, contender, dataset, rate, seed, objective.quantile),
                    objective,
                    start=start,
                    precision=precision or self.precision,
                )
            )
        return found


def setups(search: Search, folder: Path) -> tuple[str, dict[str, Any]]:
    """Sarathi, vLLM and Orca in each setup, on both datasets, under the strict and the relaxed objective."""
    from scripts.sarathi_plots import bars

    rows, data, panels = [], {}, {}
    for name, setup in SETUPS.items():
        over: dict[str, list[float]] = {"vLLM": [], "Orca": []}
        for dataset in DATASETS:
            groups = panels.setdefault(f"{name}, {dataset}", {})
            for kind, slo in setup.slos.items():
                ours = sarathi(setup.budgets[kind])
                contenders = (ours, vllm(), orca(setup.orca_seqs))
                found = {c.name: search.capacities(setup.machine, c, dataset, slo) for c in contenders}
                data[f"{name}, {dataset}, {kind}"] = found
                groups[kind] = {"sarathi" if c is ours else c.name: Spread.of(found[c.name]) for c in contenders}
                ratios = [ratio(found[ours.name], found[c.name]) for c in contenders[1:]]
                for means, found_ratio in zip(over.values(), ratios, strict=True):
                    means += [found_ratio.mean] if found_ratio else []
                shown = [f"{Spread.of(found[c.name])}" for c in contenders]
                rows.append([name, dataset, f"{kind}, {slo} s", ours.name, *shown, *(f"{r or 'no rate'}" for r in ratios)])
        claims = zip(over.items(), (setup.over_vllm, setup.over_orca), strict=True)
        compared = {who: {"published": theirs, "ours": max(means, default=None)} for (who, means), theirs in claims}
        data[f"{name}, largest ratios"] = compared
    bars(panels, folder / "capacity.png", "capacity (requests/s)")
    head = ("setup", "dataset", "objective", "budget", "sarathi", "vLLM", "Orca", "over vLLM", "over Orca")
    largest = [
        [name, who, claim["published"], shown_ratio(claim["ours"]), agreement(claim["published"], claim["ours"])]
        for name in SETUPS
        for who, claim in data[f"{name}, largest ratios"].items()
    ]
    return table(head, rows) + "\n" + table(("setup", "over", "published (up to)", "ours (up to)", ""), largest), data


def own_objectives(search: Search, folder: Path) -> tuple[str, dict[str, Any]]:
    """The strict objective as what it stands for, five of the machine's own decode iterations, which our machines do faster."""
    dataset, rows, data = "openchat_sharegpt4", [], {}
    for name, setup in SETUPS.items():
        slo = round(5 * step_seconds(setup.machine, DECODE_BATCH, DECODE_KV), 3)
        contenders = (sarathi(setup.budgets["strict"]), vllm())
        found = [search.capacities(setup.machine, c, dataset, slo, seeds=1)[0] for c in contenders]
        over = found[0] / found[1] if found[1] else None
        data[name] = {"slo": slo, **{c.name: value for c, value in zip(contenders, found, strict=True)}}
        rows.append([name, f"{slo} s", *found, shown_ratio(over), agreement(setup.over_vllm, over)])
    return table(("setup", "5x", "sarathi-512", "vLLM", "over vLLM", "against the published ratio"), rows), data


def objectives_and_batches(search: Search, folder: Path) -> tuple[str, dict[str, Any]]:
    """Capacity over five objectives: vLLM with at most 32, 64 and 128 sequences against Sarathi with two budgets."""
    from scripts.sarathi_plots import lines

    dataset, rows, data = "openchat_sharegpt4", [], {}
    slos = {"mistral-7b": (0.1, 0.2, 0.3, 0.5, 1.0), "yi-34b": (0.2, 0.4, 0.6, 0.8, 1.0)}
    published = {"mistral-7b": (0.1, 3.5), "yi-34b": (1.0, 1.65)}
    for name, objectives in slos.items():
        contenders = (vllm(32), vllm(64), vllm(128), sarathi(512), sarathi(2048))
        found = {
            c.name: [search.capacities(SETUPS[name].machine, c, dataset, s, seeds=1)[0] for s in objectives] for c in contenders
        }
        data[name] = {"slos": objectives, **found}
        lines(objectives, found, folder / f"objectives_{name}.png", "P99 time between tokens (s)", "capacity (requests/s)", name)
        rows += [[name, c, *values] for c, values in found.items()]
        best = [best_over([found[c.name][i] for c in contenders[3:]], [found[c.name][i] for c in contenders[:3]]) for i in range(5)]
        slo, theirs = published[name]
        note = f"{theirs} at {slo} s: {agreement(theirs, best[objectives.index(slo)])}"
        shown = [shown_ratio(b) for b in best]
        rows.append([name, "best sarathi over best vLLM", *shown[:4], f"{shown[4]} (published {note})"])
    tables = []
    for name, objectives in slos.items():
        tables.append(table(("setup", "", *(f"{s} s" for s in objectives)), [r for r in rows if r[0] == name]))
    return "\n".join(tables), data


def best_over(ours: list[float], theirs: list[float]) -> float | None:
    """The highest of our capacities over the highest of theirs; None where theirs are all 0."""
    return max(ours) / max(theirs) if max(theirs) else None


def shown_ratio(over: float | None) -> str:
    return "no rate" if over is None else f"{over:.3g}"


def across_nodes(search: Search, folder: Path) -> tuple[str, dict[str, Any]]:
    """Falcon-180B on two nodes: tensor parallelism across them, or a pipeline stage in each; vLLM's scheduling and Sarathi's."""
    setup, dataset, data, rows = SETUPS["falcon-180b"], "openchat_sharegpt4", {}, []
    for kind, slo in setup.slos.items():
        ours = search.capacities(setup.machine, sarathi(setup.budgets[kind]), dataset, slo)
        staged = search.capacities(setup.machine, vllm(), dataset, slo)
        across = search.capacities(FALCON_TP8, vllm(), dataset, slo)
        data[kind] = {"sarathi TP4-PP2": ours, "vllm TP4-PP2": staged, "vllm TP8": across}
        published = (3.6, 4.3) if kind == "strict" else (1.48, None)
        row: list[Any] = [f"{kind}, {slo} s", *(f"{Spread.of(v)}" for v in (ours, staged, across))]
        for theirs, values in zip(published, (staged, across), strict=True):
            over = ratio(ours, values)
            row += [f"{over or 'no rate'}", theirs, agreement(theirs, over and over.mean)]
        rows.append(row)
    head = (
        "objective",
        "sarathi TP4-PP2",
        "vLLM TP4-PP2",
        "vLLM TP8",
        "over TP4-PP2",
        "published",
        "",
        "over TP8",
        "published",
        "",
    )
    return table(head, rows), data


def dynamic_budget(search: Search, folder: Path) -> tuple[str, dict[str, Any]]:
    """The best fixed token budget against one chosen for every step, over five seeds: not in the paper, which fixes it."""
    machine, dataset, seeds = SETUPS["mistral-7b"].machine, "openchat_sharegpt4", 5
    rows, data = [], {}
    for slo in (0.05, 0.1):
        fixed = [sarathi(budget) for budget in (384, 512, 640, 768, 1024)]
        dynamic = Contender(f"dynamic {1e3 * slo:g} ms", "sarathi", 2048, objective=slo)
        found = {c.name: search.capacities(machine, c, dataset, slo, seeds, precision=0.02) for c in (*fixed, dynamic)}
        best = max((c.name for c in fixed), key=lambda name: sum(found[name]))
        gain = ratio(found[dynamic.name], found[best])
        data[f"{slo} s"] = {**found, "best": best, "gain": gain and asdict(gain)}
        rows.append([f"{slo} s", *(f"{Spread.of(v)}" for v in found.values()), best, f"{gain or 'no rate'}"])
    return table(("objective", *(c.name for c in fixed), "dynamic", "best fixed", "dynamic over it"), rows), data
