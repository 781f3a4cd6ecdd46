"""How many commands this engine's programs are on a GPU: kernels, CUDA graphs, and sums over devices.

Owns the counts. They were read off programs that were compiled for H100s and H200s (benchmarks/results/aot_tp.json, aot_pp.json and
aot_groups.json, with which the tests compare them), and no card has run them. What a command takes is hardware.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxserve.step_times.model_shapes import ModelShape

LEAST_GRAPH = 5  # neighbouring commands that XLA makes a graph of; fewer are launched one by one (xla_gpu_graph_min_graph_size)


@dataclass(frozen=True)
class LayerCommands:
    """attention: from the first norm to o_proj. mlp: the rest. A layer's sums over devices are between and behind them, and not
    counted."""

    attention: int
    mlp: int


# On one device, and on several, where the sum parts a matmul from what it is added to.
_DENSE = LayerCommands(5, 2), LayerCommands(6, 3)
_EXPERTS = LayerCommands(5, 12), LayerCommands(6, 12)  # of a decode; a mixed step's have up to three more
_IN_GROUPS = 2  # more of an attention in groups: a group's rows are taken out, and what it made of them put among zeros
_BODY = 14  # before the layers: the packed inputs taken apart, the embedding or what another stage sent, angles
_ROWS = 8  # behind them, on the last stage: the rows of the head
_HEAD = 30  # of a step that samples greedily: what the branches of other steps hold is not run


@dataclass(frozen=True)
class Commands:
    """One program's commands. graphs: CUDA graphs. nodes: commands in them. outside: commands that are launched one by one. sums:
    over devices. launches: what the host starts, of all of them."""

    graphs: int
    nodes: int
    outside: int
    sums: int
    launches: int


@dataclass(frozen=True)
class EnginePrograms:
    """What the engine compiles. graph_collectives: as the engine's option; of several devices only."""

    graph_collectives: bool = False

    def body(
        self,
        model: ModelShape,
        num_layers: int,
        tp: int,
        *,
        has_embedding: bool = True,
        has_head: bool = True,
        attention_groups: int = 1,
    ) -> Commands:
        """The body of a stage of so many layers: the first has the embedding, the last one the rows of the head. attention_groups:
        as the engine's option."""
        beside = _BODY + _ROWS * has_head
        layer = (_EXPERTS if model.num_experts else _DENSE)[tp > 1]
        if attention_groups > 1:
            layer = replace(layer, attention=layer.attention + _IN_GROUPS)
        if tp == 1:
            return Commands(1, num_layers * (layer.attention + layer.mlp) + beside, 0, 0, 1)
        sums = 2 * num_layers + has_embedding
        if self.graph_collectives:
            return Commands(1, num_layers * (layer.attention + layer.mlp) + beside, 0, sums, 1)
        parts = [part for part in (layer.attention, layer.mlp) if part >= LEAST_GRAPH]
        graphs = num_layers * len(parts) + 1 + has_embedding
        outside = num_layers * (layer.attention + layer.mlp - sum(parts))
        return Commands(graphs, num_layers * sum(parts) + beside, outside, sums, graphs + outside + sums)

    def head(self, tp: int) -> Commands:
        """A head: on several devices they join the best entry of each. `sums` is that one gathering."""
        if tp == 1 or self.graph_collectives:
            return Commands(1, _HEAD, 0, int(tp > 1), 1)
        return Commands(2, _HEAD, 0, 1, 3)


def programs_of(tensor_parallel_size: int, graph_collectives: bool) -> EnginePrograms:
    """The programs of an engine with these options. ValueError as an engine: graphs hold sums of several devices only."""
    if graph_collectives and tensor_parallel_size == 1:
        raise ValueError("graph_collectives=True is of several devices, and tensor_parallel_size=1: leave it out")
    return EnginePrograms(graph_collectives)
