"""What the interpreter computes, against numpy; and that batching equal operations changes nothing."""

import ml_dtypes
import numpy as np
import pytest

from scripts.ptx.program import PtxError
from tests.scripts.ptx.snippets import go

X = np.random.default_rng(0).integers(0, 2**32, 32, np.uint32)
Y = np.random.default_rng(1).integers(0, 2**32, 32, np.uint32)
Y[:4] = (0, 1, 31, 40)
S, F = np.int32, np.float32
FX, FY = (np.linspace(-9, 9, 32, dtype=F) ** 3, np.linspace(0.3, 7, 32, dtype=F))


def binary(op: str, x=X, y=Y, more: str = "", result: str = "%r12"):
    """The op on the registers %r10 and %r11 of 32 lanes, from two arrays."""
    body = f"""
    add.s64 %rd3, %a0, %rd0; ld.global.b32 %r10, [%rd3];
    add.s64 %rd4, %a1, %rd0; ld.global.b32 %r11, [%rd4];
    {op}{more}
    add.s64 %rd5, %a2, %rd0; st.global.b32 [%rd5], {result};"""
    return go(body, [x, y, np.zeros(32, np.uint32)]).arrays[2]


CASES = {
    "add.s32 %r12, %r10, %r11;": X + Y,
    "sub.s32 %r12, %r10, %r11;": X - Y,
    "mul.lo.s32 %r12, %r10, %r11;": X * Y,
    "mul.hi.s32 %r12, %r10, %r11;": ((X.view(S).astype(np.int64) * Y.view(S)) >> 32).astype(S).view(np.uint32),
    "mul.hi.u32 %r12, %r10, %r11;": ((X.astype(np.uint64) * Y) >> np.uint64(32)).astype(np.uint32),
    "mov.b32 {%rs1, %rs2}, %r10; mul.hi.u16 %rs3, %rs1, %rs2; cvt.u32.u16 %r12, %rs3;": ((X & 65535) * (X >> 16)) >> 16,
    "mad.lo.s32 %r12, %r10, 3, %r11;": X * np.uint32(3) + Y,
    "max.s32 %r12, %r10, %r11;": np.maximum(X.view(S), Y.view(S)).view(np.uint32),
    "min.u32 %r12, %r10, %r11;": np.minimum(X, Y),
    "and.b32 %r12, %r10, %r11;": X & Y,
    "xor.b32 %r12, %r10, -1;": ~X,
    "shl.b32 %r12, %r10, %r11;": np.where(Y < 32, X << np.minimum(Y, 31), 0).astype(np.uint32),
    "shr.u32 %r12, %r10, %r11;": np.where(Y < 32, X >> np.minimum(Y, 31), 0).astype(np.uint32),
    "shr.s32 %r12, %r10, %r11;": (X.view(S) >> np.minimum(Y, 31).astype(S)).view(np.uint32),
    "bfe.u32 %r12, %r10, 3, 7;": X >> np.uint32(3) & np.uint32(127),
    "bfe.s32 %r12, %r10, 3, 7;": ((X << np.uint32(22)).view(S) >> 25).view(np.uint32),
    "setp.lt.s32 %p1, %r10, %r11; selp.b32 %r12, 7, %r10, %p1;": np.where(X.view(S) < Y.view(S), np.uint32(7), X),
    "setp.gt.u32 %p1, %r10, %r11; not.pred %p2, %p1; selp.b32 %r12, 1, 0, %p2;": (X <= Y).astype(np.uint32),
    "mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r12, {%rs2, %rs1};": X << np.uint32(16) | X >> np.uint32(16),
    "shfl.sync.idx.b32 %r12, %r10, 5, 31, -1;": np.full(32, X[5]),
    "shfl.sync.bfly.b32 %r12, %r10, 6, 31, -1;": X[np.arange(32) ^ 6],
    "mov.b32 %r12, %r10; setp.eq.b32 %p1, %r0, 4; @%p1 mov.b32 %r12, %r11;": np.where(np.arange(32) == 4, Y, X),
    "mov.b32 %r12, %r10; setp.eq.b32 %p1, %r0, 4; @!%p1 mov.b32 %r12, %r11;": np.where(np.arange(32) == 4, X, Y),
    "cvt.u64.u32 %rd9, %r10; cvt.u32.u64 %r12, %rd9;": X,
    "mov.b64 %rd9, {%r10, %r11}; mov.b64 {%r13, %r12}, %rd9;": Y,
    "mov.b64 %rd9, {%r10, %r11}; mov.b64 {%r12, %r13}, %rd9;": X,
}


@pytest.mark.parametrize("op", CASES)
def test_integers(op):
    np.testing.assert_array_equal(binary(op), CASES[op])


