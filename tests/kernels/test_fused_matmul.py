"""fused_matmul: every backend against float64, bits that depend on nothing but the row, the choice of tiles, and its errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import gpu
from kernels.backends import FUSED_MATMUL
from kernels.cpu import library
from kernels.fused_matmul import cases, fused_matmul, mosaic_sm90, resolve_backend
from kernels.fused_matmul.cases import CASES, EPS, Batch, Case, build, faults
from kernels.fused_matmul.tiles import ROWS, Tiles, choose_tiles
from tests.kernels.cpu_levels import AUTO, at_level, needs_library
from tests.selection import slow_unless

OPTIMISED = True
NAMED = {case.name: case for case in CASES}
KERNEL_CASES = [case for case in CASES if case.dtype == "bfloat16"]
QUICK = {"one_row", "qkv_bias", "gate_up_bias", "o_bias", "deep"}
ODD_CASES = (
    Case("odd", 7, 37, 33, norm=True, bias=True, residual=True),
    Case("odd_gate", 13, 100, 70, norm=True, bias=True, gated=True),
    Case("tiny", 1, 3, 2),
)
HOPPER = gpu.Device(132, "NVIDIA H100 80GB HBM3", (9, 0))


def run(
    case: Case,
    batch: Batch,
    backend: str,
    *,
    transposed: bool = False,
    dtype: str | None = None,
    num_rows: int | None = None,
) -> np.ndarray:
    layout = {"transposed": transposed, "dtype": dtype}
    product = jax.jit(functools.partial(fused_matmul, eps=EPS, gated=case.gated, backend=backend, **layout))
    w = jnp.asarray(batch.w.T if transposed else batch.w)
    counted = {} if num_rows is None else {"num_rows": jnp.int32(num_rows)}
    return np.asarray(product(jnp.asarray(batch.x), w, **jax.tree.map(jnp.asarray, batch.options), **counted))


def in_tiles(case: Case, batch: Batch, tiles: Tiles) -> np.ndarray:
    options = {"eps": EPS, "gated": case.gated, "tiles": tiles}
    given = [None if y is None else jnp.asarray(y) for y in (batch.x, batch.w, batch.scale, batch.bias, batch.residual)]
    with gpu.interpreted():
        return np.asarray(jax.jit(lambda *given: mosaic_sm90.matmul(*given, **options))(*given))


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_computes_what_the_reference_does(case, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    batch = build(case)
    assert not faults(case, batch, run(case, batch, "xla"))


@needs_library
@pytest.mark.parametrize("level", slow_unless(lambda level: level == library.level(), library.LEVELS[1:]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("transposed", slow_unless(bool, [False, True]), ids=["in_out", "out_in"])
def test_cpu_computes_what_the_reference_does(level, dtype, transposed):
    """Every case, on each instruction set that this CPU has; and those whose sizes are no multiple of anything."""
    with at_level(level):
        for case in (*CASES, *ODD_CASES):
            case = dataclasses.replace(case, dtype=dtype)
            batch = build(case)
            assert not faults(case, batch, run(case, batch, "cpu", transposed=transposed)), case.name


@needs_library
@pytest.mark.parametrize("level", slow_unless(lambda level: level == library.level(), library.LEVELS[1:]))
@pytest.mark.parametrize("name", ["qkv_bias", "prefill_gate_up", "prefill_down", "float32"])
def test_cpu_gives_a_row_equal_bits_in_every_batch(name, level):
    """Alone and among others, by one thread and by several, from a matrix that lies either way."""
    case = NAMED[name]
    batch = build(case)
    with at_level(level):
        whole = run(case, batch, "cpu", transposed=True)
        np.testing.assert_array_equal(bits(run(case, batch, "cpu")), bits(whole))
        for some in ([case.T - 1, 3, 1], [0], list(range(case.T))[::-1]):
            residual = None if batch.residual is None else batch.residual[some]
            few = dataclasses.replace(batch, x=batch.x[some], residual=residual)
            np.testing.assert_array_equal(bits(run(case, few, "cpu", transposed=True)), bits(whole[some]))


@needs_library
@pytest.mark.parametrize("level", slow_unless(lambda level: level == library.level(), library.LEVELS[1:]))
@pytest.mark.parametrize("name", ["qkv_bias", "prefill_gate_up", "prefill_down", "float32"])
def test_cpu_leaves_out_padding(name, level):
    """Padding is NaN here, in what it is made of too: the rows before have their bits, and it is zeros."""
    case = NAMED[name]
    batch = build(case)
    with at_level(level):
        whole = run(case, batch, "cpu", transposed=True)
        for n in sorted({0, 1, case.T // 2, case.T - 1, case.T}):
            x, residual = batch.x.copy(), None if batch.residual is None else batch.residual.copy()
            for padded in (x, residual):
                if padded is not None:
                    padded[n:] = np.nan
            found = run(case, dataclasses.replace(batch, x=x, residual=residual), "cpu", transposed=True, num_rows=n)
            np.testing.assert_array_equal(bits(found[:n]), bits(whole[:n]))
            assert not bits(found[n:]).any()


def test_xla_computes_padding_too():
    case = NAMED["qkv"]
    batch = build(case)
    np.testing.assert_array_equal(bits(run(case, batch, "xla", num_rows=1)), bits(run(case, batch, "xla")))


@needs_library
@pytest.mark.parametrize("backend", ["xla", "cpu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_sums_of_bfloat16_stay_float32(backend, transposed):
    case = NAMED["qkv"]
    batch = build(case)
    out = run(case, batch, backend, transposed=transposed, dtype="float32")
    assert out.dtype == np.float32 and not faults(case, batch, out)
    assert (bits(out) & 0xFFFF).any(), "no sum has more digits than a bfloat16"


@pytest.mark.parametrize("case", slow_unless(lambda case: case.name in QUICK, KERNEL_CASES), ids=lambda case: case.name)
def test_the_kernel_interpreted_computes_what_the_reference_does(case):
    batch = build(case)
    with gpu.interpreted(detect_races=True):
        assert not faults(case, batch, run(case, batch, "mosaic_sm90"))
        assert not gpu.races_found()


@pytest.mark.parametrize(
    "name", slow_unless(lambda name: name == "prefill_qkv", ["prefill_qkv", "prefill_gate_up", "prefill_down"])
)
def test_a_row_has_equal_bits_in_every_batch_and_tile(name):
    """The PTX is held to the same (scripts.ptx_check); this is the interpreted kernel."""
    case = NAMED[name]
    batch = build(case)
    some = [case.T - 1, 3, 64]
    few_batch = dataclasses.replace(batch, x=batch.x[some], residual=None if batch.residual is None else batch.residual[some])
    whole = in_tiles(case, batch, Tiles(2, 64, 2, 2, case.gated))
    assert not faults(case, batch, whole)
    for tiles in (Tiles(1, 64, 2, 3, case.gated), Tiles(1, 32, 2 if case.gated else 1, 2, case.gated)):
        few = in_tiles(dataclasses.replace(case, T=len(some)), few_batch, tiles)
        np.testing.assert_array_equal(bits(few), bits(whole[some]))


@pytest.mark.parametrize("fault", ["scale", "bias", "residual", "gate", "sum"])
def test_the_cases_see_a_fault(fault):
    """A step that is left out, and a sum that ends early."""
    case = {"scale": "qkv", "bias": "qkv_bias", "residual": "down", "gate": "gate_up", "sum": "deep"}[fault]
    case = NAMED[case]
    batch = build(case)
    if fault == "gate":
        broken = run(dataclasses.replace(case, gated=False), batch, "xla")[:, : case.F // 2]
    elif fault == "sum":
        w = batch.w.copy()
        w[-64:] = 0
        broken = run(case, dataclasses.replace(batch, w=w), "xla")
    else:
        broken = run(case, dataclasses.replace(batch, **{fault: None}), "xla")
    assert faults(case, batch, broken)


SIZES = ((1024, 4096, False), (1024, 6144, True), (3072, 1024, False), (4096, 24576, True), (576, 960, False))  # D, F, gated


@pytest.mark.parametrize(("D", "F", "gated"), SIZES)
def test_tiles_divide_the_matrix_and_fit(D, F, gated):
    for T in (8, 64, 72, 128, 2048):
        tiles = choose_tiles(T, D, F, gated=gated, num_sms=132)
        assert F % (tiles.blocks * tiles.columns) == 0 and tiles.smem_bytes <= gpu.MAX_SMEM_BYTES
        assert tiles.gated == gated and (tiles.consumers == 1 or T > ROWS)


@pytest.mark.parametrize(
    ("weight", "tiles"),
    [
        ((1024, 4096, False), {8: (1, 32, 1, 128), 256: (2, 32, 2, 128), 2048: (2, 128, 2, 256)}),
        ((1024, 6144, True), {8: (1, 32, 2, 96), 256: (2, 64, 2, 96), 2048: (2, 128, 2, 384)}),
        ((4096, 24576, True), {8: (1, 32, 2, 384), 256: (2, 128, 2, 192), 2048: (2, 128, 2, 1536)}),
    ],
)
def test_few_rows_keep_many_sms_at_work_and_many_rows_take_large_tiles(weight, tiles):
    """The table in docs/kernels.md: consumers, columns, blocks, and how many tiles that makes on 132 SMs."""
    D, F, gated = weight
    for T, (consumers, columns, blocks, count) in tiles.items():
        found = choose_tiles(T, D, F, gated=gated, num_sms=132)
        assert (found.consumers, found.columns, found.blocks, found.num_tiles(T, F)) == (consumers, columns, blocks, count)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((3, 64, 1, 4), "consumers=3 must be one of 1, 2"),
        ((1, 48, 1, 4), "columns=48 must be one of 32, 64, 128"),
        ((1, 64, 3, 4), "blocks=3 must be one of 1, 2"),
        ((1, 64, 1, 4, True), "blocks=1 must be 2 where gated"),
        ((1, 64, 1, 1), "stages=1 must be at least 2"),
        ((2, 128, 2, 5), "bytes of shared memory, a CTA may have 232448"),
    ],
)
def test_tiles_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        Tiles(*fields)


def test_tiles_that_do_not_divide_the_matrix():
    case = NAMED["prefill_qkv"]
    with pytest.raises(ValueError, match="tiles of 256 columns do not divide 384"):
        in_tiles(case, build(case), Tiles(2, 128, 2, 2))
    with pytest.raises(ValueError, match="gated=False, and the product's True"):
        in_tiles(NAMED["gate_up"], build(NAMED["gate_up"]), Tiles(1, 32, 2, 2))


def test_auto_is_xla_without_a_hopper_gpu_and_where_the_kernel_is_left_out():
    weights = [(1024, 4096, False), (1024, 6144, True)]
    assert resolve_backend("auto", weights, "bfloat16") == AUTO
    assert resolve_backend("auto", weights, "bfloat16", left_out=["cpu"]) == "xla"
    with gpu.assume(HOPPER):
        assert resolve_backend("auto", weights, "bfloat16") == "mosaic_sm90"
        assert resolve_backend("auto", weights, "bfloat16", left_out=["mosaic_sm90"]) == "xla"
        assert resolve_backend("auto", weights, "float16") == "xla"
        assert resolve_backend("auto", [*weights, (1000, 64, False)], "bfloat16") == "xla"
    with gpu.assume(gpu.Device(108, "NVIDIA A100", (8, 0))):
        assert resolve_backend("auto", weights, "bfloat16") == "xla"


@pytest.mark.parametrize(
    ("device", "weight", "dtype", "message"),
    [
        (None, (64, 64, False), "bfloat16", "mosaic_sm90 can't do a device: it needs a GPU of compute capability 9.0, found cpu"),
        (HOPPER, (64, 64, False), "float32", "mosaic_sm90 can't do float32: it has bfloat16; use backend='xla'"),
        (HOPPER, (96, 64, False), "bfloat16", r"can't do weights \[96, 64\]: it has multiples of 64 and 32"),
        (HOPPER, (64, 96, True), "bfloat16", r"can't do weights \[64, 96\]: it has multiples of 64 and 64"),
    ],
)
def test_what_the_kernel_lacks(device, weight, dtype, message):
    with gpu.assume(device) if device else pytest.MonkeyPatch.context(), pytest.raises(NotImplementedError, match=message):
        resolve_backend("mosaic_sm90", [weight], dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.zeros((8, 1, 128))}, r"x is float32\(8, 1, 128\); must be \[T, D\]"),
        ({"w": jnp.zeros((64, 128))}, r"w is .*must be .*\[D, F\] with D=128"),
        ({"w": jnp.zeros((128, 64), "bfloat16")}, "w is bfloat16"),
        ({"scale": jnp.zeros(64)}, r"scale is float32\(64,\); must be float32\[D\] with D=128"),
        ({"bias": jnp.zeros(32)}, r"bias is float32\(32,\); must be float32\[F\] with F=64"),
        ({"residual": jnp.zeros((7, 64))}, r"residual is .*must be float32\[T, F\] with T=8 and F=64"),
        ({"w": jnp.zeros((128, 63)), "gated": True}, "has 63 columns; must be gates and as many that they gate"),
        ({"residual": jnp.zeros((8, 64)), "gated": True}, "residual must be None where gated"),
        ({"x": jnp.zeros((8, 128), jnp.int32), "w": jnp.zeros((128, 64), jnp.int32)}, "must be one of bfloat16, float16, float32"),
        ({"backend": "cuda"}, "backend='cuda' must be one of auto, xla, cpu, mosaic_sm90"),
        ({"w": jnp.zeros((64, 64)), "transposed": True}, r"w is .*must be float32\[F, D\] with D=128"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16 must be float32, as x is, or float32"),
    ],
)
def test_callers_mistakes_are_value_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        fused_matmul(**{"x": jnp.zeros((8, 128)), "w": jnp.zeros((128, 64)), **changes})


def test_float32_sums_are_of_plain_products():
    with pytest.raises(ValueError, match="dtype=float32 is of plain and normed products"):
        fused_matmul(jnp.zeros((8, 64), "bfloat16"), jnp.zeros((64, 32), "bfloat16"), gated=True, dtype="float32")
    with gpu.assume(HOPPER), pytest.raises(NotImplementedError, match=r"mosaic_sm90 can't do weights \[F, D\]"):
        fused_matmul(jnp.zeros((8, 64), "bfloat16"), jnp.zeros((64, 64), "bfloat16"), transposed=True, backend="mosaic_sm90")


def test_cpu_says_what_it_lacks(monkeypatch):
    if library.load() is not None:
        with pytest.raises(NotImplementedError, match="cpu can't do float16: it has bfloat16 and float32; use backend='xla'"):
            resolve_backend("cpu", [(64, 64, False)], "float16")
    with gpu.assume(HOPPER), pytest.raises(NotImplementedError, match="cpu can't do a device: it needs a CPU, found gpu"):
        resolve_backend("cpu", [(64, 64, False)], "bfloat16")
    monkeypatch.setattr(library, "load", lambda: None)
    with pytest.raises(NotImplementedError, match="it needs the library that kernels/cpu/build.py makes"):
        resolve_backend("cpu", [(64, 64, False)], "bfloat16")
    assert resolve_backend("auto", [(64, 64, False)], "bfloat16") == "xla"


def test_every_backend_and_every_step_is_tried_by_the_cases():
    assert set(FUSED_MATMUL.rows) == {"xla", "cpu", "mosaic_sm90"}
    for step in ("norm", "bias", "residual", "gated"):
        assert any(getattr(case, step) for case in CASES) and not all(getattr(case, step) for case in CASES)
    assert max(case.D for case in CASES if case.T <= 16) // 64 > 2 * 8  # a ring of eight stages is filled twice
    assert cases.TOLERANCE.keys() == {"bfloat16", "float16", "float32"}
