"""Programs in which one synchronising instruction is taken out, weakened or moved, run like the others: what would be missed?

A mutation is caught if some batch, in some schedule, breaks a rule or computes something wrong. One that survives is redundant in
what was run. Why is found by running, too: survivors are taken out one after the other, as long as nothing is caught. What is
gone in the end is redundant all at once: what is left orders everything. A survivor that had to stay does what another one, gone
before it, did as well.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from scripts.ptx.compiled import ATTENTION, EXPERTS, JOIN, PORTABLE_ATTENTION, PORTABLE_EXPERTS, KernelCompiler
from scripts.ptx.machine_code import registers_of
from scripts.ptx.program import Instruction, Literal, Program, PtxError
from scripts.ptx.suite import Program as Suite
from scripts.ptx.suite import Run, programs

SEEDS = 2  # schedules in which a mutation may be caught
# A kernel, and a case of it: one and two consumers, pages in one copy and in several. The first ones are for Hopper.
PORTABLE_SUBJECTS = (
    (PORTABLE_EXPERTS, "portable bfloat16_deep"),
    (PORTABLE_ATTENTION, "portable gpu-drafts"),
)
SUBJECTS = (
    (EXPERTS, "bfloat16_deep"),
    (JOIN, "gpu-drafts"),
    (ATTENTION, "gpu-drafts"),
    (ATTENTION, "gpu-pass_by-8b"),
)
_SYNCHRONISES = re.compile(
    r"bar\.sync|fence\.|mbarrier\.(init|arrive|try_wait)|wgmma\.(fence|commit|wait)|cp\.async\.(bulk\.)?(commit|wait)"
)
_RELEASES = re.compile(r"bar\.sync|fence\.proxy|mbarrier\.arrive\.release")  # weaker where they come earlier
_ACQUIRES = re.compile(r"bar\.sync|wgmma\.wait|cp\.async\.(bulk\.)?wait")  # weaker where they come later
_ACCESSES = re.compile(r"(ld|st)\.shared|(ld|st)matrix|cp\.async\.(bulk\.(tensor|global)|cg)|wgmma\.mma")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change of one instruction. kind: what is done; index: of the instruction; start: where `instructions` replace the old."""

    kind: str
    index: int
    start: int
    instructions: tuple[Instruction, ...]

    def of(self, program: Program) -> Program:
        """The program with this change."""
        return program.replaced(self.start, *self.instructions)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """caught: by what; None if nothing did. reason: why a survivor is redundant; None if that is not known."""

    case: str
    kind: str
    line: str
    caught: str | None
    reason: str | None = None


def mutations(program: Program) -> Iterator[Mutation]:
    """Every one of a program."""
    for index, i in enumerate(program.instructions):
        if not _SYNCHRONISES.match(i.opcode):
            continue
        name = re.sub(r"\.(sync|aligned|release|cta|shared|b64|async|shared::cta|cluster|parity)\b.*", "", i.opcode) or i.opcode
        name = {"bar": "bar.sync", "fence.proxy": "fence.proxy.async", "cp": re.sub(r"\.read$", "", i.opcode)}.get(name, name)
        if i.opcode.startswith("mbarrier.try_wait"):
            over = dataclasses.replace(i, opcode="mov.pred", operands=(i.operands[0], Literal("1")), text=f"over at once: {i.text}")
            yield Mutation(f"{name} returns at once", index, index, (over,))
            continue
        yield Mutation(f"{name} removed", index, index, (program.without(index).instructions[index],))
        if "wait_group" in i.opcode:
            (count,) = i.operands
            assert isinstance(count, Literal)
            weaker = dataclasses.replace(i, operands=(Literal(str(int(count.text) + 1)),), text=f"one more left: {i.text}")
            yield Mutation(f"{name} waits for one less", index, index, (weaker,))
        if _RELEASES.match(i.opcode) and (to := _neighbour(program, index, -1)) is not None:
            yield Mutation(f"{name} before what it follows", index, to, (i, *program.instructions[to:index]))
        if _ACQUIRES.match(i.opcode) and (to := _neighbour(program, index, 1)) is not None:
            yield Mutation(f"{name} behind what follows it", index, index, (*program.instructions[index + 1 : to + 1], i))


def _neighbour(program: Program, index: int, step: int) -> int | None:
    """The next access of shared memory in a straight line, with no other synchronisation between and what `index` reads defined."""
    targets, reads = set(program.labels.values()), set(registers_of(program.instructions[index]))
    at = index
    while 0 <= at + step < len(program.instructions) and (at if step < 0 else at + step) not in targets:
        at += step
        i = program.instructions[at]
        if _ACCESSES.match(i.opcode):
            return at
        if _SYNCHRONISES.match(i.opcode) or i.opcode.startswith(("bra", "ret")):
            return None
        if step < 0 and reads & set(registers_of(dataclasses.replace(i, operands=i.operands[:1]))):
            return None
    return None


def outcomes(compiler: KernelCompiler, *, verbose: bool = False) -> Iterator[tuple[str, list[Outcome]]]:
    """(kernel, what became of its mutations), one subject after the other."""
    for kernel, case in (*(SUBJECTS if compiler.hopper else ()), *PORTABLE_SUBJECTS):
        suite = next(iter(programs(compiler, [case])))
        yield kernel, of_suite(suite, kernel, verbose=verbose)


