"""Sections of reproduce_sarathi that search for capacities: the four setups, objectives against batch sizes, across nodes, budgets.

Owns which contenders meet where, and the tables of their capacities. The searches are the session's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jaxserve.cli.common.tables import agreement, table
from jaxserve.simulation.capacity import Spread, ratio
from scripts.reproduce.sarathi_costs import DECODE_BATCH, DECODE_KV, step_seconds
from scripts.reproduce.sarathi_session import Question, Session
from scripts.reproduce.sarathi_setups import DATASETS, FALCON_TP8, SETUPS, Contender, Setup, orca, sarathi, vllm

OWN_MULTIPLES = {"strict": 5, "relaxed": 25}  # of a decode iteration, by which the paper chose its objectives
DYNAMIC_SEEDS, DYNAMIC_PRECISION = 5, 0.02  # of dynamic_budget, whatever the flags: it looks for a difference of 5%
# An objective in seconds, and the fixed budgets tried for it: on both sides of what suits it, since every one costs five searches.
FIXED_BUDGETS = {0.05: (256, 320, 384, 448, 512), 0.1: (448, 512, 640, 768, 1024)}
LOOSER = 1.1  # of the objective: what a second dynamic budget aims at, since a hundredth of the gaps may be later


def three(session: Session, cases: Sequence[tuple[Setup, str, str, float]]) -> list[dict[str, list[float]]]:
    """For each (setup, dataset, kind of objective, seconds): the capacities of Sarathi with that kind's budget, of vLLM and of
    Orca, over the seeds."""
    contenders = [
        {"sarathi": sarathi(setup.budgets[kind]), "vLLM": vllm(), "Orca": orca(setup.orca_seqs)} for setup, _, kind, _ in cases
    ]
    questions = [
        Question(setup.machine, contender, dataset, slo)
        for (setup, dataset, _, slo), of_case in zip(cases, contenders, strict=True)
        for contender in of_case.values()
    ]
    found = iter(session.capacities(questions))
    return [{name: next(found) for name in of_case} for of_case in contenders]


def over(found: Mapping[str, list[float]]) -> list[Spread | None]:
    """Sarathi's capacity over vLLM's and over Orca's; None where theirs is 0."""
    return [ratio(found["sarathi"], found[name]) for name in ("vLLM", "Orca")]


def setups(session: Session) -> tuple[str, dict[str, Any]]:
    """Sarathi, vLLM and Orca in each setup, on both datasets, under the strict and the relaxed objective."""
    from scripts.reproduce.sarathi_plots import bars

    cases = [(s, dataset, kind, slo) for s in SETUPS.values() for dataset in DATASETS for kind, slo in s.slos.items()]
    rows, data, panels = [], {}, {}
    strict: dict[str, list[float]] = {name: [] for name in SETUPS}  # over vLLM; no rate at all: infinitely
    largest: dict[tuple[str, str], list[float]] = {(name, who): [] for name in SETUPS for who in ("vLLM", "Orca")}
    for (setup, dataset, kind, slo), found in zip(cases, three(session, cases), strict=True):
        data[f"{setup.name}, {dataset}, {kind}"] = found
        panels.setdefault(f"{setup.name}, {dataset}", {})[kind] = {name: Spread.of(v) for name, v in found.items()}
        ratios = over(found)
        for who, r in zip(("vLLM", "Orca"), ratios, strict=True):
            largest[setup.name, who] += [r.mean] if r else []
        if kind == "strict":
            strict[setup.name].append(ratios[0].mean if ratios[0] else math.inf)
        shown = [*(f"{Spread.of(v)}" for v in found.values()), *(f"{r or 'no rate'}" for r in ratios)]
        rows.append([setup.name, dataset, f"{kind}, {slo} s", setup.budgets[kind], *shown])
    bars(panels, session.folder / "capacity.png", "capacity (requests/s)")
    head = ("setup", "dataset", "objective", "budget", "sarathi", "vLLM", "Orca", "over vLLM", "over Orca")
    claims = []
    for (name, who), means in largest.items():
        theirs, ours = SETUPS[name].over_vllm if who == "vLLM" else SETUPS[name].over_orca, max(means, default=None)
        data[f"{name} over {who}, largest"] = {"published": theirs, "ours": ours}
        claims.append([name, who, theirs, shown_ratio(ours), agreement(theirs, ours)])
    least = ", ".join(f"{name} {min(values):.3g}" for name, values in strict.items())
    twice = sum(min(values) >= 2 for values in strict.values())
    less = sum(mean < 1 for means in largest.values() for mean in means)
    note = (
        f"Over vLLM under the strict objective, the lesser of both datasets: {least}; twice or more in {twice} of {len(strict)}.\n"
    )
    note += f"Of {sum(map(len, largest.values()))} ratios {less} are below 1.\n"
    claims_table = table(("setup", "over", "published (up to)", "ours (up to)", ""), claims)
    return "\n".join((table(head, rows), claims_table, note)), data


