"""Matmuls of rows sorted by group, each with its group's own matrix: a mixture of experts. `api` is the way in."""

from typing import TYPE_CHECKING

from kernels.grouped_matmul.api import combine_rows, gather_rows, grouped_matmul, plan_groups, resolve_backend
from kernels.moved import backends_of

__all__ = ["combine_rows", "gather_rows", "grouped_matmul", "plan_groups", "resolve_backend"]

if not TYPE_CHECKING:
    __getattr__ = backends_of(__name__, "GROUPED_MATMUL")
