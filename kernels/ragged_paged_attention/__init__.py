"""Causal attention of a ragged batch over a paged KV cache. `api` is the way in; `reference` is the spec."""

from kernels.ragged_paged_attention.api import host_planner, plan_work, ragged_paged_attention, resolve_backend

__all__ = ["host_planner", "plan_work", "ragged_paged_attention", "resolve_backend"]