FLOATS = {
    "mov.b64 %rd9, {%r10, %r11}; mul.f32x2 %rd9, %rd9, %rd9; mov.b64 {%r13, %r12}, %rd9;": FY * FY,
    "mov.b64 %rd9, {%r10, %r11}; mov.b64 %rd8, {%r11, %r11}; add.f32x2 %rd9, %rd9, %rd8; mov.b64 {%r12, %r13}, %rd9;": FX + FY,
    "mov.b64 %rd9, {%r10, %r11}; fma.rn.f32x2 %rd9, %rd9, %rd9, %rd9; mov.b64 {%r12, %r13}, %rd9;": (
        FX.astype(np.float64) * FX + FX
    ).astype(F),
    "add.f32 %r12, %r10, %r11;": FX + FY,
    "mul.f32 %r12, %r10, %r11;": FX * FY,
    "sub.f32 %r12, %r10, 0f3F800000;": FX - F(1),
    "fma.rn.f32 %r12, %r10, %r11, %r11;": (FX.astype(float) * FY + FY).astype(F),
    "div.full.f32 %r12, %r10, %r11;": FX / FY,
    "ex2.approx.ftz.f32 %r12, %r11;": np.exp2(FY.astype(float)).astype(F),
    "max.NaN.f32 %r12, %r10, %r11;": np.maximum(FX, FY),
    "setp.eq.f32 %p1, %r10, %r10; selp.f32 %r12, %r11, %r10, %p1;": FY,
}


@pytest.mark.parametrize("op", FLOATS)
def test_floats(op):
    np.testing.assert_array_equal(binary(op, FX, FY).view(F), FLOATS[op])


def test_a_maximum_keeps_nan():
    x = FX.copy()
    x[3] = np.nan
    assert np.isnan(binary("max.NaN.f32 %r12, %r10, %r11;", x, FY).view(F)[3])


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_pairs_of_halves(kind):
    """The first source is the upper half; rounding is to nearest even."""
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float16
    both = binary(f"cvt.rn.{kind}x2.f32 %r12, %r10, %r11;", FX, FY)
    halves = [np.asarray(x.astype(dtype)).view(np.uint16).astype(np.uint32) for x in (FX, FY)]
    np.testing.assert_array_equal(both, halves[0] << np.uint32(16) | halves[1])


def test_64_bits():
    a, b = (X.astype(np.uint64) << np.uint64(32)) | Y, (Y.astype(np.uint64) << np.uint64(32)) | X
    body = """
    mul.wide.u32 %rd3, %r0, 8;
    add.s64 %rd4, %a0, %rd3; ld.global.b64 %rd5, [%rd4]; add.s64 %rd4, %a1, %rd3; ld.global.b64 %rd6, [%rd4];
    mul.hi.u64 %rd7, %rd5, %rd6; shr.u64 %rd8, %rd5, 3; xor.b64 %rd7, %rd7, %rd8;
    add.s64 %rd4, %a2, %rd3; st.global.b64 [%rd4], %rd7;"""
    out = go(body, [a, b, np.zeros(32, np.uint64)]).arrays[2]
    want = [(int(x) * int(y) >> 64) ^ int(x) >> 3 for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(out, np.array(want, np.uint64))


def test_a_batched_run_is_the_run_one_by_one():
    """Random moves, sums and guarded moves between few registers: what depends on what must keep its order."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        registers = {f"%r{n}": X * np.uint32(n + 1) for n in range(20, 26)}
        lines = [f"mul.lo.s32 %r{n}, %r10, {n + 1};" for n in range(20, 26)] + ["setp.lt.u32 %p1, %r0, 9;"]
        for _ in range(40):
            to, a, b = (f"%r{n}" for n in rng.integers(20, 26, 3))
            kind = rng.integers(3)
            lines.append((f"mov.b32 {to}, {a};", f"add.s32 {to}, {a}, {b};", f"@%p1 mov.b32 {to}, {a};")[kind])
            new = (registers[a], registers[a] + registers[b], np.where(np.arange(32) < 9, registers[a], registers[to]))[kind]
            registers[to] = new
        for name, want in registers.items():
            np.testing.assert_array_equal(binary("\n".join(lines), result=name), want)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tanh.approx.f32 %r12, %r10;", "unknown instruction tanh.approx.f32: line"),
        ("fma.rz.f32 %r12, %r10, %r10, %r10;", "the form fma.rz.f32 is not known"),
        ("add.sat.s32 %r12, %r10, %r10;", "the form add.sat.s32 is not known"),
        ("setp.ne.f32 %p1, %r10, %r10;", "the comparison setp.ne.f32 is not known"),
        ("shfl.sync.up.b32 %r12, %r10, 1, 0, -1;", "only shfl.sync.idx and .bfly"),
        ("mov.u32 %r12, %clock;", "special register %clock"),
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1}, %rd1, %rd2, 1, 1, 1;", "m64n8k8.f32.tf32.tf32"),
        ("atom.shared.add.u32 %r12, [%rd1], 1;", "unknown instruction atom.shared.add.u32"),
        ("add.s32 %r12, %rd1, 1;", "register %rd1 of b64 is used as .s32"),
        ("add.s32 %r12, %r10, banana;", "operand 'banana'"),
        (".reg .f64 %x<3>;", "registers of type .f64"),
        ("bra $NOWHERE;", r"no label \$NOWHERE"),
    ],
)
def test_what_is_not_known_is_refused_by_name(body, message):
    with pytest.raises(PtxError, match=message):
        go(body, [X, Y])