def own_objectives(session: Session) -> tuple[str, dict[str, Any]]:
    """The objectives as what they stand for, 5 and 25 of the machine's own decode iterations, which our machines do faster."""
    cases = []
    for setup in SETUPS.values():
        own = step_seconds(setup.machine, DECODE_BATCH, DECODE_KV)
        cases += [(setup, dataset, kind, round(n * own, 3)) for dataset in DATASETS for kind, n in OWN_MULTIPLES.items()]
    rows, data = [], {}
    for (setup, dataset, kind, slo), found in zip(cases, three(session, cases), strict=True):
        data[f"{setup.name}, {dataset}, {kind}"] = {"slo": slo, **found}
        shown = [*(f"{Spread.of(v)}" for v in found.values()), *(f"{r or 'no rate'}" for r in over(found))]
        rows.append([setup.name, dataset, f"{OWN_MULTIPLES[kind]}x, {slo} s", setup.budgets[kind], *shown])
    head = ("setup", "dataset", "objective", "budget", "sarathi", "vLLM", "Orca", "over vLLM", "over Orca")
    return table(head, rows), data


def objectives_and_batches(session: Session) -> tuple[str, dict[str, Any]]:
    """Capacity over five objectives: vLLM with at most 32, 64 and 128 sequences against Sarathi with two budgets."""
    from scripts.reproduce.sarathi_plots import lines

    dataset, tables, data = "openchat_sharegpt4", [], {}
    slos = {"mistral-7b": (0.1, 0.2, 0.3, 0.5, 1.0), "yi-34b": (0.2, 0.4, 0.6, 0.8, 1.0)}
    published = {"mistral-7b": (0.1, 3.5), "yi-34b": (1.0, 1.65)}
    contenders = (vllm(32), vllm(64), vllm(128), sarathi(512), sarathi(2048))
    questions = [Question(SETUPS[n].machine, c, dataset, slo) for n, each in slos.items() for c in contenders for slo in each]
    answers = iter(session.capacities(questions))
    for name, objectives in slos.items():
        found = {c.name: [next(answers) for _ in objectives] for c in contenders}
        spreads = {c: [Spread.of(v) for v in values] for c, values in found.items()}
        means = {c: [s.mean for s in values] for c, values in spreads.items()}
        data[name] = {"slos": objectives, **found}
        lines(objectives, means, session.folder / f"objectives_{name}.png", "P99 time between tokens (s)", "requests/s", name)
        rows: list[list[Any]] = [[c, *(f"{s}" for s in values)] for c, values in spreads.items()]
        best = [
            best_over([means[c.name][i] for c in contenders[3:]], [means[c.name][i] for c in contenders[:3]])
            for i in range(len(objectives))
        ]
        rows.append(["best sarathi over best vLLM", *map(shown_ratio, best)])
        slo, theirs = published[name]
        verdict = agreement(theirs, best[objectives.index(slo)])
        tables.append(table((name, *(f"{s} s" for s in objectives)), rows) + f"\nPublished: {theirs} at {slo} s: {verdict}.\n")
    return "\n".join(tables), data


def best_over(ours: list[float], theirs: list[float]) -> float | None:
    """The highest of our capacities over the highest of theirs; None where theirs are all 0."""
    return max(ours) / max(theirs) if max(theirs) else None


def shown_ratio(over: float | None) -> str:
    return "no rate" if over is None else f"{over:.3g}"


