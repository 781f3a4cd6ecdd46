"""rotary_write: every backend against float64, equal bits of both, rows that depend on nothing else, no copy, and its errors."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import gpu
from kernels.backends import ROTARY_WRITE
from kernels.cpu import library
from kernels.rotary_write import cases, resolve_backend, rotary_write
from kernels.rotary_write.cases import CASES, EPS, Batch, Case, build, faults
from tests.kernels.cpu_levels import AUTO, at_level, needs_library
from tests.selection import slow_unless

OPTIMISED = True
NAMED = {case.name: case for case in CASES}


def run(batch: Batch, backend: str) -> tuple[np.ndarray, np.ndarray]:
    scales = {} if batch.q_scale is None else {"q_scale": batch.q_scale, "k_scale": batch.k_scale}
    write = jax.jit(functools.partial(rotary_write, eps=EPS, backend=backend))
    queries, pages = write(*map(jnp.asarray, batch.arrays), **jax.tree.map(jnp.asarray, scales))
    return np.asarray(queries), np.asarray(pages)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_computes_what_the_reference_does(case, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    batch = build(case)
    assert not faults(batch, *run(batch, "xla"), dtype)


@needs_library
@pytest.mark.parametrize("level", slow_unless(lambda level: level == library.level(), library.LEVELS[1:]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cpu_computes_what_the_reference_does(level, dtype):
    with at_level(level):
        for case in (*CASES, Case("tiny", 5, 4, 2, 8, 4, norm=True), Case("odd", 3, 2, 1, 34, 16)):
            batch = build(dataclasses.replace(case, dtype=dtype))
            assert not faults(batch, *run(batch, "cpu"), dtype), case.name


@pytest.mark.parametrize(
    "case",
    slow_unless(lambda case: case.dtype == "bfloat16" and not case.name.startswith("head_96"), CASES),
    ids=lambda case: case.name,
)
def test_the_kernel_interpreted_has_the_bits_of_xla(case):
    """Queries of padding tokens too, but for what a NaN looks like. (Not optimised, XLA:CPU rounds a float16 elsewhere.)"""
    batch = build(case)
    with gpu.interpreted():
        queries, pages = run(batch, "mosaic")
    assert not faults(batch, queries, pages, case.dtype)
    want_queries, want_pages = run(batch, "xla")
    np.testing.assert_array_equal(np.isnan(queries), np.isnan(want_queries))
    np.testing.assert_array_equal(bits(np.nan_to_num(queries)), bits(np.nan_to_num(want_queries)))
    np.testing.assert_array_equal(bits(pages), bits(want_pages))


@pytest.mark.parametrize("backend", [pytest.param("mosaic", marks=pytest.mark.slow), pytest.param("cpu", marks=needs_library)])
def test_a_row_has_equal_bits_in_every_batch(backend):
    """Token 0 alone, in another place, and among others: tiles begin elsewhere."""
    batch = build(dataclasses.replace(NAMED["odd_heads"], norm=True, padding=0))
    order = np.array([3, 1, 0, 2])
    others = {name: getattr(batch, name)[order] for name in ("qkv", "cos", "sin", "slot_mapping")}
    with gpu.interpreted() if backend == "mosaic" else contextlib.nullcontext():
        queries, pages = run(batch, backend)
        moved_queries, moved_pages = run(dataclasses.replace(batch, **others), backend)
    np.testing.assert_array_equal(bits(queries[order]), bits(moved_queries))
    for slot in batch.slot_mapping[order]:
        at = slot // batch.kv_pages.shape[3], slice(None), slice(None), slot % batch.kv_pages.shape[3]
        np.testing.assert_array_equal(bits(pages[at]), bits(moved_pages[at]))


@pytest.mark.parametrize("fault", ["value", "slot", "query"])
def test_the_cases_see_a_fault(fault):
    batch = build(NAMED["qwen3"])
    queries, pages = (x.copy() for x in run(batch, "xla"))
    page_size = batch.kv_pages.shape[3]
    page, offset = divmod(int(batch.slot_mapping[0]), page_size)
    if fault == "value":
        pages[page, 1, 0, offset, 3] *= 1.01
    elif fault == "slot":
        free = next(slot for slot in range(page_size, batch.num_slots) if slot not in batch.slot_mapping)
        pages[free // page_size, 0, 0, free % page_size, 0] += 1
    else:
        queries[0, 1, 5] += 0.5
    assert faults(batch, queries, pages, "bfloat16")


@pytest.mark.parametrize("backend", ["xla", pytest.param("cpu", marks=needs_library)])
def test_donated_pages_are_not_copied(backend):
    batch = build(Case("large", 4, 2, 1, 64, 16, num_pages=500))
    compiled = (
        jax.jit(functools.partial(rotary_write, backend=backend), donate_argnums=1).lower(*map(jnp.asarray, batch.arrays)).compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == batch.kv_pages.nbytes
    assert memory.temp_size_in_bytes < batch.kv_pages.nbytes / 4


def test_auto_is_xla_without_a_gpu_and_where_the_kernel_is_left_out(monkeypatch):
    assert resolve_backend("auto", head_dim=128, dtype="bfloat16", left_out=["cpu"]) == "xla"
    assert resolve_backend("auto", head_dim=128, dtype="bfloat16") == AUTO
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with gpu.assume(gpu.Device(108, "NVIDIA A100", (8, 0))):
        assert resolve_backend("auto", head_dim=128, dtype="bfloat16") == "mosaic"
        assert resolve_backend("auto", head_dim=128, dtype="bfloat16", left_out=["mosaic"]) == "xla"
        assert resolve_backend("auto", head_dim=80, dtype="bfloat16") == "xla"
        assert resolve_backend("auto", head_dim=128, dtype="float32") == "xla"


@pytest.mark.parametrize(
    ("device", "shape", "message"),
    [
        (None, (128, "bfloat16"), "mosaic can't do a device: it needs a GPU of compute capability 8.0 or more, found cpu"),
        ((7, 5), (128, "bfloat16"), r"needs compute capability 8.0 or more, found 7.5"),
        ((8, 0), (80, "bfloat16"), "mosaic can't do head_dim=80: it has 64, 96, 128, 256; use backend='xla'"),
        ((8, 0), (128, "float32"), "mosaic can't do float32: it has bfloat16 and float16"),
    ],
)
def test_what_the_kernel_lacks(device, shape, message):
    head_dim, dtype = shape
    assumed = gpu.assume(gpu.Device(1, "a GPU", device)) if device else pytest.MonkeyPatch.context()
    with assumed, pytest.raises(NotImplementedError, match=message):
        resolve_backend("mosaic", head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_pages": jnp.zeros((5, 1, 2, 64, 128))}, r"kv_pages is .*; must be \[num_pages, 2, K, page_size, H\]"),
        ({"qkv": jnp.zeros((8, 8 * 128))}, r"qkv is float32\(8, 1024\); must be \[T, heads, H\]"),
        ({"qkv": jnp.zeros((8, 8, 64), "bfloat16")}, r"qkv is .*must be \[T, heads, H\] with H=128"),
        ({"qkv": jnp.zeros((8, 4, 128), "bfloat16")}, "has 4 heads; must be 2 for keys, 2 for values and a multiple of 2"),
        ({"qkv": jnp.zeros((8, 7, 128), "bfloat16")}, "has 7 heads; must be 2 for keys, 2 for values and a multiple of 2"),
        ({"qkv": jnp.zeros((8, 8, 128))}, "must be the same, one of bfloat16, float16, float32"),
        ({"cos": jnp.zeros((8, 128))}, r"cos is float32\(8, 128\); must be .*\[T, half_H\] with T=8 and half_H=64"),
        ({"sin": jnp.zeros((8, 64), "bfloat16")}, "sin is bfloat16.*; must be float32"),
        ({"slot_mapping": jnp.zeros(9, jnp.int32)}, "slot_mapping is int32"),
        ({"slot_mapping": jnp.zeros(8)}, "slot_mapping is float32"),
        ({"q_scale": None}, "q_scale is None and the other one is not: give both or neither"),
        ({"k_scale": jnp.zeros(64, "bfloat16")}, r"k_scale is bfloat16\(64,\); must be bfloat16\[H\] with H=128"),
        ({"backend": "cuda"}, "backend='cuda' must be one of auto, xla, cpu, mosaic"),
    ],
)
def test_callers_mistakes_are_value_errors(changes, message):
    batch = build(NAMED["qwen3"])
    given = {field.name: jnp.asarray(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    with pytest.raises(ValueError, match=message):
        rotary_write(**{**given, **changes})


def test_every_automatic_backend_is_tried_by_the_cases():
    assert set(ROTARY_WRITE.rows) == {"xla", "cpu", "mosaic"}
    assert {case.H for case in CASES} == {64, 96, 128, 256}
    assert {case.page_size for case in CASES} >= {16, 32, 64, 128}
    assert cases.TOLERANCE.keys() == {"bfloat16", "float16", "float32"}
