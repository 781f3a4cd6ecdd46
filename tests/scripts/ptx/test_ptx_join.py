"""The join's own PTX, recorded: equal bits in every schedule; its bits depend on the schedule if it takes what arrives first."""

import ml_dtypes
import numpy as np
import pytest

from scripts.ptx.compiled import JOIN, Kernel
from scripts.ptx.coverage import Coverage
from scripts.ptx.launch import Launch, Tensor
from scripts.ptx.machine import run
from scripts.ptx.program import parse
from scripts.ptx.report import Report, check_program
from scripts.ptx.suite import Run, Workload
from tests.scripts.ptx.snippets import RECORDED

PTX = (RECORDED / "join.ptx").read_text()
SLOTS, ROWS, H, TOKENS, HEADS = 42, 16, 64, 13, 4  # as it was compiled; ROWS: of a partial result, 4 tokens of 4 heads
NUM_SPLIT_AT, SEEDS = 298, 5
LAUNCH = Launch(
    (3, 1, 1),
    128,
    59416,
    (3, 4, 0, None),
    (
        Tensor(0, 1, (SLOTS, ROWS, H), (ROWS * H, H, 1), (1, ROWS, H), 0),
        Tensor(128, 2, (SLOTS, 2, 64), (128, 64, 1), (1, 2, 64), 0),
    ),
)
BASE = "cvt.u32.u64 \t%r7, %rd89;\n"  # the loop's first line: which partial result it is
WAIT = "cvt.u32.u64 \t%r109, %rd36;\n"  # the first that uses the slot's addresses but its parity
SLOT = "sub.s32 \t%r115, %r7, %r114;\n"
DECLARED = ".reg .pred %first; .reg .pred %swap; .reg .b32 %x<5>; .reg .b64 %y<3>;\n"
# Whether the third partial result is there, asked once, before the second one is waited for.
POLL = """
setp.ne.b32 %swap, %r7, 1; @%swap bra $ASKED;
add.s32 %x0, %r55, 59408; shr.u32 %x1, %r258, 2; and.b32 %x1, %x1, 1; mov.b32 %x2, 0;
mbarrier.try_wait.parity.shared.b64 %first, [%x0], %x1, %x2;
$ASKED:
"""
ALWAYS = "setp.eq.b32 %first, 0, 0;\n"
SWAP = """
setp.ne.b32 %swap, %r7, 0; and.pred %swap, %swap, %first; mov.b32 %x4, 3; @%swap sub.s32 %r115, %x4, %r7;
"""
MOVED = """
shl.b32 %x3, %r7, 1; sub.s32 %x3, %x4, %x3;
mul.wide.s32 %y0, %x3, 8; mul.wide.s32 %y1, %x3, 512; mul.wide.s32 %y2, %x3, 16384;
@%swap add.s64 %rd36, %rd36, %y0; @%swap add.s64 %rd38, %rd38, %y1; @%swap add.s64 %rd40, %rd40, %y2;
"""


def edited(decide: str) -> str:
    """The join with its second and third partial result in the other order where `decide` sets %first."""
    text = PTX
    for line, before, after in ((BASE, "", decide), (SLOT, "", SWAP), (WAIT, MOVED, "")):
        assert text.count(line) == 1
        text = text.replace(line, before + line + after)
    return text.replace("$L__func_begin0:", DECLARED + "$L__func_begin0:", 1)


def arrays() -> tuple[list[np.ndarray], np.ndarray]:
    """(out, partial results and their statistics, work list, first tokens), and what the join's rows are. Three partial results of
    one sequence, of which the first and the last cancel: what float32 makes of their sum shows in bfloat16."""
    draw = np.random.default_rng(3)
    acc, stats = np.full((SLOTS, ROWS, H), np.nan, np.float32), np.full((SLOTS, 2, 64), np.nan, np.float32)
    acc[:3] = draw.normal(size=(3, ROWS, H))
    large = draw.normal(size=(ROWS, H)).astype(np.float32) * 2000
    acc[0] += large
    acc[2] -= large
    stats[:3, 0], stats[:3, 1] = 0, 1 / 3
    work = np.zeros(NUM_SPLIT_AT + 1 + 3 * SLOTS, np.int32)
    work[NUM_SPLIT_AT : NUM_SPLIT_AT + 4] = 1, 0, 0, 3  # one group: sequence 0, slots 0 to 2
    out = np.full((TOKENS, HEADS, H), np.nan, ml_dtypes.bfloat16)
    want = acc[:3].astype(np.float64).sum(0) / stats[:3, 1, :ROWS].astype(np.float64).sum(0)[:, None]
    return [out, acc, stats, work, np.array([0, ROWS // HEADS], np.int32)], want.reshape(ROWS // HEADS, HEADS, H)


def report_of(ptx: str) -> Report:
    """What ptx_check says of a join."""
    given, want = arrays()
    kernels = {JOIN: Kernel(JOIN, parse(ptx), LAUNCH)}

    def with_kernels(kernels):
        def once(seed):
            result = run(kernels[JOIN].program, LAUNCH, given, seed=seed)
            return result.arrays[0], {JOIN: result.covered}

        return Workload("recorded", kernels, (Run("join", once, want, tolerance=0.02),), with_kernels, frozenset())

    report = Report()
    check_program(with_kernels(kernels), SEEDS, Coverage(), report)
    return report


@pytest.mark.parametrize("ptx", [PTX, edited(ALWAYS)], ids=["as it is", "the third one second, always"])
def test_a_fixed_order_has_equal_bits(ptx):
    assert report_of(ptx).faults == []


def test_an_order_that_depends_on_the_schedule_is_seen_by_its_bits_alone():
    """No race, no wrong value: what was read had arrived, and the sum is right but for its rounding."""
    assert report_of(edited(POLL)).faults == [f"join: 2 different outputs in {SEEDS} schedules"]


def test_the_order_of_its_sums_shows():
    """Without this the tests above would show nothing."""
    (given, _), outputs = arrays(), []
    for ptx in (PTX, edited(ALWAYS)):
        outputs.append(run(parse(ptx), LAUNCH, given).arrays[0].tobytes())
    assert outputs[0] != outputs[1]
