"""The sections of reproduce_sarathi: their titles, in order, and which module computes each (imported when one does)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SECTIONS = {
    "objectives": "Objectives, and what they are multiples of",
    "setups": "Capacity of the four setups",
    "own_objectives": "The strict objective by our own decode iteration",
    "objectives_and_batches": "Five objectives, and vLLM's batch size",
    "ablation": "Ablation",
    "stalls": "Generation stalls",
    "incremental_cost": "What mixing a prompt in costs the decodes",
    "chunking_overhead": "What chunks cost a prompt",
    "tile_quantisation": "Tile quantisation",
    "arithmetic_intensity": "Arithmetic intensity and linear time",
    "cross_node": "A decode iteration across nodes",
    "across_nodes": "Capacity across nodes",
    "bubbles_by_hand": "Bubbles: what one stage waits for",
    "bubbles": "Bubbles, by kind",
    "dynamic_budget": "A budget for every step",
}


def compute(name: str, search: Any, folder: Path) -> tuple[str, dict[str, Any]]:
    """(Markdown, data) of one section; its plots are in the folder."""
    from scripts import sarathi_capacity, sarathi_costs, sarathi_runs

    if hasattr(sarathi_capacity, name):
        return getattr(sarathi_capacity, name)(search, folder)
    return getattr(sarathi_runs if hasattr(sarathi_runs, name) else sarathi_costs, name)(folder)
