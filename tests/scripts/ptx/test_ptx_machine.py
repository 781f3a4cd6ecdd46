"""One rule of PTX a snippet: what breaks it is found in every schedule, and what keeps it passes in every one."""

import numpy as np
import pytest

from scripts.ptx.launch import Tensor
from scripts.ptx.machine import run
from scripts.ptx.memory import swizzled
from scripts.ptx.program import PtxError
from tests.scripts.ptx.snippets import SEEDS, go, launch, only, program, zeros

pytestmark = pytest.mark.parametrize("seed", SEEDS)

WRITE = "st.shared.b32 [%rd2], %r0;\n"
READ = "ld.shared.b32 %r12, [%rd2];\n"
SYNC = "bar.sync 0;\n"
SAME_PLACE = "and.b32 %r3, %r0, 31; mul.wide.u32 %rd3, %r3, 4; add.s64 %rd2, %rd1, %rd3;\n"  # the lane's word, in every warp


def passes(body, seed, arrays=None, **options):
    return go(body, arrays or [zeros(32), zeros(32)], seed=seed, **options).arrays


def fails(message, body, seed, arrays=None, **options):
    with pytest.raises(PtxError, match=message):
        go(body, arrays or [zeros(32), zeros(32)], seed=seed, **options)


def test_a_read_unordered_with_a_write_is_a_race(seed):
    race = SAME_PLACE + only(0, WRITE) + only(1, READ)
    fails("unordered with a (write by warp 0|read by warp 1)", race, seed, warps=2)
    passes(SAME_PLACE + only(0, WRITE) + SYNC + only(1, READ), seed, warps=2)


def test_a_write_unordered_with_a_read_is_a_race(seed):
    first = SAME_PLACE + only(0, WRITE) + SYNC + only(1, READ)
    again = only(2, WRITE)
    fails("unordered with a", first + again, seed, warps=3)
    passes(first + SYNC + again, seed, warps=3)


def test_lanes_that_write_one_place_write_one_value(seed):
    passes("mov.b32 %r3, 7; st.shared.b32 [%rd1], %r3;", seed)
    fails("two lanes write different values", "st.shared.b32 [%rd1], %r0;", seed)


def test_a_barrier_of_some_warps_orders_those(seed):
    body = SAME_PLACE + only(0, WRITE + "bar.sync 1, 64;") + only(1, "bar.sync 1, 64;" + READ)
    passes(body, seed, warps=3)
    fails("unordered", body + only(2, READ), seed, warps=3)


def test_a_wait_that_never_ends_is_told_with_its_line(seed):
    fails(r"block \(0, 0, 0\) hangs: warp 0 at line \d+ .*bar.sync 1, 64", only(0, "bar.sync 1, 64;"), seed, warps=2)


def test_lanes_that_part_are_refused(seed):
    fails("only some lanes", "setp.lt.u32 %p1, %r0, 9; @%p1 bra $HERE; $HERE:", seed)
    fails("only some lanes", "setp.lt.u32 %p1, %r0, 9; @%p1 bar.sync 0;", seed)


def test_shared_memory_has_bounds_and_alignment(seed):
    fails("outside of the block's 64 bytes", WRITE, seed, smem=64)
    fails("not a multiple of 4", "st.shared.b32 [%rd2+2], %r0;", seed)


def test_global_memory_is_written_once_and_not_read_then(seed):
    store = "add.s64 %rd3, %a0, %rd0; st.global.b32 [%rd3], %r0;"
    np.testing.assert_array_equal(passes(store, seed)[0], np.arange(32))
    fails("written already", store + store, seed)
    fails("has written", store + "ld.global.b32 %r3, [%rd3];", seed)
    fails("has read", "add.s64 %rd3, %a0, %rd0; ld.global.b32 %r3, [%rd3];" + store, seed)
    fails("outside of every array", "st.global.b32 [%rd0], %r0;", seed)


# Mbarriers. B0 and B1 lie at bytes 1024 and 1032.

INIT = """
@%p0 mbarrier.init.shared.b64 [%rd1+1024], {0};
@%p0 mbarrier.init.shared.b64 [%rd1+1032], {0};
fence.mbarrier_init.release.cluster;
"""


def init(count, *, fence=True, sync=True):
    """By warp 0's leader, for `count` arrivals of both."""
    text = INIT.format(count)
    text = text if fence else text.replace("fence.mbarrier_init.release.cluster;", "")
    return only(0, text) + (SYNC if sync else "")


def wait(barrier, parity, number=0):
    label = f"{barrier}{parity}{number}"
    return f"""mov.b32 %r20, {parity}; mov.b32 %r21, 1000;
    $AGAIN{label}: mbarrier.try_wait.parity.shared.b64 %p20, [%rd1+{1024 + 8 * barrier}], %r20, %r21; @!%p20 bra $AGAIN{label};
    """


