"""Matmuls of rows sorted by group, each with its group's own matrix: a mixture of experts. `api` is the way in."""

from kernels.grouped_matmul.api import combine_rows, gather_rows, grouped_matmul, plan_groups

__all__ = ["combine_rows", "gather_rows", "grouped_matmul", "plan_groups"]
