r"""Chooses token budget, sequences, page size, long-prefill threshold and bucket plan for a workload, and writes a config file.

    jaxserve autotune --profiles=steps_16.json,steps_64.json --workload=trace --dataset_path=trace.csv.gz
    jaxserve autotune --profiles=steps.json --workload=random --num_requests=200 --random_input_len=300 \
        --random_output_len=40 --random_range_ratio=0.8 --request_rate=4 --goodput=ttft:500,tpot:50 --finalists=3 \
        --state=autotune.json --output=tuned.json
    jaxserve serve --model=FOLDER --config=tuned.json

The objective is output tokens a second, or, with --goodput, requests a second that meet every one of these objectives. Settings
are served in virtual time by the real scheduler, by successive halving: all on the first requests of the workload, the best third
on three times as many, and so on. The --finalists, or the best --measure of them, are then served on a real engine by turns,
--rounds times, and the medians decide; --measure=0 leaves it at the prediction. Page sizes are those of the profiles (`jaxserve
tune profile`, one a page size). With --state, what was served is kept, and a run that broke off goes on from there. In Python:
LLM(model, **json.load(open("tuned.json"))).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.buckets.plan import MAX_PROGRAMS
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options, refuse_flags, refuse_options
from jaxserve.cli.common.finished import Finished
from jaxserve.cli.common.provenance import code_id, provenance, versions, write_json
from jaxserve.cli.common.simulated_machine import RATE, machine_of, measure, planning
from jaxserve.cli.common.traffic_flags import read_traffic
from jaxserve.workloads.latency import parse_objectives


def is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


_PROFILES = flags.DEFINE_list("profiles", [], "Files of `jaxserve tune profile`, one a page size to choose from.")
_GOODPUT = flags.DEFINE_list("goodput", [], "Objectives in ms, such as ttft:500,tpot:50; by default throughput counts.")
_BUDGETS = flags.DEFINE_list("budgets", [], "Token budgets; by default powers of two up to the profiles'.")
_SEQS = flags.DEFINE_list("seqs", [], "max_num_seqs; by default powers of two from 8 up to the profiles'.")
_THRESHOLDS = flags.DEFINE_list("thresholds", ["0", "0.25"], "Long-prefill thresholds, in shares of the budget; 0: none.")
_PLANS = flags.DEFINE_list("plans", ["default", "tuned"], "Bucket plans: default, tuned (`jaxserve tune buckets`).")
flags.register_validator(
    "thresholds", lambda given: given and all(is_share(text) for text in given), "must be shares of the budget, from 0 to 1"
)
flags.register_validator("plans", lambda given: given and set(given) <= {"default", "tuned"}, "choose from default, tuned")
_PROGRAMS = flags.DEFINE_integer("max_programs", MAX_PROGRAMS, "Most programs of a plan.")
_FACTOR = flags.DEFINE_integer("factor", 3, "Each rung keeps one of so many settings.", lower_bound=2)
_FINALISTS = flags.DEFINE_integer("finalists", 4, "Settings that all of the workload is served with.", lower_bound=1)
_MEASURE = flags.DEFINE_integer(
    "measure", None, "Serve the workload on a real engine with so many of the finalists; by default all, 0: none.", lower_bound=0
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Real runs of each of them, by turns; medians count.", lower_bound=1)
_STATE = flags.DEFINE_string("state", None, "Keep what was served here, and go on from it.")
_OUTPUT = flags.DEFINE_string("output", "tuned.json", "The config file.")
_JSON = flags.DEFINE_string("json", None, "Write all that was tried to this file; - is stdout.")
for _name in ("budgets", "seqs"):
    flags.register_validator(_name, lambda given: all(n.isdecimal() and int(n) for n in given), "must be numbers, 1 or more")
_LEAST = 32  # requests of the smallest rung
define_engine_flags(model="tiny-qwen3")


@dataclass(frozen=True)
class Setting:
    """What is chosen."""

    page_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int
    plan: str

    def __str__(self) -> str:
        pages = f"budget {self.max_num_batched_tokens}, {self.max_num_seqs} seqs, pages of {self.page_size}"
        return f"{pages}, threshold {self.long_prefill_token_threshold}, {self.plan} plan"


class Tuner:
    """Machines by page size, the workload, and the score of a setting on part of it. Plans are tuned once each."""

    def __init__(self, machines: dict[int, Any], workload: Any, objectives: dict[str, float], finished: Finished):
        self.machines = machines
        self.workload = workload
        self.objectives = objectives
        self.finished = finished
        self._plans: dict[tuple[Setting, int], Any] = {}

    def machine(self, setting: Setting) -> Any:
        base = self.machines[setting.page_size]
        names = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
        return replace(base, limits=replace(base.limits, **{name: getattr(setting, name) for name in names}))

    def plan(self, setting: Setting, num_requests: int, progress: Any) -> Any:
        """The setting's plan for the first requests of the workload. progress: told of simulated requests. ValueError if a plan of
        so few programs can't be made."""
        from jaxserve.simulation.bucket_search import Caps
        from jaxserve.simulation.tuning import default_plan, tune_plan

        machine = self.machine(setting)
        if setting.plan == "default":
            return default_plan(machine, _PROGRAMS.value)
        key = setting, num_requests
        if key not in self._plans:
            self._plans[key] = tune_plan(self.part(num_requests), machine, Caps(_PROGRAMS.value), progress=progress).plan
        return self._plans[key]

    def part(self, num_requests: int) -> Any:
        """The first requests of the workload."""
        return replace(self.workload, requests=self.workload.requests[:num_requests])

    def objective(self, times: Any) -> float:
        """What is to be large: output tokens a second, or good requests a second."""
        summary = times.summary(objectives=self.objectives)
        return summary["request_goodput"] if self.objectives else summary["output_throughput"]

    def score(self, setting: Setting, num_requests: int, progress: Any) -> float:
        """The objective in virtual time; -inf where the setting can't serve it. progress: told of simulated requests."""
        key = f"{setting}: {num_requests} requests"
        if key not in self.finished:
            try:
                plan = self.plan(setting, num_requests, progress)
                self.finished[key] = self.objective(self.machine(setting).run(self.part(num_requests), plan, progress).times)
            except ValueError as error:
                self.finished[key] = None
                print(f"{setting}: {error}", file=sys.stderr)
        value = self.finished[key]
        return -math.inf if value is None else value

    def measured(self, settings: Sequence[Setting], rounds: int) -> list[tuple[Setting, list[float]]]:
        """The objective of each round of each, on a real engine, the whole workload; by turns, so that a slow minute falls on all.
        What decides a run's speed besides the setting is in its key. Engines are made anew: several would share the memory."""
        names = "dtype", "attention_backend", "matmul_backend", "moe_backend", "deterministic"
        options = {name: engine_options()[name] for name in names}
        where = f"measured on {versions()['device']}, {', '.join(f'{k}={v}' for k, v in options.items())}"
        found: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for i in range(rounds):
            for setting, values in found.items():
                key = f"{setting}: {where}, round {i + 1}"
                if key not in self.finished:
                    run = measure(self.machine(setting), self.whole_plan(setting), self.workload, i, f"{setting}, round {i + 1}")
                    self.finished[key] = self.objective(run.times)
                values.append(self.finished[key])
        return list(found.items())

    def whole_plan(self, setting: Setting) -> Any:
        """The setting's plan for all of the workload."""
        with planning(f"plan of {setting}") as bar:
            return self.plan(setting, len(self.workload.requests), bar.update)

    def config(self, setting: Setting) -> dict[str, Any]:
        """The options of an engine with this setting, for the limits and the devices that it was tuned under."""
        from jaxserve.step_times.fitted import DEVICES

        machine, options = self.machine(setting), {k: v for k, v in asdict(setting).items() if k != "plan"}
        plan = json.loads(self.whole_plan(setting).to_json(workload=self.workload.name))
        limits = machine.limits
        options |= {"batching_policy": limits.policy, "scheduling_policy": limits.order, "enable_chunked_prefill": limits.chunked}
        options |= {"enable_mixed_steps": limits.mixed}
        options |= {name: machine.step_times.about.get(name, unsaid) for name, unsaid in DEVICES.items()}
        if (level := machine.step_times.about.get("deterministic")) is not None:
            options["deterministic"] = level
        options |= {"async_scheduling": machine.async_scheduling, "enable_prefix_caching": machine.prefix_caching}
        return {**options, "max_model_len": limits.max_model_len, "num_pages": machine.num_pages, "bucket_plan": plan}


