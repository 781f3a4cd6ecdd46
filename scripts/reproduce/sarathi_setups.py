"""What Sarathi-Serve (Agrawal et al., OSDI 2024) measured on, as data: machines, datasets, policies, objectives, published figures.

Owns these tables and the step from one of them to a simulated run; the sections of reproduce_sarathi do the rest. Where the paper
leaves a setting open it is its artifact's (github.com/microsoft/sarathi-serve, folder osdi-experiments), which is said beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jaxserve.buckets.unpadded import UnpaddedPlan
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.simulation.pipeline import replay_stages
from jaxserve.step_times.analytic import Deployment
from jaxserve.step_times.hardware import GPUS
from jaxserve.step_times.model_shapes import MODELS
from jaxserve.workloads.traffic import at_rate, log_normal
from jaxserve.workloads.workload import Workload

PAGE_SIZE = 16  # vLLM's, and the artifact's
DATASETS = {"openchat_sharegpt4": 8192, "arxiv_summarization": 16384}  # name -> most tokens of a request
# The artifact's machines are Azure NC96ads v4 with the PCIe board, joined by NVLink in pairs, four to a node (its README);
# bandwidth and the bridge's rate from NVIDIA's datasheet "A100 80GB PCIe".
A100_PCIE = replace(GPUS["a100-80gb"], name="a100-80gb-pcie", bandwidth=1.935e12, nvlink_group=2)


def deployment(model: str, gpu: Any, tp: int, pp: int, gpus_per_node: int) -> Deployment:
    return Deployment(MODELS[model], gpu, tp, pp, gpus_per_node)


@dataclass(frozen=True)
class Setup:
    """A model on its machine. slos, budgets: P99 time between tokens in seconds, and Sarathi's token budget for each. orca_seqs:
    the artifact's batch for Orca, whose memory allowed no more. over_vllm, over_orca: the largest capacity ratio published."""

    machine: Deployment
    slos: dict[str, float]
    budgets: dict[str, int]
    orca_seqs: int
    over_vllm: float
    over_orca: float | None

    @property
    def name(self) -> str:
        return self.machine.model.name


# The artifact serves Mistral-7B-Instruct-v0.2: v0.1's layers without its sliding window.
_MISTRAL = Deployment(replace(MODELS["mistral-7b"], window=None), A100_PCIE, 1, 1, 4)
_YI = deployment("yi-34b", A100_PCIE, 2, 1, 4)
_LLAMA = deployment("llama2-70b", GPUS["a40"], 4, 2, 8)
_FALCON = deployment("falcon-180b", A100_PCIE, 4, 2, 4)
SETUPS = {
    "mistral-7b": Setup(_MISTRAL, {"strict": 0.1, "relaxed": 0.5}, {"strict": 512, "relaxed": 2048}, 16, 2.6, None),
    "yi-34b": Setup(_YI, {"strict": 0.2, "relaxed": 1.0}, {"strict": 512, "relaxed": 2048}, 16, 3.7, 4.0),
    "llama2-70b": Setup(_LLAMA, {"strict": 1.0, "relaxed": 5.0}, {"strict": 512, "relaxed": 1536}, 8, 4.3, 6.3),
    "falcon-180b": Setup(_FALCON, {"strict": 1.0, "relaxed": 5.0}, {"strict": 512, "relaxed": 2048}, 8, 5.6, None),
}
FALCON_TP8 = deployment("falcon-180b", A100_PCIE, 8, 1, 4)


@dataclass(frozen=True)
class Contender:
    """A scheduler as a section runs it. budget: tokens a step; None: whole prompts, as many as fit (a step of vLLM's holds
    max_model_len tokens; Orca's is bounded by its sequences alone). objective: seconds a step, for a dynamic budget."""

    name: str
    policy: str
    budget: int | None = None
    max_num_seqs: int = 128
    chunked: bool | None = None
    mixed: bool | None = None
    objective: float | None = None

    def limits(self, max_model_len: int) -> SchedulerConfig:
        budget = self.budget or (max_model_len * self.max_num_seqs if self.policy == "orca" else max_model_len)
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs,
            policy=self.policy,
            chunked=self.chunked,
            mixed=self.mixed,
        )


def sarathi(budget: int) -> Contender:
    return Contender(f"sarathi-{budget}", "sarathi", budget)


def vllm(max_num_seqs: int = 128) -> Contender:
    """vLLM as the paper compares with it: prefills first, whole, never beside decodes."""
    return Contender(f"vllm-{max_num_seqs}", "prefill_first", max_num_seqs=max_num_seqs)


def orca(max_num_seqs: int) -> Contender:
    return Contender(f"orca-{max_num_seqs}", "orca", max_num_seqs=max_num_seqs)


@cache
def lengths(dataset: str, num_requests: int, seed: int) -> Workload:
    return log_normal(dataset, num_requests, seed)


@cache
def stages(machine: Deployment) -> tuple[Any, ...]:
    return machine.stages(PAGE_SIZE)


def run_at(
    machine: Deployment, contender: Contender, dataset: str, rate: float, num_requests: int, seed: int, *, give_up: Any = None
) -> Any:
    """A Replay of a dataset's requests with Poisson arrivals, or a PipelineReplay where the machine has several stages; give_up as
    theirs. Shapes are not padded, as in the systems compared: what uneven ones cost is in the step times."""
    max_model_len, workload = DATASETS[dataset], at_rate(lengths(dataset, num_requests, seed), rate, seed)
    limits = contender.limits(max_model_len)
    plan = UnpaddedPlan(limits.max_num_batched_tokens, limits.max_num_seqs)
    num_pages = machine.num_pages(PAGE_SIZE, max_model_len)
    options = {"objective": contender.objective, "give_up": give_up}
    return replay_stages(workload, plan, stages(machine), machine.send_seconds, limits, num_pages, **options)
