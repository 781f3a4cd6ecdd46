"""Causal attention of a ragged batch over a paged KV cache. `api` is the way in; `reference` is the spec."""

from typing import TYPE_CHECKING

from kernels.moved import backends_of
from kernels.ragged_paged_attention.api import host_planner, plan_work, ragged_paged_attention, resolve_backend

__all__ = ["host_planner", "plan_work", "ragged_paged_attention", "resolve_backend"]

if not TYPE_CHECKING:
    __getattr__ = backends_of(__name__, "ATTENTION")
