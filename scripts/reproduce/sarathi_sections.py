"""The sections of reproduce_sarathi, in order: the title of each, and what computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripts.reproduce import sarathi_capacity, sarathi_costs, sarathi_runs
from scripts.reproduce.sarathi_session import Session

# A section makes (Markdown, data) of a session, and leaves its plots in the session's folder.
SECTIONS: dict[str, tuple[str, Callable[[Session], tuple[str, dict[str, Any]]]]] = {
    "objectives": ("Objectives, and what they are multiples of", sarathi_costs.objectives),
    "setups": ("Capacity of the four setups", sarathi_capacity.setups),
    "own_objectives": ("The objectives by our own decode iteration", sarathi_capacity.own_objectives),
    "objectives_and_batches": ("Five objectives, and vLLM's batch size", sarathi_capacity.objectives_and_batches),
    "ablation": ("Ablation", sarathi_runs.ablation),
    "stalls": ("Generation stalls", sarathi_runs.stalls),
    "incremental_cost": ("What mixing a prompt in costs the decodes", sarathi_costs.incremental_cost),
    "chunking_overhead": ("What chunks cost a prompt", sarathi_costs.chunking_overhead),
    "tile_quantisation": ("Tile quantisation", sarathi_costs.tile_quantisation),
    "arithmetic_intensity": ("Arithmetic intensity and linear time", sarathi_costs.arithmetic_intensity),
    "cross_node": ("A decode iteration across nodes", sarathi_costs.cross_node),
    "across_nodes": ("Capacity across nodes", sarathi_capacity.across_nodes),
    "bubbles_by_hand": ("Bubbles: what one stage waits for", sarathi_costs.bubbles_by_hand),
    "bubbles": ("Bubbles, by kind", sarathi_runs.bubbles),
    "dynamic_budget": ("A budget for every step", sarathi_capacity.dynamic_budget),
}
