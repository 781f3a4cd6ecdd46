"""The grouped matmul's own PTX, recorded: sound as it is, and without the wait in its loop the race that it once had."""

import dataclasses

import numpy as np
import pytest

from kernels.grouped_matmul.cases import CASES, TOLERANCE, build, expected
from scripts.ptx.compiled import EXPERTS, Kernel
from scripts.ptx.coverage import Coverage
from scripts.ptx.experts import ExpertsPtx
from scripts.ptx.launch import Launch, Tensor
from scripts.ptx.mutations import mutations
from scripts.ptx.program import Literal, Operand, PtxError, parse
from scripts.ptx.suite import Run, Workload
from scripts.ptx.trial import Trial
from tests.scripts.ptx.snippets import RECORDED

CASE = next(case for case in CASES if case.name == "bfloat16_deep")
PTX = (RECORDED / "grouped_matmul.ptx").read_text()
OUT = [Tensor(128 * (2 + n), 5, (11, 2, 8, 64), (1024, 64, 128, 1), (8 >> n, 2, 8, 64), 128) for n in range(4)]
TENSORS = (
    Tensor(0, 3, (11, 12, 8, 64), (6144, 64, 768, 1), (8, 1, 8, 64), 128),
    Tensor(128, 4, (3, 96, 2, 8, 64), (98304, 1024, 64, 128, 1), (1, 8, 2, 8, 64), 128),
    *OUT,
)
KERNEL = Kernel(EXPERTS, parse(PTX), Launch((1, 3, 1), 128, 114720, (2, 1, 0, None), TENSORS))
BATCH = build(CASE)


def run(program, seed):
    ptx = ExpertsPtx(dataclasses.replace(KERNEL, program=program), CASE, 64)
    return ptx.run(BATCH, seed=seed)[0].astype(np.float64)


def test_it_computes_the_products():
    outputs = [run(KERNEL.program, seed) for seed in (0, 1)]
    want = expected(BATCH)
    np.testing.assert_allclose(outputs[0], want, rtol=0, atol=TOLERANCE[CASE.dtype] * np.abs(want).max())
    assert len({out.tobytes() for out in outputs}) == 1


def literal(operand: Operand) -> str:
    assert isinstance(operand, Literal)
    return operand.text


@pytest.mark.parametrize("seed", range(4))
def test_without_the_wait_in_its_loop_it_has_a_race(seed):
    """emit_pipeline with delay_release=1 refills a block's slot a step later; only the wait says that its wgmma is over by then."""
    opcodes = [(index, literal(i.operands[0])) for index, i in enumerate(KERNEL.program.instructions) if "wgmma.wait" in i.opcode]
    assert [left for _, left in opcodes] == ["1", "1", "0"]  # of the first step, of the loop, of the end
    with pytest.raises(PtxError, match="TMA load: writes, unordered with a read by wgmma of warp"):
        run(KERNEL.program.without(opcodes[1][0]), seed)
    unwaited = KERNEL.program.without(opcodes[0][0]).without(opcodes[1][0])  # as it once was
    with pytest.raises(PtxError, match="TMA load: writes, unordered with a read by wgmma of warp"):
        run(unwaited, seed)


def test_mutations_change_one_thing_each():
    program = KERNEL.program
    changed = list(mutations(program))
    kinds = {m.kind for m in changed}
    assert {"bar.sync removed", "fence.proxy.async removed", "mbarrier.try_wait returns at once"} <= kinds
    assert {"wgmma.wait_group waits for one less", "cp.async.bulk.wait_group removed", "bar.sync behind what follows it"} <= kinds
    for m in changed:
        new_program = m.of(program)
        old, new = ([i.text for i in p.instructions] for p in (program, new_program))
        moved = sorted(old) == sorted(new)
        differ = [a != b for a, b in zip(old, new, strict=True)]
        assert any(differ) and (moved or sum(differ) == 1), m.kind
        assert new_program.labels == program.labels


def suite(kernels):
    """The one batch as ptx_check has it."""
    ptx, want = ExpertsPtx(kernels[EXPERTS], CASE, 64), expected(BATCH)
    run_it = Run("recorded", lambda seed: ptx.run(BATCH, seed=seed), want, TOLERANCE[CASE.dtype] * np.abs(want).max())
    return Workload("recorded", kernels, (run_it,), suite, frozenset(kernels))


def test_a_mutation_is_caught_or_nobody_misses_it():
    """The fence before the store is missed. The wait of the first step is not: nothing is loaded before the second one's."""
    trial = Trial.of(suite({EXPERTS: KERNEL}), EXPERTS)
    by_kind = {}
    for m in mutations(KERNEL.program):
        by_kind.setdefault(m.kind, []).append(m)
    (fence,), (first, *_) = by_kind["fence.proxy.async removed"], by_kind["wgmma.wait_group removed"]
    caught = trial.catch([fence], trial.batches)
    assert caught is not None and "no fence.proxy.async between" in caught
    assert trial.catch([first], trial.batches, seeds=(0,)) is None


def test_wrong_values_are_faults():
    (run_it,) = suite({EXPERTS: KERNEL}).runs
    assert isinstance(run_it, Run)
    out = run_it.want.astype(np.float32)
    assert not run_it.faults(out)
    out[0, 0, 0] += 2 * run_it.tolerance * (1 + abs(out[0, 0, 0]))
    assert "1 values are wrong" in run_it.faults(out)[0]
    assert "rows that nobody owns are written" in run_it.faults(np.concatenate([run_it.want, run_it.want[:1]]))[0]


def test_lines_of_two_programs_count_as_one():
    """The other program has other registers; a line that either reaches is reached. Going back to a wait is no line of its own."""
    program, other = KERNEL.program, parse(PTX.replace("%r1", "%r9"))
    ran = np.ones(len(program.instructions), bool)
    ran[100], ran[200] = False, False
    coverage = Coverage()
    coverage.add(EXPERTS, program, ran)
    missing = {str(i) for i in coverage.missing(EXPERTS)}
    assert missing <= {str(program.instructions[n]) for n in (100, 200)} and missing
    coverage.add(EXPERTS, other, np.ones(len(ran), bool))
    assert not coverage.missing(EXPERTS)
    (lines,) = [lines for _, lines in coverage.summary().values()]
    waits = [i for i in program.instructions if i.opcode == "bra.uni" and literal(i.operands[0]).startswith("LAB_WAIT")]
    assert waits and lines <= len(program.instructions) - len(waits)
