"""How long a GPU takes for one operator, by arithmetic: the larger of its work and its traffic, in whole waves of tiles.

Owns the formulas; hardware.py has their constants. Knows no model and no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from jaxserve.step_times.hardware import (
    BANDWIDTH_SHARE,
    GPU,
    KERNEL_SECONDS,
    MATMUL_SHARE,
    NCCL_BASE_SECONDS,
    NCCL_LL_RATE,
    NCCL_LL_SHARE,
    NCCL_NETWORK_OVERHEAD,
    NCCL_PLATEAU,
    Link,
)

BYTES = 2  # a weight, an activation, a KV value: bfloat16

# (rows of tokens, columns, share of the rate): cuBLAS's tiles as NVIDIA's "Matrix Multiplication Background" guide lists them; the
# smaller ones re-read more. Their 0.9 is from the same profile as MATMUL_SHARE.
TILES: tuple[tuple[int, int, float], ...] = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 1.0),
    (64, 256, 0.9),
    (256, 64, 0.9),
    (64, 128, 0.9),
    (128, 64, 0.9),
)


def matmul_seconds(gpu: GPU, T: int, n: int, k: int, groups: int = 1) -> float:
    """[T, k] x [k, n] in bfloat16, `groups` such products in one kernel.

    Tiles are dealt to the SMs in waves, and a wave with one tile lasts as long as a full one (tile and wave quantisation: NVIDIA's
    "Matrix Multiplication Background"); the best of the tile sizes is taken, as cuBLAS does.
    """
    rate = gpu.flops * MATMUL_SHARE / gpu.num_sms  # of one SM
    compute = min(
        ceil(groups * ceil(T / rows) * ceil(n / columns) / gpu.num_sms) * rows * columns / share for rows, columns, share in TILES
    )
    traffic = groups * BYTES * (n * k + T * (n + k)) / (gpu.bandwidth * BANDWIDTH_SHARE)
    return max(2 * k * compute / rate, traffic) + KERNEL_SECONDS


def stream_seconds(gpu: GPU, num_bytes: float, share: float = BANDWIDTH_SHARE) -> float:
    """A kernel that reads and writes `num_bytes` and computes next to nothing, at a share of the memory's bandwidth."""
    return num_bytes / (gpu.bandwidth * share) + KERNEL_SECONDS


def all_reduce_seconds(num_bytes: float, ranks: int, links: Sequence[Link], nodes: int = 1) -> float:
    """A ring over `ranks` GPUs on `nodes` nodes, by NCCL's own tuning model (hardware.py says which), the better of two protocols.

    links: that of a hop inside a node, and that of a hop between nodes where there is one; the slowest bounds the bandwidth.
    """
    return _ring_seconds(num_bytes, ranks, 2 * (ranks - 1), links, nodes)


def all_gather_seconds(num_bytes: float, ranks: int, links: Sequence[Link], nodes: int = 1) -> float:
    """`num_bytes` together, of which every rank has a part and gets all: half the steps of an all-reduce. Else as there."""
    return _ring_seconds(num_bytes, ranks, ranks - 1, links, nodes)


def _ring_seconds(num_bytes: float, ranks: int, steps: int, links: Sequence[Link], nodes: int) -> float:
    """So many steps of a ring, in each of which every rank sends a part."""
    if ranks == 1:
        return 0.0
    between = min(steps, 2 * nodes) if nodes > 1 else 0
    slowest = min(link.rate for link in links)
    rates = min(slowest * NCCL_LL_SHARE, NCCL_LL_RATE), slowest
    times = []
    for protocol, rate in enumerate(rates):
        inside, latency = links[0].hop_seconds[protocol], NCCL_BASE_SECONDS[protocol]
        if nodes > 1:
            inside = max(inside, NCCL_NETWORK_OVERHEAD[protocol])
        latency += (steps - between) * inside + between * links[-1].hop_seconds[protocol]
        plateau = NCCL_PLATEAU if protocol == 1 and nodes > 1 else 1.0
        times.append(latency * plateau + num_bytes * steps / ranks / rate)
    return min(times)


def send_seconds(num_bytes: float, link: Link) -> float:
    """From one GPU to another, NCCL's protocol Simple."""
    return NCCL_BASE_SECONDS[1] + link.hop_seconds[1] + num_bytes / link.rate