def settings_of(machines: dict[int, Any]) -> Iterator[Setting]:
    """Every combination that an engine takes: a step holds a token of every sequence, a threshold is within the budget."""
    shares = [float(share) for share in _THRESHOLDS.value]
    for page_size, machine in machines.items():
        limits = machine.limits
        powers = [1 << i for i in range(1, limits.max_num_batched_tokens.bit_length())]
        budgets = [int(b) for b in _BUDGETS.value] or [p for p in powers if p >= 4 * machine.multiple]
        seqs = [int(s) for s in _SEQS.value] or [p for p in powers if 8 <= p <= limits.max_num_seqs] or [limits.max_num_seqs]
        for budget, s, share, plan in itertools.product(budgets, seqs, shares, _PLANS.value):
            if s <= budget <= limits.max_num_batched_tokens and s <= limits.max_num_seqs:
                yield Setting(page_size, budget, s, int(share * budget), plan)


def main() -> None:
    if not _PROFILES.value:
        raise app.UsageError("give --profiles, the JSON files that `jaxserve tune profile` wrote on this machine")
    refuse_flags("plans are chosen from --plans", "bucket_plan")
    with refuse_bad_input():
        refuse_options("plans and step times are chosen from --plans and --profiles, for fixed budgets", "tbt_slo_ms", "step_times")
        tuner, settings = prepare()
        rungs = halve(tuner, settings)
        best = rungs[-1].scores
        if best[0][1] == -math.inf:
            raise app.UsageError("no setting can serve this workload; the messages above say why")
        finalists = [setting for setting, score in best[: _MEASURE.value] if score > -math.inf]  # None: all
        rounds = tuner.measured(finalists, _ROUNDS.value) if finalists else []
    measured = [(setting, statistics.median(values)) for setting, values in rounds]
    winner = max(measured or best, key=lambda pair: pair[1])[0]
    report(rungs, measured, "good requests/s" if tuner.objectives else "output tok/s")
    write_json(_OUTPUT.value, tuner.config(winner))
    print(f"{winner}: {_OUTPUT.value}")
    tried = [{"requests": r.size, "scores": [[asdict(s), None if v == -math.inf else v] for s, v in r.scores]} for r in rungs]
    about = {"benchmark": "autotune", "model": flags.FLAGS.model, "settings": tuner.finished.settings, "rungs": tried}
    about["measured"] = [[asdict(s), statistics.median(values), values] for s, values in rounds]
    write_json(_JSON.value, {**about, "best": asdict(winner), **provenance()})