def across_nodes(session: Session) -> tuple[str, dict[str, Any]]:
    """Falcon-180B on two nodes: tensor parallelism across them, or a pipeline stage in each; vLLM's scheduling and Sarathi's."""
    setup, dataset, data, rows = SETUPS["falcon-180b"], "openchat_sharegpt4", {}, []
    published = {"strict": (3.6, 4.3), "relaxed": (1.48, None)}  # over vLLM's TP4-PP2, and its TP8
    questions = [
        Question(machine, contender, dataset, slo)
        for kind, slo in setup.slos.items()
        for machine, contender in (
            (setup.machine, sarathi(setup.budgets[kind])),
            (setup.machine, vllm()),
            (FALCON_TP8, vllm()),
        )
    ]
    answers = iter(session.capacities(questions))
    for kind, slo in setup.slos.items():
        ours, staged, across = (next(answers) for _ in range(3))
        data[kind] = {"sarathi TP4-PP2": ours, "vllm TP4-PP2": staged, "vllm TP8": across}
        row: list[Any] = [f"{kind}, {slo} s", *(f"{Spread.of(v)}" for v in (ours, staged, across))]
        for theirs, values in zip(published[kind], (staged, across), strict=True):
            found = ratio(ours, values)
            row += [f"{found or 'no rate'}", theirs, agreement(theirs, found and found.mean)]
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


def dynamic_budget(session: Session) -> tuple[str, dict[str, Any]]:
    """The best fixed token budget against one chosen for every step, which aims at the objective, or a little beyond it: not in
    the paper, which fixes it. Then how much of the objective's hundredth of late gaps each uses up, at its capacity."""
    machine, dataset = SETUPS["mistral-7b"].machine, "openchat_sharegpt4"
    cases = {slo: ([sarathi(budget) for budget in budgets], dynamic_contenders(slo)) for slo, budgets in FIXED_BUDGETS.items()}
    questions = [Question(machine, c, dataset, slo) for slo, (fixed, dynamic) in cases.items() for c in (*fixed, *dynamic)]
    answers = iter(session.capacities(questions, DYNAMIC_SEEDS, DYNAMIC_PRECISION))
    rows, late, data, gains, notes = [], [], {}, [], []  # gains: of the better dynamic one, at each objective
    for slo, (fixed, dynamic) in cases.items():
        found = {c: next(answers) for c in (*fixed, *dynamic)}
        best = max(fixed, key=lambda c: sum(found[c]))
        over = {c: ratio(found[c], found[best]) for c in dynamic}
        gains.append(max((r.mean for r in over.values() if r), default=0.0))
        for c, values in found.items():
            rows.append([f"{slo} s", c.name, f"{Spread.of(values)}", f"{over[c] or 'no rate'}" if c in over else ""])
        shares = {c.name: late_shares(session, machine, c, dataset, slo, found[c]) for c in (best, *dynamic)}
        for name, each in shares.items():
            late.append([f"{slo} s", name, ", ".join("no rate" if s is None else f"{100 * s:.2f}" for s in each)])
        end = " (the last one tried on its side)" if best in (fixed[0], fixed[-1]) else ""
        notes.append(f"At {slo} s {best.name} is the best fixed one{end}, the better dynamic has {gains[-1]:.3g} times as much.")
        ratios = {f"{c.name} over best": r and asdict(r) for c, r in over.items()}
        data[f"{slo} s"] = {c.name: values for c, values in found.items()} | {"best": best.name, "late": shares} | ratios
    note = f"{DYNAMIC_SEEDS} seeds, neighbouring rates {100 * DYNAMIC_PRECISION:g}% apart. {' '.join(notes)} "
    note += f"Sought: 1.05 at both; {'reached' if min(gains) >= 1.05 else 'not reached'}.\n"
    head = ("objective", "budget", "capacity", "over the best fixed")
    return "\n".join((table(head, rows), note, table(("objective", "at capacity", "gaps over it by seed (%)"), late))), data


def dynamic_contenders(slo: float) -> list[Contender]:
    """Budgets chosen for every step of 2048 tokens at most, to last `slo` seconds, and LOOSER times that."""
    return [Contender(f"dynamic {1e3 * aim:g} ms", "sarathi", 2048, objective=aim) for aim in (slo, LOOSER * slo)]


def late_shares(
    session: Session, machine: Any, contender: Contender, dataset: str, slo: float, rates: Sequence[float]
) -> list[float | None]:
    """For each seed, the share of the gaps between tokens that last longer than `slo` at that seed's rate; None for a rate of 0."""
    shares: list[float | None] = []
    for seed, rate in enumerate(rates):
        if not rate:
            shares.append(None)
            continue
        times = session.run(machine, contender, dataset, rate, session.num_requests, seed).times
        shares.append(float(times.gap_counts[times.gaps > slo].sum() / times.gap_counts.sum()))
    return shares
