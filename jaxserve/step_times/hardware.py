"""GPUs and links in numbers, each with its source: what the analytic step times are made of.

Owns datasheet values and the shares of them that kernels reach. Knows no model, operator or step.

Shares of a peak come from microbenchmarks, papers and libraries' own tuning tables, never from a serving result. Those marked (V)
were read from one of Vidur's published kernel profiles (github.com/microsoft/vidur, MIT), Llama-2-7B's linear operators on an
A100; its other profiles (other GPUs and models, tensor parallelism of 2 to 8) are held out: scripts.validate_simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

# Tensor cores: share of the datasheet's rate that cuBLAS holds in a wave full of large tiles (V).
MATMUL_SHARE: float = 0.78
# HBM: share of the datasheet's bandwidth at which weights and KV stream through a kernel (V). A pure read gets 0.88 to 0.9.
BANDWIDTH_SHARE: float = 0.78
# The same for the small operators of a layer (V): their kernels read and write little at a time.
NORM_SHARE, ROPE_SHARE, ACTIVATION_SHARE, ADD_SHARE = 0.32, 0.44, 0.5, 0.9
# Attention over a prompt: FlashAttention-2 reaches 50 to 73% of an A100's peak (Dao, 2023, abstract), FlashAttention-3 up to 75% of
# an H100's (Shah et al., 2024, abstract); the middle of the former.
ATTENTION_SHARE = 0.6
# Seconds from one kernel's start to the next one's in a CUDA graph, beyond its work: ramp up and down, what an almost empty kernel
# lasts (2 us, V), and the gap between two nodes (0.5 us: "Getting Started with CUDA Graphs", NVIDIA, 2019: 3.4 us for 2.9).
KERNEL_SECONDS = 2.5e-6
# What a launch costs the device beyond a node of a graph: kernels launched one by one are 0.9 us apart there, 0.5 us in a graph.
LAUNCH_SECONDS: float = 0.4e-6
# What a launch costs the host, a graph's or a kernel's. Of a graph: 2.5 us and 1 ns a node ("Constant Time Launch for
# Straight-Line CUDA Graphs", NVIDIA, 2024). Of a kernel or a collective the same is an assumption.
HOST_LAUNCH_SECONDS: float = 2.5e-6


@dataclass(frozen=True)
class Link:
    """What joins GPUs. bandwidth: bytes/s, one direction, as the datasheet has it. share: of it that NCCL counts on. hop_seconds:
    of one step of a ring, by NCCL protocol (LL, Simple)."""

    name: str
    bandwidth: float
    share: float
    hop_seconds: tuple[float, float]

    @property
    def rate(self) -> float:
        """Bytes/s that messages get."""
        return self.bandwidth * self.share


# All of NCCL's numbers are version 2.20.5's (February 2024), in whose time the systems that are simulated were measured: its model
# of a ring, by which NCCL itself chooses a protocol (src/graph/tuning.cc), and the rates of links (topo.h, topo.cc). Pairs are of
# its protocols LL and Simple; LL128, between the two, is left out: its bandwidth depends on the number of channels.
_NVLINK_HOPS, _PCIE_HOPS, _NETWORK_HOPS = (0.6e-6, 3.4e-6), (1.0e-6, 5.7e-6), (2.7e-6, 14.0e-6)  # hwLat of a ring
NVLINK3: Link = Link("NVLink 3", 300e9, 20.0 / 25, _NVLINK_HOPS)  # GB/s of one of 12 links: SM80_NVLINK_BW
NVLINK4: Link = Link("NVLink 4", 450e9, 20.6 / 25, _NVLINK_HOPS)  # of one of 18: SM90_NVLINK_BW
NVLINK_BRIDGE: Link = Link("NVLink bridge", 56.25e9, 12.0 / 14.0625, _NVLINK_HOPS)  # of one of 4: SM86_NVLINK_BW
PCIE4: Link = Link("PCIe 4.0 x16", 31.5e9, 24 / 31.5, _PCIE_HOPS)  # 16 lanes of 16 GT/s, 128b/130b; width x speed / 80 there
PCIE5: Link = Link("PCIe 5.0 x16", 63.0e9, 48 / 63.0, _PCIE_HOPS)
ETHERNET_100G: Link = Link("100 Gb/s Ethernet", 12.5e9, 12.0 / 12.5, _NETWORK_HOPS)  # NET_BW
NCCL_BASE_SECONDS: tuple[float, float] = (6.6e-6, 8.4e-6)  # baseLat of a ring
# A hop inside a node lasts at least so long where the ring leaves it: getNetOverhead of hosts with AMD's CPUs (1 us with others),
# three times for Simple.
NCCL_NETWORK_OVERHEAD: tuple[float, float] = (2.0e-6, 6.0e-6)
NCCL_PLATEAU = 1.4  # latency of an all-reduce between nodes by Simple, over the sum of its steps ("Plateau effect of ring")
# LL's bandwidth: half of what it sends is flags (4 bytes with each 4 of data), and of the rest the table counts on half again in an
# all-reduce, for which it gives no reason; llMaxBws at most (bytes/s, Ampere and Hopper in one node).
NCCL_LL_SHARE, NCCL_LL_RATE = 0.25, 87.7e9


@dataclass(frozen=True)
class GPU:
    """One device. flops: dense bf16 tensor-core rate, 1/s. bandwidth: HBM or GDDR, bytes/s. memory: bytes. nvlink joins groups of
    nvlink_group devices, pcie all of a node."""

    name: str
    flops: float
    bandwidth: float
    memory: int
    num_sms: int
    nvlink: Link
    nvlink_group: int
    pcie: Link = PCIE4


# NVIDIA's datasheets: A100 80GB SXM (2021), A40 (2020, "112.5 GB/s bidirectional" for pairs), H100 SXM5 (2023; 132 SMs: its
# architecture whitepaper), H200 SXM (2023). Links are given there both ways, here one. Memory: what CUDA reports is about 1% more
# than the A40's 48e9 bytes and 6% more than the 80e9 of others, which is left to the context.
GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-80gb", 312e12, 2.039e12, 80 * 10**9, 108, NVLINK3, 8),
        GPU("a40", 149.7e12, 0.696e12, 48 * 10**9, 84, NVLINK_BRIDGE, 2),
        GPU("h100", 989.4e12, 3.35e12, 80 * 10**9, 132, NVLINK4, 8, PCIE5),
        GPU("h200", 989.4e12, 4.8e12, 141 * 10**9, 132, NVLINK4, 8, PCIE5),
    )
}
