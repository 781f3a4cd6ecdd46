"""What the portable attention can do and where, its sizes, and that it traces: its PTX is run in tests/scripts/ptx.

No interpreter of Pallas has mma.sync.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import gpu, gpu_threads
from kernels.ragged_paged_attention import api, host_planner, ragged_paged_attention, resolve_backend
from kernels.ragged_paged_attention.cases import INTERPRETED, build
from kernels.ragged_paged_attention.mosaic_portable.attend import HEAD_DIMS
from kernels.ragged_paged_attention.mosaic_portable.tiles import PortablePlanner, Tiles
from kernels.ragged_paged_attention.mosaic_sm90.tiles import Tiles as HopperTiles

A100 = gpu.Device(108, "NVIDIA A100-SXM4-80GB", (8, 0))
L40S = gpu.Device(142, "NVIDIA L40S", (8, 9))
H100 = gpu.Device(132, "NVIDIA H100 80GB HBM3", (9, 0))
V100 = gpu.Device(80, "Tesla V100-SXM2-32GB", (7, 0))
CAN = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": jnp.bfloat16}
CANNOT = (  # what of CAN is changed; the message
    ({"dtype": jnp.float32}, "float32: it has bfloat16 and float16"),
    ({"head_dim": 80}, "head_dim=80: it has 64, 96, 128, 256"),
    ({"page_size": 8}, "page_size=8: it has 16, 32 and multiples of 64"),
    ({"num_query_heads": 256}, "128 query heads a KV head: it has up to 64"),
)


def test_what_it_cannot_do_is_said():
    with gpu.assume(A100):
        for head_dim in HEAD_DIMS:
            assert resolve_backend("mosaic_portable", **{**CAN, "head_dim": head_dim}) == "mosaic_portable"
        for change, message in CANNOT:
            with pytest.raises(NotImplementedError, match=f"mosaic_portable can't do {message}"):
                resolve_backend("mosaic_portable", **{**CAN, **change})
    with pytest.raises(NotImplementedError, match="it needs a GPU of compute capability 8.0 or more, found cpu"):
        resolve_backend("mosaic_portable", **CAN)
    with gpu.interpreted(), pytest.raises(NotImplementedError, match="no mma.sync"):
        resolve_backend("mosaic_portable", **CAN)


@pytest.mark.parametrize(
    ("device", "head_dim", "backend"),
    [
        (H100, 128, "mosaic_sm90"),
        (H100, 96, "mosaic_portable"),
        (A100, 128, "mosaic_portable"),
        (L40S, 256, "mosaic_portable"),
        (gpu.Device(170, "NVIDIA GeForce RTX 5090", (12, 0)), 64, "mosaic_portable"),
        (V100, 128, "xla"),
        (A100, 80, "xla"),
    ],
)
def test_auto_is_the_fastest_that_the_device_has(monkeypatch, caplog, device, head_dim, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    api._say_fallback.cache_clear()
    with gpu.assume(device), caplog.at_level(logging.WARNING, logger="jaxserve"):
        assert resolve_backend("auto", **{**CAN, "head_dim": head_dim}) == backend
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (2 if backend == "xla" else 0), "one kernel in place of another is nothing to warn of"
    assert all(line.startswith("attention runs on xla: mosaic_") for line in said)


def test_shared_memory_is_that_of_the_device():
    for device, kib in ((A100, 163), (L40S, 99), (H100, 227), (gpu.Device(1, "later", (13, 0)), 99)):
        with gpu.assume(device):
            assert gpu.max_smem_bytes() == kib * 1024
            assert all(Tiles().smem_bytes(head_dim) <= gpu.max_smem_bytes() for head_dim in HEAD_DIMS)
    with gpu.assume(L40S), pytest.raises(ValueError, match="131072 bytes of shared memory for head_dim=256, there are 101376"):
        Tiles(stages=3).check_smem(256)
    with gpu.assume(A100):
        assert Tiles().blocks_per_sm(128) == 2 and Tiles().blocks_per_sm(256) == 1


def test_tiles_check_themselves():
    for wrong in ({"stages": 1}, {"chunk": 100}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Tiles(**wrong)


def planner_of(batch, case, **more):
    T, N, H = batch.q.shape
    S, P = batch.page_table.shape
    sizes = {"num_tokens": T, "num_seqs": S, "max_q_len": min(case.max_q_len or T, T), "max_kv_len": P * case.page_size}
    make = host_planner("mosaic_portable")
    assert make is not None
    return make(num_query_heads=N, num_kv_heads=case.heads.K, head_dim=H, sliding_window=case.sliding_window, **sizes, **more)


def test_a_planner_fills_the_device_and_large_heads_are_not_split():
    case = INTERPRETED[0]
    batch = build(case)
    with gpu.assume(A100):
        planner = planner_of(batch, case)
        assert isinstance(planner, PortablePlanner) and planner.shape.num_ctas == 2 * A100.num_sms
        sizes = {"num_tokens": 8, "num_seqs": 8, "max_q_len": 1, "num_query_heads": 4, "num_kv_heads": 2, "max_kv_len": 32768}
        assert (
            PortablePlanner.make(head_dim=256, **sizes).shape.num_slots
            == 0
            < PortablePlanner.make(head_dim=128, **sizes).shape.num_slots
        )
        with pytest.raises(ValueError, match=r"tiles=Tiles\(consumers=1, stages=4, chunk=512\) must be a Tiles of mosaic_portable"):
            PortablePlanner.make(head_dim=128, tiles=HopperTiles(1, 4), **sizes)
        with pytest.raises(ValueError, match="245760 bytes of shared memory for head_dim=128, there are 166912"):
            PortablePlanner.make(head_dim=128, tiles=Tiles(stages=14), **sizes)


def test_it_traces_and_refuses_work_of_other_shapes():
    case = INTERPRETED[0]
    batch = build(case)
    with gpu.assume(A100):
        planner = planner_of(batch, case)
        packed = jnp.asarray(planner.plan(np.diff(batch.cu_q_lens), batch.kv_lens))
        call = functools.partial(ragged_paged_attention, *batch.arrays, backend="mosaic_portable")
        out = jax.eval_shape(functools.partial(call, max_q_len=1), work=planner.work(packed))
        assert (out.shape, out.dtype) == (batch.q.shape, batch.q.dtype)
        with pytest.raises(ValueError, match="work was planned for"):
            call(max_q_len=1, sliding_window=4, work=planner.work(packed))
        with pytest.raises(ValueError, match="was not planned for mosaic_portable"):
            call(max_q_len=1, work=object())
        with pytest.raises(ValueError, match="inside jit, pass work="):
            jax.jit(lambda *arrays: ragged_paged_attention(*arrays, backend="mosaic_portable"))(*batch.arrays)


def test_shared_memory_of_rows_is_tiled_by_their_width():
    assert [gpu_threads.tile_columns(columns) for columns in (64, 96, 128, 256)] == [64, 32, 64, 64]
