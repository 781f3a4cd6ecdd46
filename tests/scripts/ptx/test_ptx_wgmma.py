"""wgmma in the interpreter: its products against numpy, and the rules of its registers and its operands."""

import ml_dtypes
import numpy as np
import pytest

from scripts.ptx.launch import Tensor
from scripts.ptx.program import PtxError
from scripts.ptx.wgmma import operand_places
from tests.scripts.ptx.snippets import SEEDS, go

N = 64
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
# The first matrix, 64 rows of 64 halves, lies at 0 and the second at 8192; both swizzled in rows of 128 bytes. Barrier: at 16384.
TENSORS = [Tensor(128 * n, n, (64, 64), (64, 1), (64, 64), 128) for n in range(2)]
LOADS = """
setp.eq.b32 %p8, %r1, 0; and.pred %p1, %p0, %p8;
@%p1 mbarrier.init.shared.b64 [%rd1+16384], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%rd1+16384], 16384;
add.s64 %rd10, %desc, 128; add.s64 %rd11, %rd1, 8192;
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%rd1], [%desc, {0, 0}], [%rd1+16384];
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%rd11], [%rd10, {0, 0}], [%rd1+16384];
$WAIT: mbarrier.try_wait.parity.shared.b64 %p20, [%rd1+16384], 0, 1000; @!%p20 bra $WAIT;
"""
ACCUMULATOR = "{" + ",".join(f"%r{100 + n}" for n in range(N // 2)) + "}"
ZERO = "".join(f"mov.b32 %r{100 + n}, 0;" for n in range(N // 2))
FENCE, COMMIT = "wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned {};\n"


def descriptor(start: int, *, leading: int = 16, stride: int = 1024) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 62


def product(kind: str, k: int, *, left: str | None = None, left_transposed=False, right_transposed=False, keep=1) -> str:
    """Of 16 columns from 16 * k on. The contiguous dimension is K, or, transposed, M and N."""
    a = left or descriptor(1024 + (2048 if left_transposed else 32) * k)
    b = descriptor(1024 + 8192 + (2048 if right_transposed else 32) * k)
    transposed = f"{int(right_transposed)}" if left else f"{int(left_transposed)}, {int(right_transposed)}"
    set_b = f"mov.b64 %rd20, {b};" if left else f"mov.b64 %rd19, {a}; mov.b64 %rd20, {b};"
    name = f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{kind}.{kind}"
    return set_b + f"setp.ne.b32 %p3, {keep}, 0; {name} {ACCUMULATOR}, {left or '%rd19'}, %rd20, %p3, 1, 1, {transposed};\n"


def store() -> str:
    """Every lane's registers, one after the other."""
    lines = ["mul.wide.u32 %rd12, %r0, 128; add.s64 %rd12, %a2, %rd12;"]
    return "\n".join(lines + [f"st.global.b32 [%rd12+{4 * n}], %r{100 + n};" for n in range(N // 2)])


def matrices(kind: str):
    return np.random.default_rng(0).standard_normal((2, 64, 64)).astype(DTYPES[kind])


def multiply(body: str, kind: str = "bf16", seed: int = 0) -> np.ndarray:
    """The accumulator as a matrix [64, N]."""
    arrays = [*matrices(kind), np.zeros(128 * N // 2, np.float32)]
    out = go(LOADS + body, arrays, warps=4, seed=seed, smem=20480, tensors=TENSORS).arrays[2].reshape(4, 32, N // 8, 2, 2)
    matrix = np.zeros((64, N), np.float32)
    for warp, lane, j, half, column in np.ndindex(out.shape):  # 9.7.15.5.1.1, figure of D
        matrix[16 * warp + 8 * half + lane // 4, 8 * j + 2 * (lane % 4) + column] = out[warp, lane, j, half, column]
    return matrix


ALL = "".join(product("{kind}", k) for k in range(4))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("left_transposed", [False, True])
def test_a_product_is_numpys(kind, left_transposed, right_transposed):
    options = {"left_transposed": left_transposed, "right_transposed": right_transposed}
    body = "".join(product(kind, k, keep=k, **options) for k in range(4))  # the first one drops what was there
    a, b = (x.astype(np.float64) for x in matrices(kind))
    want = (a.T if left_transposed else a) @ (b if right_transposed else b.T)
    have = multiply(FENCE + body + COMMIT + WAIT.format(0) + store(), kind)
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


def test_a_left_matrix_in_registers():
    """Its register r of lane l has two elements of row l / 4 (+ 8) and column 2 (l % 4) (+ 8): 9.7.15.5.1.1, figure of A."""
    load = "shr.u32 %r3, %r0, 5; and.b32 %r4, %r0, 31; shr.u32 %r5, %r4, 2; and.b32 %r6, %r4, 3;"
    load += "mad.lo.s32 %r5, %r3, 16, %r5; mul.lo.s32 %r5, %r5, 128; mad.lo.s32 %r5, %r6, 4, %r5; cvt.s64.s32 %rd13, %r5;"
    load += "add.s64 %rd13, %a0, %rd13;"
    for n, offset in enumerate((0, 8 * 128, 16, 8 * 128 + 16)):
        load += f"ld.global.b32 %r{60 + n}, [%rd13+{offset}];"
    body = load + FENCE + product("bf16", 0, left="{%r60,%r61,%r62,%r63}", keep=0) + COMMIT + WAIT.format(0) + store()
    arrays = [*matrices("bf16"), np.zeros(128 * N // 2, np.float32)]
    loads = LOADS.replace("16384], 16384;", "16384], 8192;")
    loads = "\n".join(line for line in loads.splitlines() if "[%rd1], [%desc," not in line)  # a read array is not loaded too
    out = go(loads + body, arrays, warps=4, smem=20480, tensors=TENSORS).arrays[2]
    a, b = (x.astype(np.float64) for x in arrays[:2])
    want = a[:, :16] @ b[:, :16].T
    np.testing.assert_allclose(out.reshape(4, 32, 32)[1, 5, 2], want[16 + 9, 2], rtol=1e-6)  # row 8 + 5 // 4, column 2 (5 % 4)
    assert abs(np.sort(out) - np.sort(want.astype(np.float32).ravel())).max() < 1e-5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (FENCE + ALL + COMMIT + store(), "%r100 accessed while a wgmma that accumulates in them is in flight"),
        (FENCE + ALL + COMMIT + WAIT.format(1) + store(), "in flight"),
        (FENCE + ALL + WAIT.format(0) + store(), "in flight"),  # never committed
        (FENCE + ALL + COMMIT + "mov.b32 %r101, 0;" + WAIT.format(0), "%r101 accessed while"),
        (ALL + COMMIT + WAIT.format(0) + store(), "accessed since the last wgmma.fence"),
        (FENCE + ZERO + ALL + COMMIT + WAIT.format(0) + store(), "accessed since the last wgmma.fence"),
        (FENCE + ALL + COMMIT, "ends with wgmmas"),
        (
            FENCE + product("{kind}", 0, left="{%r60,%r61,%r62,%r63}") + "mov.b32 %r60, 0;" + COMMIT + WAIT.format(0),
            "%r60 accessed while a wgmma that multiplies them is in flight",
        ),
        (  # the second matrix is loaded over
            FENCE + ALL + COMMIT + "@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%rd1+16384], 8192;"
            "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%rd11], [%rd10, {0, 0}], "
            "[%rd1+16384]; $AGAIN: mbarrier.try_wait.parity.shared.b64 %p20, [%rd1+16384], 1, 1000; @!%p20 bra $AGAIN;"
            + WAIT.format(0),
            "TMA load: writes, unordered with a read by wgmma of warp",
        ),
    ],
    ids=["not_waited", "one_left", "not_committed", "written", "no_fence", "before_fence", "end", "left_matrix", "operand"],
)
def test_what_is_in_flight_is_left_alone(body, message, seed):
    with pytest.raises(PtxError, match=message):
        multiply(body.replace("{kind}", "bf16"), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_operand_is_loaded_over_once_every_warp_has_waited(seed):
    """A warp's own wait is not enough: the others' wgmmas read it too."""
    again = """@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%rd1+16384], 8192;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%rd11], [%rd10, {0, 0}], [%rd1+16384];
    $AGAIN: mbarrier.try_wait.parity.shared.b64 %p20, [%rd1+16384], 1, 1000; @!%p20 bra $AGAIN;
    """
    body = "bar.sync 0;" + ZERO + FENCE + ALL.replace("{kind}", "bf16") + COMMIT + WAIT.format(0)
    a, b = (x.astype(np.float64) for x in matrices("bf16"))
    np.testing.assert_allclose(multiply(body + "bar.sync 0;" + again + store(), seed=seed), a @ b.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(PtxError, match="unordered with a (read|write)"):
        multiply(body + again + store(), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_warp_wrote_is_read_behind_a_proxy_fence(seed):
    """Zeroes over the second matrix's first row, then a product: with the fence, its first column is 0."""
    write = "mov.b32 %r3, 0; setp.eq.b32 %p7, %r1, 0; mul.wide.u32 %rd14, %r0, 4; add.s64 %rd14, %rd11, %rd14; fence.proxy.async;"
    write += "bar.sync 0; @!%p7 bra $OVER; st.shared.b32 [%rd14], %r3; {fence} $OVER: bar.sync 0;"
    body = ZERO + FENCE + ALL.replace("{kind}", "bf16") + COMMIT + WAIT.format(0) + store()
    out = multiply(write.format(fence="fence.proxy.async.shared::cta;") + body, seed=seed)
    assert not out[:, 0].any() and out[:, 1].any()
    with pytest.raises(PtxError, match="matrix B of a wgmma: accesses by the async proxy what warp 0 wrote: no fence"):
        multiply(write.format(fence="") + body, seed=seed)


def test_operands_lie_where_the_layouts_say():
    """Element (i, k) of a K-major matrix: row i of 128 bytes, its chunks of 16 exchanged by i % 8; 8 rows a stride on."""
    places = operand_places(descriptor(1024), 64, transposed=False)
    for i, k in ((0, 0), (1, 0), (7, 9), (13, 15), (63, 8)):
        assert places[i, k] == 1024 + i // 8 * 1024 + i % 8 * 128 + (k // 8 ^ i % 8) * 16 + k % 8 * 2
    for wrong in (descriptor(1024) & ~(1 << 62), descriptor(1024) | 1 << 49):
        with pytest.raises(PtxError, match="is not known"):
            operand_places(wrong, 64, transposed=False)
