"""Which mutations of a kernel are caught, and why nothing misses the others.

A mutation runs on the quickest batch that reaches it. Those that survive are then taken out together, as long as nothing is
caught: of what is gone in the end, all batches in all kinds of schedules say that what is left orders the same. To take out less
leaves more order, so that each of them survives alone, too. Those that had to stay are taken out in the same way, with the others
back. What is gone then does the same as one that was gone before, and which one is found by taking out both. The rest run alone on
all batches.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from kernels.fused_matmul import cases as fused_cases
from kernels.fused_matmul.tiles import Tiles
from kernels.ragged_paged_attention.cases import Case, Heads
from scripts.ptx.compiled import (
    ATTENTION,
    EXPERTS,
    FUSED_MATMUL,
    JOIN,
    LAY_OUT_GROUPS,
    PORTABLE_ATTENTION,
    PORTABLE_EXPERTS,
    PORTABLE_JOIN,
    ROTARY_WRITE,
    KernelCompiler,
)
from scripts.ptx.log import Log, digest_of
from scripts.ptx.mutations import Mutation, mutations
from scripts.ptx.portable import PortablePtx
from scripts.ptx.suite import FUSED, LAYOUT, PREFIX, ROTARY, Workload, attention_program, fused_program, programs
from scripts.ptx.trial import ALL_SEEDS, Trial, Tried

# One consumer whose 64 rows are all used, so that every warp's accesses count; several items to a CTA that write their own rows, so
# that the second one meets the store of the first; pages in several copies.
_SEQS = ((8, 200), (5, 65), (8, 8), (1, 64), (8, 60), (8, 40), (7, 30), (8, 64), (8, 20))
WHOLE_TILE = Case("whole_tile", _SEQS, Heads(8, 1, 64), 16, "bfloat16", max_q_len=8)
# Of the fused matmul, each with a ring of two slots that a tile passes, and several tiles to a CTA, the last ones not full: two
# consumers with norm, bias and residual; one with norm and gate; one with neither.
FUSED_STEPS = (
    (fused_cases.Case("steps", 72, 192, 256, norm=True, bias=True, residual=True), Tiles(2, 32, 1, 2)),
    (fused_cases.Case("steps_gated", 72, 192, 256, norm=True, gated=True), Tiles(1, 32, 2, 2, gated=True)),
    (fused_cases.Case("steps_plain", 72, 192, 256, residual=True), Tiles(1, 32, 2, 2)),
)
# A kernel, and the case that it runs, or one program of a case that has several; the first ones are for Hopper. The other cases of
# attention have two consumers and pages in one copy, and three with pages in several; those of the grouped matmul have tiles that
# are not full, a gate, and the larger tiles of many rows.
SUBJECTS = (
    (EXPERTS, "bfloat16_deep"),
    (EXPERTS, "bfloat16_sizes"),
    (EXPERTS, "bfloat16_gated_deep"),
    (EXPERTS, "float16_deep in tiles of 128 rows"),
    (JOIN, "whole_tile"),
    (ATTENTION, "whole_tile"),
    (ATTENTION, "gpu-pass_by-8b"),
    (ATTENTION, "gpu-pass_by-window-soft_cap"),
    *((FUSED_MATMUL, FUSED + case.name) for case, _ in FUSED_STEPS),
)
PORTABLE_SUBJECTS = (
    (PORTABLE_EXPERTS, "portable bfloat16_deep"),
    (PORTABLE_JOIN, "portable whole_tile"),
    (PORTABLE_ATTENTION, "portable whole_tile"),
    (ROTARY_WRITE, ROTARY + "qwen3"),
    (LAY_OUT_GROUPS, LAYOUT + "many_groups"),
)
UNREACHED = "no batch of this case reaches it"
UNUSED = "never used: no batch of this case arrives at this barrier or waits for it"
TOGETHER = "redundant, all of these at once: what is left orders the same"
MOVED = "redundant where it stands, as its removal shows"
PASSED = "needed, but not for the access that it is moved past"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """caught: by what; None if nothing did. reason: why a survivor is redundant; None if that is not known."""

    case: str
    kind: str
    line: str
    caught: str | None
    reason: str | None = None


def subjects(*, hopper: bool) -> tuple[tuple[str, str], ...]:
    """(kernel, case) of every table."""
    return (*(SUBJECTS if hopper else ()), *PORTABLE_SUBJECTS)


def outcomes(compiler: KernelCompiler, cases: Sequence[str] | None, log: Log) -> Iterator[tuple[str, str, list[Outcome]]]:
    """(kernel, hash of its program, what became of its mutations), one subject after the other. cases: of which subjects; None is
    all. The hash is that of a program that is run unchanged (`report`)."""
    compiled: dict[str, Workload] = {}
    for kernel, case in subjects(hopper=compiler.hopper):
        if cases is None or case in cases:
            if case not in compiled:
                compiled[case] = _suite(compiler, case)
            yield kernel, digest_of(compiled[case].kernels), of_suite(compiled[case], kernel, log)


def _suite(compiler: KernelCompiler, case: str) -> Workload:
    if case == WHOLE_TILE.name:
        return attention_program(compiler, WHOLE_TILE)
    if case == PREFIX + WHOLE_TILE.name:
        return attention_program(compiler, WHOLE_TILE, PortablePtx, PREFIX)
    for steps, tiles in FUSED_STEPS:
        if case == FUSED + steps.name:
            return fused_program(compiler, steps, tiles)
    of_case = programs(compiler, [case.partition(" in tiles of ")[0]])
    return next(program for program in of_case if program.name.startswith(case))


def of_suite(suite: Workload, kernel: str, log: Log | None = None) -> list[Outcome]:
    """The mutations of one kernel of a program. Raises RuntimeError if the program itself is not sound."""
    trial, program = Trial.of(suite, kernel, log), suite.kernels[kernel].program
    results: list[Outcome] = []
    survivors: list[tuple[int, Mutation]] = []  # of `results`
    changes, start = list(mutations(program)), time.perf_counter()
    shown = start
    for mutation in changes:
        caught = trial.catch([mutation], trial.reaching(mutation.index)[:1])
        results.append(Outcome(suite.name, mutation.kind, str(program.instructions[mutation.index]), caught))
        if caught is None:
            survivors.append((len(results) - 1, mutation))
        if time.perf_counter() - shown > 20 or len(results) == len(changes):
            shown = time.perf_counter()
            print(
                f"    {kernel} of {suite.name}: {len(results)} of {len(changes)}, {len(survivors)} left, {shown - start:.0f} s",
                flush=True,
            )
    for number, caught, reason in _explain(trial, survivors):
        results[number] = dataclasses.replace(results[number], caught=caught, reason=reason)
    return results


def _explain(trial: Trial, survivors: Sequence[tuple[int, Mutation]]) -> Iterator[tuple[int, str | None, str | None]]:
    """(number, what caught it after all, why it is redundant) of every survivor of its quickest batch."""
    reached = [(number, m) for number, m in survivors if trial.reaching(m.index)]
    first: dict[int, Mutation] = {}  # of the changes of one instruction that survive, the one that takes most away
    for _, m in reached:
        if not m.moves:
            first.setdefault(m.index, m)
    gone = _gone(trial, list(first.values()))
    others = _gone(trial, [m for m in first.values() if m not in gone])  # with those of `gone` back
    without, other_without = ({m.index for m in some if "one less" not in m.kind} for some in (gone, others))
    for number, m in survivors:
        if not trial.reaching(m.index):
            yield number, None, UNREACHED
        elif m.kind.startswith("mbarrier.init") and (m in gone or m in others):  # to use what was not initialised is a fault
            yield number, None, UNUSED
        elif m in gone or m.index in without:  # weakened or moved it orders more than where it is gone
            yield number, None, TOGETHER
        elif m.moves and m.index in other_without:
            yield number, None, MOVED
        elif m in others or m.index in other_without:
            yield number, None, _other(trial, m, gone)
        elif (caught := trial.catch([m], trial.batches)) is not None:
            yield number, caught, None
        elif m.moves:
            caught = trial.catch([m], trial.batches, ALL_SEEDS)
            yield number, caught, None if caught else PASSED
        else:
            yield number, None, _other(trial, m, gone)


def _gone(trial: Trial, candidates: list[Mutation]) -> list[Mutation]:
    """What of them can go at once, in all batches and schedules. What can in few of them is tried first. The rest is tried beside
    what is left of it: it may have been kept for one that must stay."""
    likely: list[Mutation] = []
    _take_out(trial, candidates, likely, trial.cover(), (0,))
    gone: list[Mutation] = []
    for group in (likely, [m for m in candidates if m not in likely]):
        _take_out(trial, group, gone, trial.batches, ALL_SEEDS)
    batches, seeds = len(trial.batches), len(ALL_SEEDS)
    print(f"    {len(gone)} of {len(candidates)} are redundant at once: {batches} batches, {seeds} schedules", flush=True)
    return gone


def _take_out(trial: Trial, group: list[Mutation], gone: list[Mutation], batches: Sequence[Tried], seeds: Sequence[int]) -> None:
    """Adds to `gone` what of a group can go as well, in halves where it can't go as a whole."""
    if not group or trial.catch([*gone, *group], batches, seeds) is None:
        gone += group
    elif len(group) > 1:
        _take_out(trial, group[: len(group) // 2], gone, batches, seeds)
        _take_out(trial, group[len(group) // 2 :], gone, batches, seeds)


def _other(trial: Trial, change: Mutation, gone: Sequence[Mutation]) -> str | None:
    """Which other instruction does what this one does: without both something is caught. None if there is no such one. In few
    batches and one schedule, or else in all of them: what a schedule's other barriers happen to order is not caught in it."""
    instructions = trial.suite.kernels[trial.kernel].program.instructions
    near = [m for m in gone if instructions[m.index].opcode == instructions[change.index].opcode]
    near = sorted(near, key=lambda m: abs(m.index - change.index))[:2]
    for where in ((trial.cover(), (0,)), (trial.batches, ALL_SEEDS)):
        for other in near:
            caught = trial.catch([other, change], *where)
            if caught is not None:
                return f"{instructions[other.index]} does the same; without both: {caught}"
        caught = trial.catch([*gone, change], *where)
        if caught is not None:
            break
    else:
        return None
    low, high = 0, len(gone)  # without `change` and the first `low` nothing is caught, with the first `high` something is
    while high - low > 1:
        middle = (low + high) // 2
        found = trial.catch([*gone[:middle], change], *where)
        low, high, caught = (low, middle, found) if found else (middle, high, caught)
    other = gone[high - 1]
    pair = trial.catch([other, change], *where)
    without = "both" if pair else f"these and {high - 1} more"
    return f"{instructions[other.index]} does the same; without {without}: {pair or caught}"


def summary(kernel: str, results: Sequence[Outcome]) -> str:
    """A table: kind of mutation, how many were caught, why others survive."""
    rows = [f"{kernel} of {results[0].case}: {sum(r.caught is not None for r in results)} of {len(results)} mutations are caught"]
    for kind in dict.fromkeys(r.kind for r in results):
        mine = [r for r in results if r.kind == kind]
        left = Counter(_short(r.reason) for r in mine if r.caught is None)
        why = "; ".join(f"{n} survive: {reason}" for reason, n in left.items())
        rows.append(f"    {kind:52s} {sum(r.caught is not None for r in mine):4d} of {len(mine):4d}  {why}".rstrip())
    return "\n".join(rows)


def _short(reason: str | None) -> str:
    if reason is None:
        return "NOT KNOWN WHY"
    return "another one does the same" if " does the same; " in reason else reason
