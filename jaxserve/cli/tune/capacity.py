r"""The highest request rate that meets an objective of latency, for each batching policy, by bisection.

    jaxserve tune capacity --step_times=steps.json --workload=openchat_sharegpt4 --num_prompts=1280 --slo_ms=100,500 \
        --policies=sarathi:512,dynamic:2048,prefill_first,orca --seeds=3 --json=capacity.json --plot=capacity.png
    jaxserve tune capacity --gpu=h100 --model=qwen3-32b --tensor_parallel_size=2 --max_model_len=8192 \
        --workload=openchat_sharegpt4 --num_prompts=1280 --slo_ms=50 --policies=sarathi:512,sarathi:2048,prefill_first
    jaxserve tune capacity --real --max_model_len=512 --workload=random --num_prompts=1280 --random_input_len=64 \
        --random_output_len=32 --slo_ms=50

A rate is good if --quantile of the time between tokens (from at least --min_gaps of them) is within the objective and the median
scheduling delay within --max_scheduling_delay seconds. Rates are served in virtual time, with step times from a profile
(--step_times) or from the datasheet of a GPU (--gpu), or by a real engine (--real), all of whose programs are compiled before. Each
seed draws its own lengths and arrivals; capacities are means over --seeds with 95% confidence intervals, and ratios to the last
policy are paired by seed.

A policy may be followed by a token budget, such as sarathi:512; dynamic is sarathi whose budget follows the objective, up to the
one given. Policies that run prompts whole have a budget that holds the longest, which orca's steps, bounded by their sequences
alone, go beyond with --gpu as long as steps are not padded. There they are with --bucket_plan alone: a file, or default for the
engine's. --policies wins over what --config's file says of policy and budget; its other options, a bucket plan among them, are the
machine's, and a plan must hold every policy's budget. With --json every rate served is kept, and a run that broke off, or that asks
for more seeds, policies or objectives, goes on from there.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options, refuse_flags, refuse_options
from jaxserve.cli.common.finished import Finished
from jaxserve.cli.common.plots import CAN_PLOT
from jaxserve.cli.common.provenance import code_id, provenance, versions, write_json
from jaxserve.cli.common.simulated_machine import limits_of, make_engine, plan_for, plan_given, read_machine
from jaxserve.cli.common.traffic_flags import read_traffic
from jaxserve.scheduling.config import DEFAULT_PAGE_SIZE, resolve_policy
from jaxserve.scheduling.policies import BATCHING_POLICIES
from jaxserve.workloads.workload import WORKLOADS

_POLICIES = flags.DEFINE_list("policies", ["sarathi", "prefill_first", "orca"], "Policies, perhaps with a budget: sarathi:512.")
_SLO = flags.DEFINE_list("slo_ms", [], "Objectives for the time between tokens, in milliseconds.")
_QUANTILE = flags.DEFINE_float("quantile", 0.99, "Of the time between tokens, which must meet the objective.")
_GAPS = flags.DEFINE_integer("min_gaps", 10_000, "Fewest times between tokens to take the quantile from.", lower_bound=1)
_DELAY = flags.DEFINE_float("max_scheduling_delay", 2.0, "Seconds, of the median request.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of lengths and arrivals.", lower_bound=1)
_PRECISION = flags.DEFINE_float("precision", 0.02, "Relative distance of neighbouring rates.")
_START = flags.DEFINE_float("start_rate", 1.0, "Where the search begins, requests a second.")
_REAL = flags.DEFINE_bool("real", False, "Serve on a real engine instead of in virtual time.")
_GPU = flags.DEFINE_string("gpu", None, "Analytic step times of this GPU (jaxserve/step_times/hardware.py) for a named --model.")
_PP = flags.DEFINE_integer("pp", 1, "With --gpu: pipeline stages.", lower_bound=1)
_NODE = flags.DEFINE_integer("gpus_per_node", 8, "With --gpu: 100 Gb/s Ethernet joins nodes.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw the capacities to this PNG.")
flags.register_validator("plot", *CAN_PLOT)
_JSON = flags.DEFINE_string("json", None, "Keep rates served, and write the result, here.")
define_engine_flags(model="tiny-qwen3")


@dataclass(frozen=True)
class Contender:
    """A policy with its token budget (None: the machine's, or the longest request where prompts run whole)."""

    name: str
    policy: str
    budget: int | None
    dynamic: bool

    @classmethod
    def parse(cls, text: str) -> Contender:
        policy, _, budget = text.partition(":")
        if policy not in (*BATCHING_POLICIES, "dynamic") or (budget and not budget.isdecimal()):
            raise ValueError(
                f"--policies: {text!r} must be one of {', '.join((*BATCHING_POLICIES, 'dynamic'))}, perhaps with :BUDGET"
            )
        return cls(text, "sarathi" if policy == "dynamic" else policy, int(budget) if budget else None, policy == "dynamic")

    def limits(self, base: Any, *, padded: bool = True) -> Any:
        """A machine's SchedulerConfig with this policy and its budget. padded: a step's tokens must fit a bucket, so that prompts
        that run whole have room for one; where they need not, nothing but its sequences bounds a step of Orca's."""
        limits = replace(base, policy=self.policy)
        whole = not resolve_policy(limits).chunked
        most = 1 if padded or self.policy != "orca" else base.max_num_seqs
        budget = self.budget or (max(most * base.max_model_len, base.max_num_seqs) if whole else base.max_num_batched_tokens)
        return replace(limits, max_num_batched_tokens=budget)

    def key(self, slo: float, seed: int, rate: float) -> str:
        """Of one trial; only a dynamic budget's depends on the objective."""
        objective = f" {1e3 * slo:g} ms" if self.dynamic else ""
        return f"{self.name}{objective}, seed {seed}, {rate:.6g}/s"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Simulated:
    """Serves rates in virtual time."""

    settings: dict[str, Any]  # what a rate depends on beside limits and plan

    def __init__(self):
        own = "dtype", "attention_backend", "matmul_backend", "moe_backend", "deterministic"
        refuse_options("a profile's steps took their times from its own run", *own)
        machine = replace(read_machine(), objective=None)
        profile = digest(Path(str(engine_options()["step_times"])).read_bytes())
        self._machine = machine
        self.limits: Any = machine.limits
        self.plan: str = str(plan_given() or "default")
        self.settings = {
            "machine": "simulated",
            "profile": profile,
            "num_pages": machine.num_pages,
            "multiple": machine.multiple,
        }
        self.settings |= {"async_scheduling": machine.async_scheduling, "enable_prefix_caching": machine.prefix_caching}

    def serve(self, contender: Contender, objective: Any, workload: Any, seed: int) -> Any:
        limits = contender.limits(self.limits)
        machine = replace(self._machine, limits=limits, objective=objective.tbt if contender.dynamic else None)
        return machine.run(workload, plan_for(limits, machine.multiple), give_up=objective.missed_by).times


class Analytic:
    """Serves rates in virtual time on GPUs by their datasheets, without padding but where a plan is asked for."""

    settings: dict[str, Any]  # what a rate depends on beside limits and plan

    def __init__(self, gpu: str):
        from jaxserve.step_times.analytic import Deployment
        from jaxserve.step_times.commands import programs_of

        refuse_options(
            "--gpu's steps have their own times, 16 bits a weight, no drafts, prefix caching where prompts are given, "
            "and are scheduled ahead where there is one stage",
            *("step_times", "dtype", "enable_prefix_caching", "async_scheduling", "speculative_config"),
            *("attention_backend", "matmul_backend", "moe_backend", "all_reduce_backend", "deterministic"),
        )
        given = engine_options()
        tp = given["tensor_parallel_size"]
        options = {"programs": programs_of(tp, given["graph_collectives"]), "attention_groups": given["attention_groups"]}
        self._deployment = Deployment.named(flags.FLAGS.model, gpu, tp, _PP.value, gpus_per_node=_NODE.value, **options)
        self.limits: Any = limits_of(given, {})
        self._page_size = given["page_size"] or DEFAULT_PAGE_SIZE
        self._num_pages, self._utilization = given["num_pages"], given["gpu_memory_utilization"]
        self._stages = self._deployment.stages(self._page_size)
        self._is_padded, self._is_default = given["bucket_plan"] not in (None, "none"), given["bucket_plan"] == "default"
        self._plan = plan_given() if self._is_padded else None
        self.plan: str = "default" if self._is_default else str(self._plan or "none")
        self.settings = {
            "machine": str(self._deployment),
            "page_size": self._page_size,
            "gpus_per_node": _NODE.value,
            "graph_collectives": given["graph_collectives"],
            "attention_groups": given["attention_groups"],
        }
        self.settings |= {"num_pages": self._num_pages, "gpu_memory_utilization": self._utilization}

    def serve(self, contender: Contender, objective: Any, workload: Any, seed: int) -> Any:
        from jaxserve.buckets.plan import BucketPlan
        from jaxserve.buckets.unpadded import UnpaddedPlan
        from jaxserve.simulation.pipeline import replay_stages

        limits, deployment, stages = contender.limits(self.limits, padded=self._is_padded), self._deployment, self._stages
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        plan = BucketPlan.default(seqs, tokens) if self._is_default else self._plan or UnpaddedPlan(tokens, seqs)
        # Activations of a step, which those of most requests at once would leave no KV beside.
        held = contender.limits(self.limits).max_num_batched_tokens
        num_pages = self._num_pages or deployment.num_pages(self._page_size, held, self._utilization)
        options = {"objective": objective.tbt if contender.dynamic else None, "give_up": objective.missed_by}
        return replay_stages(workload, plan, stages, deployment.send_seconds, limits, num_pages, **options).times


# What a rate depends on besides limits and plan.
REAL_OPTIONS = ("page_size", "num_pages", "gpu_memory_utilization", "dtype", "enable_prefix_caching", "async_scheduling")
REAL_OPTIONS += ("tensor_parallel_size", "graph_collectives", "all_reduce_backend", "deterministic", "speculative_config")
REAL_OPTIONS += ("attention_groups", "attention_backend", "matmul_backend", "moe_backend")


class Real:
    """Serves rates on an engine, which stays as long as the policy does."""

    settings: dict[str, Any]  # what a rate depends on beside limits and plan

    def __init__(self):
        given = engine_options()
        self.limits: Any = limits_of(given, {})
        self.plan: str = str(plan_given() or "default")
        self._key: tuple[str, float | None] | None = None
        self._engine: Any = None
        self.settings = {
            "machine": "real",
            "device": versions()["device"],
            **{name: given[name] for name in REAL_OPTIONS},
        }
        if given["step_times"] is not None:
            self.settings["profile"] = digest(Path(str(given["step_times"])).read_bytes())

    def serve(self, contender: Contender, objective: Any, workload: Any, seed: int) -> Any:
        from tqdm import tqdm

        from jaxserve.cli.common.open_loop import serve

        key = contender.name, objective.tbt if contender.dynamic else None
        if key != self._key:
            if self._engine is not None:
                self._engine.close()
            self._engine, self._key = make_engine(contender.limits(self.limits), objective=key[1]), key
        self._engine.drain()
        if not self._engine.reset_prefix_cache():  # a rate must not find the prompts of the one before
            raise RuntimeError("requests of the rate before still hold pages")
        with tqdm(
            total=len(workload.requests), desc=contender.name, unit=" requests", mininterval=5, leave=False, position=1
        ) as bar:
            return serve(self._engine, workload, seed, progress=bar).times


def search(server: Any, contender: Contender, slo: float, seed: int, finished: Finished, progress: Any) -> float:
    """The capacity of one contender under one objective with one seed, from trials that are finished and new ones."""
    from jaxserve.simulation.capacity import Objective, Trial, capacity

    objective = Objective(slo, _QUANTILE.value, _DELAY.value, _GAPS.value)

    def serve(rate: float) -> Trial:
        key = contender.key(slo, seed, rate)
        if key not in finished or not Trial(**finished[key]).decides(objective):
            workload = traffic(server, rate, seed)
            progress.set_postfix_str(key)
            finished[key] = asdict(Trial.of(rate, server.serve(contender, objective, workload, seed), objective.quantile))
        return Trial(**finished[key])

    found = capacity(serve, objective, start=_START.value, precision=_PRECISION.value)
    progress.update()
    return found


def traffic(server: Any, rate: float, seed: int) -> Any:
    """The flags' workload at a rate; a seed draws lengths (where they are drawn) and arrivals anew."""
    fixed = flags.FLAGS.workload in (*WORKLOADS, "trace")
    lengths = None if fixed else flags.FLAGS.workload_seed + seed
    return read_traffic(flags.FLAGS.model, server.limits.max_model_len, rate, seed, lengths)


def tabulate(
    found: Callable[[Contender, float, int], float], contenders: list[Contender], slos: list[float]
) -> list[dict[str, Any]]:
    """A row an objective and contender: capacity over the seeds, and its ratio to the last contender's."""
    from jaxserve.simulation.capacity import Spread, ratio

    rows = []
    for slo in slos:
        values = {c: [found(c, slo, seed) for seed in range(_SEEDS.value)] for c in contenders}
        for contender, capacities in values.items():
            spread, over = Spread.of(capacities), ratio(capacities, values[contenders[-1]])
            row = {"policy": contender.name, "slo_ms": 1e3 * slo, "capacities": capacities, "mean": spread.mean}
            row |= {"half_width": spread.half_width, "text": str(spread), "ratio": over and over.mean, "ratio_text": str(over)}
            rows.append(row)
    return rows


def main() -> None:
    from tqdm import tqdm

    if _REAL.value and _GPU.value:
        raise app.UsageError("--real serves on this machine's device, --gpu on paper: give one of them")
    if not _SLO.value:
        raise app.UsageError("give --slo_ms, the objectives in milliseconds")
    refuse_flags("--policies says how steps are composed", "batching_policy")
    refuse_flags("rates are searched", "request_rate", "arrivals_from_trace")
    if not _GPU.value:
        refuse_flags("they are of --gpu", "pp", "gpus_per_node")
    if _GPU.value or _REAL.value:
        refuse_flags("it is of plans for --step_times", "multiple")
    with refuse_bad_input():
        refuse_options("rates are searched with seeds from 0 to --seeds - 1, all compiled before", "seed", "warm_up")
        if not _REAL.value:
            refuse_options("nothing is logged but by an engine; see --real", "demand_log")
        refuse_options("a dynamic budget has each of --slo_ms as its own", "tbt_slo_ms")
        contenders, slos = [Contender.parse(text) for text in _POLICIES.value], [float(ms) / 1e3 for ms in _SLO.value]
        if _REAL.value and not any(contender.dynamic for contender in contenders):
            refuse_options("only a dynamic budget reads them; see --policies", "step_times")
        server = Real() if _REAL.value else Analytic(_GPU.value) if _GPU.value else Simulated()
        workload = traffic(server, 1.0, 0)
        if len(workload.requests) < 10 * server.limits.max_num_seqs:
            seats = f"max_num_seqs={server.limits.max_num_seqs}"
            print(
                f"{len(workload.requests)} requests are few for {seats}: most find a place at once, so that rates beyond capacity "
                "may pass; serve at least ten times as many",
                file=sys.stderr,
            )
        about = {"model": flags.FLAGS.model, "workload": workload.name, "requests": digest(repr(workload.requests).encode())}
        about |= {"limits": asdict(server.limits), "bucket_plan": server.plan, "quantile": _QUANTILE.value}
        about |= {"code": code_id(), "workload_seed": flags.FLAGS.workload_seed}
        finished = Finished(None if _JSON.value == "-" else _JSON.value, server.settings | about)
        searches = len(contenders) * len(slos) * _SEEDS.value
        with tqdm(desc="searches", total=searches, unit="search", mininterval=5) as progress:
            rows = tabulate(lambda c, slo, seed: search(server, c, slo, seed, finished, progress), contenders, slos)
    report(rows, contenders[-1].name)
    if _PLOT.value:
        from jaxserve.cli.common.plots import capacities

        capacities(rows, _PLOT.value, f"{workload.name}, {_SEEDS.value} seeds")
    about = {"benchmark": "capacity", "settings": finished.settings, "results": finished.results}
    write_json(_JSON.value, {**about, "capacities": rows, **provenance()})


def report(rows: list[dict[str, Any]], last: str) -> None:
    """The table for people."""
    print(f"{'objective':>10}  {'policy':20} {'requests/s':>16}  over {last}")
    for row in rows:
        over = "" if row["policy"] == last or row["ratio"] is None else f"{row['ratio_text']}x"
        print(f"{row['slo_ms']:>7g} ms  {row['policy']:20} {row['text']:>16}  {over}")


if __name__ == "__main__":
    run_command(main)