def arrive(barrier):
    return f"mbarrier.arrive.shared.b64 _, [%rd1+{1024 + 8 * barrier}];\n"


def test_an_mbarrier_orders_what_comes_before_an_arrival(seed):
    body = SAME_PLACE + init(32) + only(0, WRITE + arrive(0))
    passes(body + only(1, wait(0, 0) + READ), seed, warps=2)
    fails("unordered", body + only(1, READ + wait(0, 0)), seed, warps=2)
    fails("unordered", SAME_PLACE + init(32) + only(0, arrive(0) + WRITE) + only(1, wait(0, 0) + READ), seed, warps=2)


def test_an_mbarrier_is_used_by_who_must_see_its_init(seed):
    fails("no mbarrier at|unordered with its mbarrier.init", init(32, sync=False) + only(1, arrive(0)), seed, warps=2)


def test_more_arrivals_than_a_phase_has_are_a_fault(seed):
    fails("32 arrivals where 1 were left", init(1) + arrive(0), seed)


def test_a_phase_that_nobody_waits_for_is_a_fault(seed):
    fails("nobody had waited for phase 0", init(32) + arrive(0), seed)
    passes(init(32) + arrive(0) + wait(0, 0), seed)


def test_a_phase_that_ends_before_the_one_before_was_seen_is_a_fault(seed):
    """Warp 0 ends three phases while warp 1 waits for them one by one; the second pair takes turns."""
    ahead = only(0, 3 * arrive(0)) + only(1, wait(0, 0, 1) + wait(0, 1, 2) + wait(0, 0, 3))
    fails("skipped|hangs", init(32) + ahead, seed, warps=2)
    turns = only(0, arrive(0) + wait(1, 0, 1) + arrive(0) + wait(1, 1, 2)) + only(
        1, wait(0, 0, 3) + arrive(1) + wait(0, 1, 4) + arrive(1)
    )
    passes(init(32) + turns, seed, warps=2)


# TMA: a tile of 8 rows of 64 halves, 128 bytes each, in a tensor of 20 rows and 128 columns.


def tensor(swizzle=0, offset=0, argument=0):
    return Tensor(offset, argument, (20, 128), (128, 1), (8, 64), swizzle)


HALVES = np.arange(20 * 128, dtype=np.uint16).reshape(20, 128)
LOAD = """@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%rd1+1024], {bytes};
@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%rd1], [%desc, {{{column}, {row}}}], [%rd1+1024];
"""
COPY_OUT = """mov.b32 %r30, 0;
$LOOP: ld.shared.v4.b32 {%r31, %r32, %r33, %r34}, [%rd10];
st.global.v4.b32 [%rd11], {%r31, %r32, %r33, %r34};
add.s64 %rd10, %rd10, 512; add.s64 %rd11, %rd11, 512;
add.s32 %r30, %r30, 1; setp.lt.s32 %p5, %r30, 2; @%p5 bra $LOOP;
"""
POINTERS = "mul.wide.u32 %rd8, %r0, 16; add.s64 %rd10, %rd1, %rd8; add.s64 %rd11, %a1, %rd8;\n"


def load(row=0, column=0, num_bytes=1024):
    return LOAD.format(bytes=num_bytes, row=row, column=column)


def tma(body, seed, **options):
    arrays = [HALVES, zeros(512, "uint16")]
    return passes(POINTERS + body, seed, arrays, tensors=[tensor(options.pop("swizzle", 0))], **options)[1]


def tma_fails(message, body, seed, **options):
    fails(message, POINTERS + body, seed, [HALVES, zeros(512, "uint16")], tensors=[tensor()], **options)


@pytest.mark.parametrize("swizzle", [0, 128])
def test_a_tile_arrives_and_is_zero_outside_of_the_tensor(seed, swizzle):
    out = tma(init(1) + load(row=15, column=64) + wait(0, 0) + COPY_OUT, seed, swizzle=swizzle).reshape(8, 64)
    want = np.zeros((8, 64), np.uint16)
    want[:5] = HALVES[15:, 64:]
    if swizzle:  # of row r, the chunk c of 16 bytes lies where r ^ c would (5.5.7)
        want = np.stack([want[r].reshape(8, 8)[np.arange(8) ^ r].reshape(64) for r in range(8)])
    np.testing.assert_array_equal(out, want)


def test_a_load_that_is_not_waited_for_is_a_race(seed):
    tma_fails("unordered with a write by TMA loads", init(1) + load() + COPY_OUT + wait(0, 0), seed)


