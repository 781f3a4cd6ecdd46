"""mma.sync against numpy, and the rules of cp.async: what breaks one is found in every schedule, what keeps it passes in all."""

import numpy as np
import pytest

from scripts.ptx.arithmetic import to_bf16
from scripts.ptx.program import PtxError
from tests.scripts.ptx.snippets import SEEDS, go, only, zeros

WORDS = np.arange(100, 132, dtype=np.uint32)  # what every test copies: 128 bytes, 16 of them a lane of the first eight
# Lane l: %rd10 is its 16 bytes of shared memory, %rd11 of the first array; %rd2 its word of shared memory, %rd12 of the second one.
ADDRESSES = """
and.b32 %r3, %r0, 7; mul.wide.u32 %rd3, %r3, 16; add.s64 %rd10, %rd1, %rd3; add.s64 %rd11, %a0, %rd3;
and.b32 %r4, %r0, 31; mul.wide.u32 %rd4, %r4, 4; add.s64 %rd2, %rd1, %rd4; add.s64 %rd12, %a1, %rd4;
setp.lt.u32 %p1, %r4, 8; mov.b32 %r5, 16;
"""
COPY = "@%p1 cp.async.cg.shared.global [%rd10], [%rd11], 16, %r5;\n"
COMMIT = "cp.async.commit_group;\n"
SYNC = "bar.sync 0;\n"
READ = "ld.shared.b32 %r12, [%rd2]; st.global.b32 [%rd12], %r12;\n"


def wait(groups):
    return f"cp.async.wait_group {groups};\n"


def passes(body, seed, **options):
    return go(ADDRESSES + body, [WORDS, zeros(32)], seed=seed, **options).arrays[1]


