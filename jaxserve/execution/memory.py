"""How many KV pages fit: bytes a page, the device's limit, and the pool that is left beside weights and programs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.kv_store.memory_limit import host_memory_bytes

CPU_POOL_BYTES = 1 << 30  # most that a pool takes on a CPU unless num_pages says otherwise
GEMM_WORKSPACE_BYTES = 32 << 20  # of temporary memory that XLA gives a cuBLASLt matmul on Hopper; some programs have one, some none


@dataclass(frozen=True)
class PageShape:
    """The KV cache's shape: [num_pages, 2, num_kv_heads, page_size, head_dim] in each of num_layers layers."""

    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: Any

    def layer(self, num_pages: int) -> tuple[int, int, int, int, int]:
        """Shape of a layer's pages: [num_pages, 2, K, page_size, H]."""
        return (num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.num_layers * math.prod(self.layer(1)) * np.dtype(self.dtype).itemsize


def reserve_bytes(temp_bytes: Iterable[int]) -> int:
    """Temporary memory that is enough for every program of a plan, from that of the largest of each kind (body, head, scoring).

    What a program keeps besides grows with its tokens and rows; whether its matmuls have a workspace does not: a small bucket's
    may, where the largest's have none.
    """
    return max(temp_bytes) + GEMM_WORKSPACE_BYTES


def decide_num_pages(
    pages: PageShape,
    *,
    max_num_seqs: int,
    max_model_len: int,
    utilization: float,
    device_limit: int | None,  # bytes; None on a device that does not say (a CPU)
    weight_bytes: int,
    temp_bytes: int,
    num_devices: int = 1,
    draft_page_bytes: int = 0,
) -> int:
    """The pool's size in pages: (utilization * limit - weights - temp) / page bytes, those of a draft's layers included, and never
    more than max_num_seqs requests of max_model_len could use. On a CPU the limit is a quarter of the memory, of which the pool
    takes at most CPU_POOL_BYTES; `num_devices` there share one memory.

    Raises:
      ValueError: not one page fits.
    """
    most = max_num_seqs * math.ceil(max_model_len / pages.page_size)
    if device_limit is None:
        room = min(CPU_POOL_BYTES, int(utilization * host_memory_bytes() / 4)) // num_devices
    else:
        room = int(utilization * device_limit) - weight_bytes - temp_bytes
    page_bytes = pages.page_bytes + draft_page_bytes
    fit = room // page_bytes
    if fit < 1:
        less = f"less weights {weight_bytes / 2**30:.2f} GiB and programs {temp_bytes / 2**30:.2f} GiB "
        limit = host_memory_bytes() / 4 if device_limit is None else device_limit
        raise ValueError(
            f"no KV page fits: gpu_memory_utilization={utilization} of {limit / 2**30:.1f} GiB "
            f"{'' if device_limit is None else less}leaves {room / 2**20:.0f} MiB, a page takes "
            f"{page_bytes / 2**20:.2f} MiB; raise gpu_memory_utilization, lower page_size or "
            "max_num_batched_tokens, or take a smaller model"
        )
    return min(fit, most)
