"""One run of reproduce_sarathi: what its sections are computed with, and the trials that they share.

Owns which trials are served again, on how many processes, and how far the run is. What a section asks, and who meets whom in it, is
the section's. A trial that misses its objective is broken off as soon as that is certain, and a looser objective serves it again:
results depend neither on the number of processes nor on where a run was taken up again.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.cli.common.finished import Finished
from jaxserve.simulation.capacity import Objective, Trial, capacity
from jaxserve.step_times.analytic import Deployment
from scripts.reproduce.sarathi_setups import Contender, run_at

# Where a search begins, requests a second; prompts of the second dataset are four times as long.
START = {"mistral-7b": 3.0, "yi-34b": 1.2, "llama2-70b": 0.6, "falcon-180b": 0.6}
SHARE = {"openchat_sharegpt4": 1.0, "arxiv_summarization": 0.3}


@dataclass(frozen=True)
class Question:
    """What capacity has it? slo: P99 of the time between tokens, in seconds."""

    machine: Deployment
    contender: Contender
    dataset: str
    slo: float


def serve_rate(
    machine: Deployment, contender: Contender, dataset: str, rate: float, num_requests: int, seed: int, objective: Objective
) -> Trial:
    """A trial that decides the objective. In any process."""
    run = run_at(machine, contender, dataset, rate, num_requests, seed, give_up=objective.missed_by)
    return Trial.of(rate, run.times, objective.quantile)


def processes(workers: int) -> ProcessPoolExecutor:
    """Started anew, since a fork would copy threads half done."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


@dataclass
class Session:
    """folder: of the plots. num_requests: of a trial. precision: between neighbouring rates. pool: serves trials, `workers` at
    once; None: this process does."""

    folder: Path
    finished: Finished
    progress: Any
    seeds: int
    num_requests: int
    precision: float
    pool: Executor | None = None
    workers: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, machine: Deployment, contender: Contender, dataset: str, rate: float, num_requests: int, seed: int) -> Any:
        """sarathi_setups.run_at; the bar moves."""
        self.progress.set_postfix_str(f"{machine}, {contender.name}, {dataset}, seed {seed}", refresh=False)
        run = run_at(machine, contender, dataset, rate, num_requests, seed)
        self.progress.update()
        return run

    def trial(self, question: Question, rate: float, seed: int, objective: Objective) -> Trial:
        """One that decides the objective, kept from before or served now."""
        machine, contender, dataset = question.machine, question.contender, question.dataset
        key = f"{machine}, {contender.name}, {dataset}, seed {seed}, {rate:.6g}/s"
        kept = Trial(**self.finished[key]) if key in self.finished else None
        if kept is not None and kept.decides(objective):
            return kept
        given = (machine, contender, dataset, rate, self.num_requests, seed, objective)
        served = serve_rate(*given) if self.pool is None else self.pool.submit(serve_rate, *given).result()
        with self._lock:
            self.finished[key] = asdict(served)
            self.progress.set_postfix_str(key, refresh=False)
            self.progress.update()
        return served

    def search(self, question: Question, seeds: int, precision: float) -> list[float]:
        """The capacity of each seed; a search begins where the last one ended."""
        objective, found = Objective(question.slo), []
        for seed in range(seeds):
            first = START[question.machine.model.name] * SHARE[question.dataset]
            start = next((c for c in reversed(found) if c), first)
            serve = lambda rate, seed=seed: self.trial(question, rate, seed, objective)  # noqa: E731
            found.append(capacity(serve, objective, start=start, precision=precision))
        return found

    def capacities(
        self, questions: Sequence[Question], seeds: int | None = None, precision: float | None = None
    ) -> list[list[float]]:
        """The capacities of each question over the seeds, on all workers. Questions that share trials are one worker's, the loosest
        objective first, which breaks off the fewest of them."""
        found: dict[Question, list[float]] = {}
        groups: dict[tuple[Any, ...], list[Question]] = {}
        for q in sorted(dict.fromkeys(questions), key=lambda q: -q.slo):
            groups.setdefault((q.machine, q.contender, q.dataset), []).append(q)

        def answer(group: list[Question]) -> None:
            for q in group:
                found[q] = self.search(q, seeds or self.seeds, precision or self.precision)

        if self.pool is None:
            for group in groups.values():
                answer(group)
        else:
            with ThreadPoolExecutor(self.workers) as threads:
                list(threads.map(answer, groups.values()))
        return [found[q] for q in questions]