def fails(message, body, seed, **options):
    with pytest.raises(PtxError, match=message):
        go(ADDRESSES + body, [WORDS, zeros(32)], seed=seed, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_have_come_behind_the_wait_for_their_group(seed):
    np.testing.assert_array_equal(passes(COPY + COMMIT + wait(0) + SYNC + READ, seed), WORDS)
    np.testing.assert_array_equal(passes(COPY + COMMIT + COMMIT + wait(1) + SYNC + READ, seed), WORDS)  # the last group is empty
    race = "ld.shared: reads, unordered with a write by cp.async of warp 0"
    fails(race, COPY + COMMIT + READ + wait(0), seed)
    fails(race, COPY + COMMIT + wait(0) + READ, seed)  # a lane has waited for its own copies, and reads another's
    fails(race, COPY + COMMIT + SYNC + READ + wait(0), seed)
    fails(race, COPY + COMMIT + wait(1) + SYNC + READ + wait(0), seed)
    fails(race, COPY + wait(0) + SYNC + READ + COMMIT + wait(0), seed)  # not of any group yet


@pytest.mark.parametrize("seed", SEEDS)
def test_another_warp_needs_a_barrier_behind_the_wait(seed):
    copy = only(0, COPY + COMMIT + wait(0))
    np.testing.assert_array_equal(passes(copy + SYNC + only(1, READ), seed, warps=2), WORDS)
    fails("unordered with a", copy + only(1, READ), seed, warps=2)
    late = only(0, COPY + COMMIT) + SYNC + only(1, READ) + only(0, wait(0))
    fails("reads, unordered with a write by cp.async of warp 0|writes, unordered with a read", late, seed, warps=2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_that_overwrites_what_is_read_is_a_race(seed):
    first = only(0, COPY + COMMIT + wait(0)) + SYNC + only(1, READ)
    again = only(0, COPY + COMMIT + wait(0))
    passes(first + SYNC + again, seed, warps=2)
    fails(
        "cp.async: writes, unordered with a read by warp 1|ld.shared: reads, unordered with a write by",
        first + again,
        seed,
        warps=2,
    )
    fails("cp.async: writes, unordered with a write by cp.async of warp 0", COPY + COMMIT + COPY + COMMIT + wait(0), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_not_read_is_zeros(seed):
    body = "setp.lt.u32 %p2, %r4, 3; selp.b32 %r5, 16, 0, %p2;" + COPY + COMMIT + wait(0) + SYNC + READ
    np.testing.assert_array_equal(passes(body, seed), np.where(np.arange(32) < 12, WORDS, 0))
    outside = "setp.lt.u32 %p2, %r4, 3; selp.b32 %r5, 16, 0, %p2; add.s64 %rd11, %rd11, 80;"
    np.testing.assert_array_equal(passes(outside + COPY + COMMIT + wait(0) + SYNC + READ, seed)[12:], 0)
    fails("outside of every array", outside.replace("%p2;", "%p2; mov.b32 %r5, 16;") + COPY + COMMIT + wait(0), seed)


def test_copies_that_nobody_waits_for_and_unknown_forms_are_refused():
    fails("ends with cp.async that it did not wait for", COPY + COMMIT, 0)
    fails("ends with cp.async that it did not wait for", COPY, 0)
    fails("cp-size 8 is not known", COPY.replace("16,", "8,") + COMMIT + wait(0), 0)
    fails("src-size .* of 16 is not known", "mov.b32 %r5, 4;" + COPY + COMMIT + wait(0), 0)
    fails("not a multiple of 16", "add.s64 %rd10, %rd10, 4;" + COPY + COMMIT + wait(0), 0)
    fails("unknown instruction cp.async.mbarrier.arrive", "cp.async.mbarrier.arrive.shared.b64 [%rd10];", 0)


A, B = np.random.default_rng(0).standard_normal((16, 16)), np.random.default_rng(1).standard_normal((16, 8))
C = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)


def bits(x, kind):
    return to_bf16(x.astype(np.float32)) if kind == "bf16" else x.astype(np.float16).view(np.uint16)


def values(x, kind):
    return (bits(x, kind).astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else x.astype(np.float16)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_multiplies_and_adds(kind):
    """Registers as PTX ISA 9.7.14.5.8 lays them out, written here from its pictures: (row, column) of each lane's elements."""
    lane = np.arange(32)
    row, pair = lane // 4, 2 * (lane % 4)
    left = [(row + 8 * (k % 2), pair + 8 * (k // 2)) for k in range(4)]
    right = [(pair + 8 * k, row) for k in range(2)]  # (depth, column)
    sums = [(row + 8 * (k // 2), pair + k % 2) for k in range(4)]
    a, b = bits(A, kind).astype(np.uint32), bits(B, kind).astype(np.uint32)
    words = [a[r, c] | a[r, c + 1] << np.uint32(16) for r, c in left]
    words += [b[d, c] | b[d + 1, c] << np.uint32(16) for d, c in right]
    words += [C[r, c].view(np.uint32) for r, c in sums]
    loads = "add.s64 %rd3, %a0, %rd0;" + "".join(f"ld.global.b32 %r{20 + k}, [%rd3+{128 * k}];" for k in range(10))
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r40,%r41,%r42,%r43}}, {{%r20,%r21,%r22,%r23}}, "
    mma += "{%r24,%r25}, {%r26,%r27,%r28,%r29};"
    stores = "add.s64 %rd4, %a1, %rd0;" + "".join(f"st.global.b32 [%rd4+{128 * k}], %r{40 + k};" for k in range(4))
    out = go(loads + mma + stores, [np.concatenate(words), zeros(128)]).arrays[1].view(np.float32).reshape(4, 32)
    have = np.empty((16, 8), np.float32)
    for k, (r, c) in enumerate(sums):
        have[r, c] = out[k]
    want = values(A, kind).astype(np.float64) @ values(B, kind).astype(np.float64) + C
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-6)
    with pytest.raises(PtxError, match="only some lanes"):
        go("setp.lt.u32 %p1, %r0, 9; @%p1 " + mma, [zeros(1), zeros(1)])
    with pytest.raises(PtxError, match="is not known"):
        go(mma.replace("m16n8k16", "m16n8k8"), [zeros(1), zeros(1)])
