"""Step times of named models on named GPUs, by arithmetic: for machines that nobody has at hand.

Owns the list of a layer's operators, how tensor and pipeline parallelism cut them, and the memory that is left for KV. Constants
are hardware.py's, formulas operators.py's, the engine's own commands commands.py's, and what measures a real machine is
engine/measure.py.

A step's time is affine in what it attends to, as a measured StepTimeModel's is:

    seconds = base(tokens) + per_kv_token * (KV positions that decodes read) + per_pair * (query-key pairs of chunks) + head(rows)

What it leaves out: chunks of a few tokens over a long prefix are charged their FLOPs, not the reads of that prefix; SMs are never
idle for want of sequences; kernels never overlap; power and clocks are what the profiled kernels saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxserve.buckets.plan import Bucket
from jaxserve.step_times.commands import Commands, EnginePrograms
from jaxserve.step_times.hardware import (
    ACTIVATION_SHARE,
    ADD_SHARE,
    ATTENTION_SHARE,
    BANDWIDTH_SHARE,
    ETHERNET_100G,
    GPU,
    GPUS,
    HOST_LAUNCH_SECONDS,
    KERNEL_SECONDS,
    LAUNCH_SECONDS,
    NORM_SHARE,
    ROPE_SHARE,
    Link,
)
from jaxserve.step_times.model_shapes import MODELS, ModelShape
from jaxserve.step_times.operators import (
    BYTES,
    all_gather_seconds,
    all_reduce_seconds,
    matmul_seconds,
    send_seconds,
    stream_seconds,
)

HOST_SECONDS = 0.15e-3  # schedule + pack + update with 256 running (scripts.bench_scheduler, benchmarks/cpu)
_ATTENTION_KERNELS = 2  # the kernel, and the join of split sequences


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs: `pp` stages of `tp` GPUs each, in nodes of `gpus_per_node`.

    programs: how many commands a step is, of this engine's programs; None: a kernel an operator, as in the systems of publications,
    which gather logits too. attention_groups: as the engine's option: a stage's GPUs attend in so many groups, each to requests of
    its own with pages of its own, and the attention is cut over a group; the rest of a layer is cut over all, for the tokens of
    all. Sums are over all. Requests are taken to be spread evenly. network: between nodes. Tensor parallelism runs over NVLink
    where its group holds all ranks, over PCIe where a node does, and otherwise over both; so do sends between stages.

    Raises:
      ValueError: the model can't be cut so, or its weights leave no room (num_pages).
    """

    model: ModelShape
    gpu: GPU
    tp: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    network: Link = ETHERNET_100G
    programs: EnginePrograms | None = None
    attention_groups: int = 1

    def __post_init__(self) -> None:
        model, tp, pp = self.model, self.tp, self.pp
        if tp < 1 or pp < 1 or self.gpus_per_node < 1:
            raise ValueError(f"{tp=}, {pp=} and gpus_per_node={self.gpus_per_node} must be >= 1")
        if self.attention_groups < 1 or tp % self.attention_groups:
            raise ValueError(f"attention_groups={self.attention_groups} must divide {tp=}")
        if model.num_heads % tp or max(tp, model.num_kv_heads) % min(tp, model.num_kv_heads):
            raise ValueError(f"{model.name} has {model.num_heads} heads and {model.num_kv_heads} KV heads, not cut evenly by {tp=}")
        if pp > model.num_layers:
            raise ValueError(f"{pp=} stages need as many layers, {model.name} has {model.num_layers}")

    @classmethod
    def named(cls, model: str, gpu: str, tp: int = 1, pp: int = 1, **options: Any) -> Deployment:
        """By names in MODELS and GPUS. ValueError lists them."""
        for name, known in ((model, MODELS), (gpu, GPUS)):
            if name not in known:
                raise ValueError(f"{name!r} is not known; choose from {', '.join(known)}")
        return cls(MODELS[model], GPUS[gpu], tp, pp, **options)

    def __str__(self) -> str:
        return f"{self.model.name} on {self.tp * self.pp} {self.gpu.name} (TP{self.tp}, PP{self.pp})"

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage, as even as can be, the first ones longer, as the engine has them: the last one has the head."""
        each, more = divmod(self.model.num_layers, self.pp)
        return tuple(each + (stage < more) for stage in range(self.pp))

    @property
    def attention_tp(self) -> int:
        """GPUs over which one request's attention is cut."""
        return self.tp // self.attention_groups

    @property
    def kv_heads(self) -> int:
        """KV heads a GPU; beyond a rank each they are copied."""
        return max(1, self.model.num_kv_heads // self.attention_tp)

    @property
    def kv_token_bytes(self) -> int:
        """Of one token's keys and values in all layers, each KV head once."""
        return self.model.num_layers * 2 * self.model.num_kv_heads * self.model.head_dim * BYTES

    @property
    def _tp_links(self) -> tuple[tuple[Link, ...], int]:
        """(links of the tensor-parallel ring, nodes that it spans)."""
        gpu, nodes = self.gpu, -(-self.tp // self.gpus_per_node)
        inside = gpu.nvlink if min(self.tp, self.gpus_per_node) <= gpu.nvlink_group else gpu.pcie
        return ((inside, self.network) if nodes > 1 else (inside,)), nodes

    def all_reduce_seconds(self, num_tokens: int) -> float:
        """The sum of [num_tokens, D] over a stage's GPUs."""
        links, nodes = self._tp_links
        return all_reduce_seconds(num_tokens * self.model.hidden_size * BYTES, self.tp, links, nodes)

    def send_seconds(self, num_tokens: int, stage: int = 0) -> float:
        """[num_tokens, D] from `stage` to the next. Ranks send a part each, over one link between nodes. GPUs are numbered stage by
        stage and fill nodes and NVLink groups in that order; the slowest link that a rank needs counts."""
        senders = [(gpu, gpu + self.tp) for gpu in range(stage * self.tp, (stage + 1) * self.tp)]
        if any(a // self.gpus_per_node != b // self.gpus_per_node for a, b in senders):
            link = self.network
        else:
            groups = [[gpu % self.gpus_per_node // self.gpu.nvlink_group for gpu in pair] for pair in senders]
            link = self.gpu.nvlink if all(a == b for a, b in groups) else self.gpu.pcie
        return send_seconds(num_tokens * self.model.hidden_size * BYTES, link)

    def weight_bytes(self, stage: int) -> float:
        """Of one GPU of a stage; what several have of the attention and the router counts on each."""
        m, first, last = self.model, stage == 0, stage == self.pp - 1
        embeddings = first + last - (m.tied and first and last)
        copies = 2 * m.hidden_size * m.head_dim * (self.attention_tp * self.kv_heads - m.num_kv_heads) * self.attention_groups
        copies += (self.attention_groups - 1) * m.attention_weights + (self.tp - 1) * m.hidden_size * m.num_experts
        return BYTES * (self.layers[stage] * (m.layer_weights + copies) + embeddings * m.embedding_weights) / self.tp

    def num_pages(self, page_size: int, max_num_batched_tokens: int, memory_utilization: float = 0.9) -> int:
        """KV pages that fit the fullest stage, beside its weights and the activations of the largest step. ValueError if none does.

        Activations: a token's residual, norm, qkv and MLP widths twice over, as a compiler that reuses buffers holds them.
        """
        m, fits = self.model, []
        wide = 2 * m.hidden_size + (2 * m.ffn_size * max(1, m.num_experts_per_token) + m.num_heads * m.head_dim * 2) / self.tp
        for stage, layers in enumerate(self.layers):
            room = self.gpu.memory * memory_utilization - self.weight_bytes(stage) - 2 * BYTES * max_num_batched_tokens * wide
            fits.append(int(room // (layers * 2 * self.kv_heads * m.head_dim * BYTES * page_size)))
        if min(fits) < 1:
            need = max(self.weight_bytes(stage) for stage in range(self.pp)) / 2**30
            raise ValueError(f"{self}: {need:.1f} GiB of weights a GPU leave no room for KV; raise tp or pp")
        return min(fits) * self.attention_groups

    def stages(self, page_size: int = 16, host_seconds: float = HOST_SECONDS) -> tuple[AnalyticStepTimes, ...]:
        """The step times of each pipeline stage."""
        return tuple(AnalyticStepTimes(self, stage, page_size, host_seconds) for stage in range(self.pp))

    def step_times(self, page_size: int = 16, host_seconds: float = HOST_SECONDS) -> AnalyticStepTimes:
        """The step times of a deployment of one stage. ValueError if it has more."""
        if self.pp != 1:
            raise ValueError(f"{self} has {self.pp} stages, each with times of its own; use stages()")
        return self.stages(page_size, host_seconds)[0]


class AnalyticStepTimes:
    """Predicted times of one stage's steps, in whatever bucket: the StepTimes of a Deployment. Times of a number of tokens are
    worked out once."""

    def __init__(self, deployment: Deployment, stage: int, page_size: int, host_seconds: float):
        self.deployment = deployment
        self.stage = stage
        self.page_size = page_size
        self.commands: Commands | None = None
        self._head_commands: Commands | None = None
        if (programs := deployment.programs) is not None:
            num_layers, tp = deployment.layers[stage], deployment.tp
            groups = deployment.attention_groups
            self.commands = programs.body(
                deployment.model,
                num_layers,
                tp,
                has_embedding=stage == 0,
                has_head=stage == deployment.pp - 1,
                attention_groups=groups,
            )
            self._head_commands = programs.head(tp)
            is_last = stage == deployment.pp - 1
            host_seconds += HOST_LAUNCH_SECONDS * (self.commands.launches + is_last * self._head_commands.launches)
        self.host_seconds: float = host_seconds
        self.window: int | None = deployment.model.window
        self._num_layers = deployment.layers[stage]
        self._bases: dict[int, float] = {}
        self._heads: dict[int, float] = {0: 0.0}

    @cached_property
    def per_kv_token(self) -> float:
        """Seconds a position that a decode reads; a group's GPUs read those of its own requests."""
        d = self.deployment
        num_bytes = self._num_layers * 2 * d.kv_heads * d.model.head_dim * BYTES / d.attention_groups
        return num_bytes / (d.gpu.bandwidth * BANDWIDTH_SHARE)

    @cached_property
    def per_pair(self) -> float:
        """Seconds a (query, key) pair: two products of head_dim a head."""
        d = self.deployment
        return self._num_layers * 4 * d.model.num_heads / d.tp * d.model.head_dim / (d.gpu.flops * ATTENTION_SHARE)

    def operators(self, T: int) -> dict[str, float]:
        """Seconds of each operator of one layer but attention proper, for T tokens; launches are in them."""
        d, m, gpu = self.deployment, self.deployment.model, self.deployment.gpu
        D, tp, own = m.hidden_size, d.attention_tp, -(-T // d.attention_groups)  # tokens that a group attends for
        qkv = (m.num_heads // tp + 2 * d.kv_heads) * m.head_dim
        rotated, norms = qkv - d.kv_heads * m.head_dim, 1 if m.parallel_block else 2
        return {
            "norms": norms * stream_seconds(gpu, 2 * T * D * BYTES, NORM_SHARE),
            "qkv": matmul_seconds(gpu, own, qkv, D),
            "rope": stream_seconds(gpu, 2 * own * rotated * BYTES, ROPE_SHARE),
            "kv_write": stream_seconds(gpu, 4 * own * d.kv_heads * m.head_dim * BYTES),
            "attention_launches": _ATTENTION_KERNELS * KERNEL_SECONDS,
            "o": matmul_seconds(gpu, own, D, m.num_heads // tp * m.head_dim),
            "add": 2 * stream_seconds(gpu, 3 * T * D * BYTES, ADD_SHARE),
            "all_reduce": norms * d.all_reduce_seconds(T),
            **(self._experts(T) if m.num_experts else self._mlp(T)),
        }

    def _mlp(self, T: int) -> dict[str, float]:
        d, gpu, up = self.deployment, self.deployment.gpu, 2 if self.deployment.model.gated else 1
        D, F = d.model.hidden_size, d.model.ffn_size // d.tp
        return {
            "mlp_up": matmul_seconds(gpu, T, up * F, D),
            "mlp_activation": stream_seconds(gpu, (up + 1) * T * F * BYTES, ACTIVATION_SHARE),
            "mlp_down": matmul_seconds(gpu, T, D, F),
        }

    def _experts(self, T: int) -> dict[str, float]:
        """Each token goes to experts drawn at random: those that nobody chose are not read."""
        d, m, gpu = self.deployment, self.deployment.model, self.deployment.gpu
        D, F, E, chosen = m.hidden_size, m.ffn_size // d.tp, m.num_experts, T * m.num_experts_per_token
        active = max(1, round(E * (1 - (1 - m.num_experts_per_token / E) ** T)))
        rows = -(-chosen // active)
        return {
            "router": matmul_seconds(gpu, T, E, D),
            "experts_gather": stream_seconds(gpu, 2 * chosen * D * BYTES),
            "mlp_up": matmul_seconds(gpu, rows, 2 * F, D, active),
            "mlp_activation": stream_seconds(gpu, 3 * chosen * F * BYTES, ACTIVATION_SHARE),
            "mlp_down": matmul_seconds(gpu, rows, D, F, active),
            "experts_combine": stream_seconds(gpu, (chosen + T) * D * BYTES),
        }

    def base_seconds(self, T: int) -> float:
        """A step of T tokens that attends to nothing; with the embedding's rows in the first stage."""
        seconds = self._bases.get(T)
        if seconds is None:
            d, commands = self.deployment, self.commands
            seconds = self._num_layers * sum(self.operators(T).values())
            if self.stage == 0:
                seconds += stream_seconds(d.gpu, 2 * T * d.model.hidden_size * BYTES)
            if commands is not None:  # in place of a kernel an operator; the sum of the embedding is no layer's
                num_kernels = self._num_layers * self.num_kernels + (self.stage == 0)
                seconds += _launch_seconds(commands) - num_kernels * KERNEL_SECONDS
                seconds += d.all_reduce_seconds(T) if self.stage == 0 else 0.0
            self._bases[T] = seconds
        return seconds

    @property
    def num_kernels(self) -> int:
        """Kernels of one layer's `operators`, each with its launch: one each but two norms, two adds and two of attention; an
        all-reduce is none."""
        m = self.deployment.model
        return (1 if m.parallel_block else 2) + 8 + (6 if m.num_experts else 3)

    def body_seconds(self, bucket: Bucket, kv_tokens: Any = 0, pairs: Any = 0) -> Any:
        """Seconds of a body; kv_tokens and pairs may be arrays."""
        return self.base_seconds(bucket.tokens) + self.per_kv_token * kv_tokens + self.per_pair * pairs

    def coefficients(self, bucket: Bucket) -> np.ndarray:
        """f64[3]: base, per_kv_token, per_pair."""
        return np.array([self.base_seconds(bucket.tokens), self.per_kv_token, self.per_pair])

    def head_seconds(self, rows: int) -> float:
        """Norm, logits, their gathering and sampling (three passes over float32 logits) of the last stage; 0 rows: none runs."""
        if self.stage != self.deployment.pp - 1:
            return 0.0
        seconds = self._heads.get(rows)
        if seconds is None:
            d, m, gpu, commands = self.deployment, self.deployment.model, self.deployment.gpu, self._head_commands
            columns, (links, nodes) = -(-m.vocab_size // d.tp), d._tp_links
            seconds = stream_seconds(gpu, 2 * rows * m.hidden_size * BYTES, NORM_SHARE)
            seconds += matmul_seconds(gpu, rows, columns, m.hidden_size)
            if commands is None:
                seconds += 3 * stream_seconds(gpu, rows * m.vocab_size * 4)
                # An all-gather is half of an all-reduce.
                seconds += all_reduce_seconds(rows * m.vocab_size * 4, d.tp, links, nodes) / 2
            else:  # logits are never gathered: three numbers a row are
                seconds += 3 * (stream_seconds(gpu, rows * columns * 4) - KERNEL_SECONDS)
                seconds += _launch_seconds(commands) - 2 * KERNEL_SECONDS
                seconds += all_gather_seconds(rows * d.tp * 3 * 4, d.tp, links, nodes)
            self._heads[rows] = seconds
        return seconds

    def seconds(self, bucket: Bucket, head_rows: int, kv_tokens: float, pairs: float) -> float:
        """Seconds of one step on the device."""
        return float(self.body_seconds(bucket, kv_tokens, pairs)) + self.head_seconds(head_rows)


def _launch_seconds(commands: Commands) -> float:
    """What a program's commands take on the device beyond their work; a sum's latency is in its own time."""
    return (commands.nodes + commands.outside) * KERNEL_SECONDS + commands.launches * LAUNCH_SECONDS