def test_a_load_over_what_may_still_be_read_is_a_race(seed):
    """Warp 1 reads what warp 0 loads over: with neither a barrier nor a fence between, with a barrier alone, with both."""

    def again(after_read, between):
        lanes = "and.b32 %r40, %r0, 31; mul.wide.u32 %rd8, %r40, 16; add.s64 %rd10, %rd1, %rd8; add.s64 %rd11, %a1, %rd8;\n"
        first = init(1) + only(0, load()) + wait(0, 0) + only(1, lanes + COPY_OUT + after_read)
        return first + between + only(0, load(row=8) + wait(0, 1))

    tma_fails("unordered with a|no fence|hangs", again("", ""), seed, warps=2)  # or the second load ends before warp 1 looked
    tma_fails("what warp 1 read: no fence.proxy.async between", again("", SYNC), seed, warps=2)
    np.testing.assert_array_equal(tma(again(FENCE, SYNC), seed, warps=2).reshape(8, 64), HALVES[:8, :64])


def test_bytes_that_were_not_expected_are_a_fault(seed):
    tma_fails("hangs|bytes expected", init(1) + load(num_bytes=2048) + wait(0, 0), seed)
    tma_fails("bytes expected", init(1) + load(num_bytes=0) + wait(0, 0), seed)
    tma_fails("unordered with a write by TMA loads", init(1) + load(num_bytes=0) + wait(0, 0) + COPY_OUT, seed)


def test_tma_uses_a_barrier_after_a_fence_only(seed):
    tma_fails("no fence.mbarrier_init or fence.proxy.async", init(1, fence=False) + load() + wait(0, 0), seed)


def test_tma_takes_one_lane_and_aligned_tiles(seed):
    tma_fails("more than one lane", init(32) + load().replace("@%p0", "") + wait(0, 0), seed)
    tma_fails("not a multiple of 128", init(1) + load().replace("bytes [%rd1]", "bytes [%rd1+64]") + wait(0, 0), seed)
    tma_fails("no TMA descriptor", init(1) + "add.s64 %desc, %desc, 128;" + load() + wait(0, 0), seed)


# Stores from shared memory.

STORE = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%a0], [%rd1], 128;\n"
COMMIT, FENCE = "cp.async.bulk.commit_group;\n", "fence.proxy.async.shared::cta;\n"
WAIT_READ = "cp.async.bulk.wait_group.read 0;\n"


def test_a_bulk_store_sees_what_is_behind_a_proxy_fence(seed):
    fails("warp 0 wrote: no fence.proxy.async between", WRITE + STORE + COMMIT + WAIT_READ, seed)
    out = passes(WRITE + FENCE + STORE + COMMIT + WAIT_READ, seed)[0]
    np.testing.assert_array_equal(out, np.arange(32))


def test_a_proxy_fence_may_stand_anywhere_on_the_way(seed):
    """By the writer before the barrier, by the issuer after it; not by the writer after it."""
    store = only(1, STORE + COMMIT + WAIT_READ)
    passes(SAME_PLACE + only(0, WRITE + FENCE) + SYNC + store, seed, warps=2)
    passes(SAME_PLACE + only(0, WRITE) + SYNC + only(1, FENCE + STORE + COMMIT + WAIT_READ), seed, warps=2)
    late = SAME_PLACE + only(0, WRITE) + SYNC + only(0, FENCE) + store
    fails("no fence.proxy.async between", late, seed, warps=2)


def test_a_bulk_store_is_waited_for_before_its_source_is_written_and_before_the_end(seed):
    begin = WRITE + FENCE + STORE + COMMIT
    fails("unordered with a read by bulk stores of warp 0", begin + WRITE + WAIT_READ, seed)
    passes(begin + WAIT_READ + WRITE, seed)
    fails("ends with bulk stores", begin, seed)
    fails("ends with bulk stores", WRITE + FENCE + STORE, seed)
    fails("unordered with a read by bulk stores", begin + "cp.async.bulk.wait_group.read 1;" + WRITE + WAIT_READ, seed)


def test_swizzles_exchange_chunks_of_16_bytes(seed):
    at = np.arange(4096)
    for pattern, rows in ((128, 8), (64, 4), (32, 2), (0, 1)):
        places = swizzled(at, pattern)
        np.testing.assert_array_equal(swizzled(places, pattern), at)
        assert len({(places[128 * r] - 128 * r) // 16 for r in range(8)}) == rows


def test_a_run_says_what_ran(seed):
    kernel = program("setp.ge.u32 %p1, %r0, 0; @%p1 bra $END; add.s32 %r3, %r3, 1; $END:")
    covered = run(kernel, launch(kernel), [zeros(32), zeros(32)], seed=seed).covered
    assert [str(i.text) for i, c in zip(kernel.instructions, covered, strict=True) if not c] == ["add.s32 %r3, %r3, 1"]