def prepare() -> tuple[Tuner, list[Setting]]:
    """The tuner of the flags, and all settings. ValueError where there are none, or flags and files contradict each other."""
    objectives = parse_objectives(_GOODPUT.value)
    machines = {}
    for path in _PROFILES.value:
        machine = machine_of(path, engine_options())
        if machine.step_times.page_size in machines:
            raise ValueError(f"--profiles: two of them have pages of {machine.step_times.page_size}")
        machines[machine.step_times.page_size] = machine
    levels = {about.get("deterministic") for about in (machine.step_times.about for machine in machines.values())} - {None}
    if len(levels) > 1:
        raise ValueError(f"--profiles: some are of deterministic={' and some of '.join(map(repr, sorted(levels)))}; profile again")
    shortest = min(machine.limits.max_model_len for machine in machines.values())
    workload = read_traffic(flags.FLAGS.model, shortest, RATE.value, engine_options()["seed"])
    profiles = [hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] for path in _PROFILES.value]
    arrivals = hashlib.sha256(repr(workload.requests).encode()).hexdigest()[:16]
    depends = {"profiles": profiles, "requests": arrivals, "goodput": objectives, "max_programs": _PROGRAMS.value}
    depends |= {"limits": {str(size): asdict(machine.limits) for size, machine in machines.items()}}
    same = ("num_pages", "multiple", "async_scheduling", "prefix_caching")
    depends |= {name: {str(size): getattr(m, name) for size, m in machines.items()} for name in same}
    about = {"code": code_id(), "model": flags.FLAGS.model, "workload": workload.name}
    finished = Finished(_STATE.value, about | depends)
    settings = list(settings_of(machines))
    if not settings:
        raise ValueError("no setting is within the profiles' limits; lower --seqs or --budgets, or profile with larger limits")
    return Tuner(machines, workload, objectives, finished), settings


def halve(tuner: Tuner, settings: list[Setting]) -> list[Any]:
    from tqdm import tqdm

    from jaxserve.simulation.halving import successive_halving, widths

    size, num_runs = len(tuner.workload.requests), sum(widths(len(settings), _FACTOR.value, _FINALISTS.value))
    with tqdm(desc="settings", total=num_runs, unit="setting", mininterval=5) as bar, planning("of them", 1) as simulated:

        def score(setting: Setting, num_requests: int) -> float:
            bar.set_postfix_str(f"{num_requests} requests, {setting}")
            scored = tuner.score(setting, num_requests, simulated.update)
            bar.update()
            return scored

        return successive_halving(settings, score, size, factor=_FACTOR.value, finalists=_FINALISTS.value, least=min(size, _LEAST))


def report(rungs: list[Any], measured: list[tuple[Setting, float]], unit: str) -> None:
    """The rungs, the best of each, and what was measured."""
    for rung in rungs[:-1]:
        print(f"{len(rung.scores)} settings on {rung.size} requests; best: {rung.scores[0][0]} ({rung.scores[0][1]:.4g} {unit})")
    print(f"on all {rungs[-1].size} requests:")
    real = dict(measured)
    for setting, value in rungs[-1].scores:
        print(f"  {value:>8.4g} {unit} predicted" + (f", {real[setting]:.4g} measured" if setting in real else "") + f": {setting}")


if __name__ == "__main__":
    run_command(main)
