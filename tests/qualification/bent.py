"""Attention that is off by a hundredth."""

from typing import Any

from kernels.ragged_paged_attention import xla
from kernels.ragged_paged_attention.xla import lacks as lacks
from kernels.ragged_paged_attention.xla import plan_work as plan_work


def attend(*args: Any, **options: Any) -> Any:
    return xla.attend(*args, **options) * 1.01