def of_suite(suite: Suite, kernel: str, *, verbose: bool = False) -> list[Outcome]:
    """The mutations of one kernel of a program. Raises RuntimeError if the program itself is not sound."""
    program, start = suite.kernels[kernel].program, time.perf_counter()
    trial = Trial.of(suite, kernel)
    results: list[Outcome] = []
    survivors: list[tuple[int, Mutation]] = []  # of `results`, that take out or weaken
    changes = list(mutations(program))
    shown = start
    for mutation in changes:
        caught = trial.catch(mutation.of(program), [mutation.index])
        results.append(Outcome(suite.name, mutation.kind, str(program.instructions[mutation.index]), caught))
        if caught is None:
            survivors.append((len(results) - 1, mutation))
        if verbose or time.perf_counter() - shown > 20:
            shown = time.perf_counter()
            print(f"    {kernel} of {suite.name}: {len(results)} of {len(changes)}, {shown - start:.0f} s", flush=True)
    for number, reason in _reasons(program, trial, survivors):
        results[number] = dataclasses.replace(results[number], reason=reason)
    return results


def _reasons(program: Program, trial: Trial, survivors: Sequence[tuple[int, Mutation]]) -> Iterator[tuple[int, str | None]]:
    """(number, why it is redundant) of every survivor."""
    alone = [(number, m) for number, m in survivors if len(m.instructions) == 1]
    reached = {m.index: m for _, m in alone if trial.covered[m.index]}  # of two changes of one instruction the last
    gone: list[Mutation] = []
    _take_out(program, trial, list(reached.values()), gone)
    indices = [m.index for m in gone]
    sound = trial.catch(_without(program, gone), indices) is None if gone else True
    for number, m in alone:
        if m.index not in reached:
            yield number, "no batch of this case reaches it"
        elif m.index in indices:
            yield number, "redundant, all of these at once: what is left orders the same" if sound else None
        else:
            yield number, "does what another one of these does too, and is missed once that is gone"
    for number, m in survivors:
        if len(m.instructions) > 1:
            yield number, "redundant where it stands, as its removal shows" if any(m.index == o.index for _, o in alone) else None


def _take_out(program: Program, trial: Trial, group: list[Mutation], gone: list[Mutation]) -> None:
    """Adds to `gone` what of a group can go as well, in halves where it can't go as a whole."""
    together = [*gone, *group]
    if not group or trial.catch(_without(program, together), [m.index for m in together], seeds=1) is None:
        gone += group
    elif len(group) > 1:
        _take_out(program, trial, group[: len(group) // 2], gone)
        _take_out(program, trial, group[len(group) // 2 :], gone)


def _without(program: Program, changes: Sequence[Mutation]) -> Program:
    for change in changes:
        program = change.of(program)
    return program


@dataclasses.dataclass(frozen=True)
class Trial:
    """The batches that a kernel's changed programs are run with: as few as reach what all of them do."""

    suite: Suite
    kernel: str
    runs: tuple[int, ...]  # of the suite's
    reached: tuple[np.ndarray, ...]  # by each

    @classmethod
    def of(cls, suite: Suite, kernel: str) -> Trial:
        reached = []
        for run in suite.runs:
            out, covered = run.run(0)
            if run.faults(out):
                raise RuntimeError(f"{run.name}: wrong before any mutation: {run.faults(out)}")
            reached.append(covered[kernel])
        chosen, seen = [], np.zeros(len(reached[0]), bool)
        while (reached[(best := int(np.argmax([(r & ~seen).sum() for r in reached])))] & ~seen).any():
            chosen.append(best)
            seen |= reached[best]
        return cls(suite, kernel, tuple(chosen), tuple(reached[n] for n in chosen))

    @property
    def covered(self) -> np.ndarray:
        return np.any(self.reached, axis=0)

    def catch(self, program: Program, indices: Sequence[int], *, seeds: int = SEEDS) -> str | None:
        """What a changed program breaks first; None if nothing. Only batches that reach one of these instructions are run."""
        kernels = {**self.suite.kernels, self.kernel: dataclasses.replace(self.suite.kernels[self.kernel], program=program)}
        changed = self.suite.with_kernels(kernels)
        runs = [changed.runs[n] for n, reached in zip(self.runs, self.reached, strict=True) if reached[list(indices)].any()]
        for seed in range(seeds):
            for run in runs:
                caught = _broken(run, seed)
                if caught is not None:
                    return caught
        return None


def _broken(run: Run, seed: int) -> str | None:
    """The rule that a run breaks, without places; None if none."""
    try:
        out, _ = run.run(seed)
    except PtxError as error:
        text = "hangs" if "hangs" in str(error) else str(error).split(": ")[-1]
        return re.sub(r"0x\w+|%\w+|\b\d+\b", "#", text)[:140]
    return "wrong values" if run.faults(out) else None


def summary(kernel: str, results: Sequence[Outcome]) -> str:
    """A table: kind of mutation, how many were caught, why others survive."""
    rows = [f"{kernel} of {results[0].case}: {sum(r.caught is not None for r in results)} of {len(results)} mutations are caught"]
    for kind in dict.fromkeys(r.kind for r in results):
        mine = [r for r in results if r.kind == kind]
        left = Counter(r.reason or "NOT KNOWN WHY" for r in mine if r.caught is None)
        why = "; ".join(f"{n} survive: {reason}" for reason, n in left.items())
        rows.append(f"    {kind:52s} {sum(r.caught is not None for r in mine):4d} of {len(mine):4d}  {why}".rstrip())
    return "\n".join(rows)
