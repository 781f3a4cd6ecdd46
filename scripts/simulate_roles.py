r"""Prefill and decode together against apart, simulated: time to the first token and between tokens of both, over request rates.

    python -m scripts.simulate_roles --json=benchmarks/results/roles.json --plot=benchmarks/roles.png

As many GPUs serve the same requests in each arrangement: all of them alike, behind a router, or some for prompts and the others for
output. Step times are modelled (docs/simulator.md); nothing here was read off a GPU. Apart, KV passes at --kv_bandwidth, once to be
stored and once to be loaded.
"""

from __future__ import annotations

import sys
from typing import Any

from absl import flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.plots import CAN_PLOT
from jaxserve.cli.common.provenance import provenance, write_json

_MODEL = flags.DEFINE_string("model", "qwen3-8b", "A name in jaxserve/step_times/model_shapes.py.")
_GPU = flags.DEFINE_string("gpu", "h100", "A name in jaxserve/step_times/hardware.py.")
_GPUS = flags.DEFINE_integer("gpus", 4, "GPUs of an arrangement, one an engine.", lower_bound=2)
_RATES = flags.DEFINE_list("rates", ["4", "8", "12", "16", "20", "24"], "Requests a second.")
_REQUESTS = flags.DEFINE_integer("num_requests", 600, "Of each run.", lower_bound=2)
_PROMPT = flags.DEFINE_integer("prompt", 2048, "Mean tokens of a prompt; uniform from half to one and a half of it.", lower_bound=2)
_OUTPUT = flags.DEFINE_integer("output", 128, "The same of an output.", lower_bound=2)
_BUDGET = flags.DEFINE_list("budgets", ["512", "2048"], "max_num_batched_tokens of engines that do both.")
_BANDWIDTH = flags.DEFINE_float("kv_bandwidth", 10.0, "GB/s of KV.", lower_bound=1e-3)
_LATENCY = flags.DEFINE_float("kv_latency_ms", 1.0, "Milliseconds of a load beside its bytes.", lower_bound=0)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
_PLOT = flags.DEFINE_string("plot", None, "Draw it into this PNG file.")
flags.register_validator(_PLOT, *CAN_PLOT)

PREFILL_BUDGET = 2048  # tokens of a step of a prefill replica
PAGE_SIZE, MAX_LEN, MAX_SEQS = 64, 16_384, 256


class Machine:
    """Replicas of one GPU each: their step times, limits and pools."""

    def __init__(self) -> None:
        from jaxserve.simulation.roles import KVLink
        from jaxserve.step_times.analytic import Deployment
        from jaxserve.step_times.commands import programs_of

        self.deployment = Deployment.named(_MODEL.value, _GPU.value, programs=programs_of(1, False))
        (self.step_times,) = self.deployment.stages(PAGE_SIZE)
        self.link = KVLink(_LATENCY.value / 1e3, self.deployment.kv_token_bytes / (1e9 * _BANDWIDTH.value))

    def _engine(self, budget: int) -> tuple[Any, ...]:
        """What a replica of so many tokens a step is made from."""
        from jaxserve.buckets.plan import BucketPlan
        from jaxserve.scheduling.config import SchedulerConfig

        limits = SchedulerConfig(max_model_len=MAX_LEN, max_num_batched_tokens=budget, max_num_seqs=MAX_SEQS)
        plan = BucketPlan.default(MAX_SEQS, budget)
        return plan, self.step_times, limits, self.deployment.num_pages(PAGE_SIZE, budget)

    def together(self, workload: Any, budget: int) -> Any:
        """ServedTimes of all GPUs alike."""
        from jaxserve.routing.policy import make_policy
        from jaxserve.simulation.cluster import replay_cluster
        from jaxserve.simulation.replica import Replica

        engine, policy = self._engine(budget), make_policy("least_loaded")
        return replay_cluster(workload, lambda r, p: Replica(r, *engine, prefix_caching=p), _GPUS.value, policy).times

    def apart(self, workload: Any, num_prefill: int) -> Any:
        """ServedTimes of so many GPUs for prompts, and the others for output."""
        from jaxserve.routing.policy import make_policy
        from jaxserve.simulation.replica import Replica
        from jaxserve.simulation.roles import DecodeReplica, replay_roles

        engine, link = self._engine(PREFILL_BUDGET), self.link
        return replay_roles(
            workload,
            lambda r, p: Replica(r, *engine, prefix_caching=p),
            lambda r, told: DecodeReplica(r, *engine, told=told, link=link),
            num_prefill,
            _GPUS.value - num_prefill,
            lambda: make_policy("least_loaded"),
            lambda num_tokens: link.seconds(min(num_tokens, PREFILL_BUDGET)),
        ).times


def main() -> None:
    with refuse_bad_input():
        machine, rates, budgets = Machine(), [float(rate) for rate in _RATES.value], [int(budget) for budget in _BUDGET.value]
    from jaxserve.workloads.traffic import at_rate
    from jaxserve.workloads.workload import random_lengths

    work = random_lengths(_REQUESTS.value, _PROMPT.value, _OUTPUT.value, 0.5)
    found: dict[str, list[dict[str, float]]] = {}
    for rate in rates:
        sent = at_rate(work, rate, 0)
        runs = {f"together, {budget} tokens a step": machine.together(sent, budget) for budget in budgets}
        runs |= {f"apart, {n} for prompts": machine.apart(sent, n) for n in range(1, _GPUS.value)}
        for name, times in runs.items():
            summary = times.summary(percentiles=(50, 90, 99))
            row = {"rate": rate, "p50_ttft_ms": summary["p50_ttft_ms"], "p90_ttft_ms": summary["p90_ttft_ms"]}
            row |= {"p50_tbt_ms": summary["p50_itl_ms"], "p99_tbt_ms": summary["p99_itl_ms"]}
            row["output_throughput"] = summary["output_throughput"]
            found.setdefault(name, []).append(row)
            print(f"{rate:g}/s, {name}: " + ", ".join(f"{key} {value:.1f}" for key, value in row.items() if key != "rate"))
            sys.stdout.flush()
    about = {"benchmark": "roles", "deployment": str(machine.deployment), "gpus": _GPUS.value, "kv_bandwidth_gbs": _BANDWIDTH.value}
    about |= {"prompt": _PROMPT.value, "output": _OUTPUT.value, "num_requests": _REQUESTS.value}
    write_json(_JSON.value, {**about, "kv_latency_ms": _LATENCY.value, "runs": found, **provenance()})
    if _PLOT.value:
        draw(found, _PLOT.value, f"{_GPUS.value} x {_GPU.value}, {_MODEL.value}, modelled")


def draw(found: dict[str, list[dict[str, float]]], path: str, title: str) -> None:
    """Both times of every arrangement over the rates."""
    from jaxserve.cli.common.plots import figure, save

    made, axes = figure(1, 2)
    for axis, metric, label in zip(axes[0], ("p90_ttft_ms", "p99_tbt_ms"), ("P90 TTFT (ms)", "P99 TBT (ms)"), strict=True):
        for name, rows in found.items():
            style = "--" if name.startswith("apart") else "-"
            axis.plot([row["rate"] for row in rows], [row[metric] for row in rows], style, marker="o", label=name)
        axis.set(xlabel="requests a second", ylabel=label, yscale="log", title=title)
    axes[0][0].legend(fontsize=7)
    save(made, path)


if __name__ == "__main__":
    run_command(main)
