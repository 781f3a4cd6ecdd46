"""What ptx_check runs: programs, each with the batches that together reach every line of it, and what must agree in every bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kernels.backends import GROUPED_MATMUL
from kernels.fused_matmul import cases as fused_cases
from kernels.fused_matmul.tiles import Tiles
from kernels.grouped_matmul import cases as experts_cases
from kernels.ragged_paged_attention import cases as attention_cases
from kernels.ragged_paged_attention.cases import INTERPRETED, PORTABLE, Case, Heads
from kernels.ragged_paged_attention.mosaic_sm90.tiles import REGISTERS, ROWS
from kernels.ragged_paged_attention.work_list import BLOCK
from kernels.rotary_write import cases as rotary_cases
from scripts.ptx.attention import AttentionPtx, ShippedPtx, padded, shape_of
from scripts.ptx.compiled import JOIN, PORTABLE_JOIN, Kernel, KernelCompiler
from scripts.ptx.experts import ExpertsPtx
from scripts.ptx.fused import FusedPtx
from scripts.ptx.layout import LayoutPtx, LayoutRun, batches
from scripts.ptx.portable import PortablePtx
from scripts.ptx.rotary import RotaryPtx, RotaryRun

SPLIT_Q_LEN = 9  # query tokens of a sequence whose KV may be split
MOST_CONSUMERS = max(REGISTERS)  # of an item
LONGER = 70  # positions by which a plan passes the KV: a block and more that is not there
PREFIX = "portable "  # of the cases that the portable kernels run
SHIPPED = "shipped "  # of attention's cases on Hopper in the tiles that it ships with
FUSED = "fused "  # of the cases of the fused matmul
ROTARY = "rotary "  # of the cases of the rotary write, which is one for all GPUs
LAYOUT = "layout "  # of the cases of the grouped matmul's layout, which is one for all GPUs


@dataclasses.dataclass(frozen=True)
class Run:
    """One batch of a program. run(seed) -> (output, the instructions of each kernel that ran); want: float64 of the output's first
    rows; tolerance: absolute and relative. What lies behind `want` must not be written."""

    name: str
    run: Callable[[int], tuple[np.ndarray, dict[str, np.ndarray]]]
    want: np.ndarray
    tolerance: float

    def faults(self, out: np.ndarray) -> list[str]:
        """What is wrong with an output."""
        have, rest = out[: len(self.want)].astype(np.float64), out[len(self.want) :].astype(np.float32)
        worst = np.abs(have - self.want).max(initial=0)
        close = np.abs(have - self.want) <= self.tolerance * (1 + np.abs(self.want))
        faults = [] if close.all() else [f"{self.name}: {(~close).sum()} values are wrong, the worst by {worst:.3g}"]
        return faults if np.isnan(rest).all() else [*faults, f"{self.name}: rows that nobody owns are written"]


type AnyRun = Run | RotaryRun | LayoutRun


@dataclasses.dataclass(frozen=True)
class Workload:
    """One compiled program: its kernels, and its batches."""

    name: str
    kernels: dict[str, Kernel]
    runs: tuple[AnyRun, ...]
    with_kernels: Callable[[dict[str, Kernel]], Workload]  # the same batches with other kernels
    demanded: frozenset[str]  # kernels whose every line these batches are to reach


@dataclasses.dataclass(frozen=True)
class Suite:
    """What some kernels are run on. programs: of each case's name, what makes its programs. few: names of cases, those of
    `--cases=few`. only_hopper: whether other GPUs lack the kernels."""

    programs: dict[str, Sequence[Callable[[KernelCompiler], Workload]]]
    few: Sequence[str]
    only_hopper: bool = False


def suites(*, hopper: bool) -> list[Suite]:
    """Those of an architecture."""
    return [suite for suite in SUITES if hopper or not suite.only_hopper]


def case_names(*, hopper: bool) -> list[str]:
    """The cases that are run on an architecture."""
    return [name for suite in suites(hopper=hopper) for name in suite.programs]


def programs(compiler: KernelCompiler, names: Sequence[str] | None = None) -> Iterator[Workload]:
    """Compiles one after the other. names: of cases, or "few"; None is all."""
    for suite in suites(hopper=compiler.hopper):
        wanted = suite.few if names is not None and "few" in names else names
        for name, makers in suite.programs.items():
            if wanted is None or name in wanted:
                yield from (make(compiler) for make in makers)


def attention_program(
    compiler: KernelCompiler, case: Case, ptx_of: type[AttentionPtx] = AttentionPtx, prefix: str = ""
) -> Workload:
    """The program of a case. Its batches: the case itself, and others with the same heads, pages and options. As it ships, only the
    case, whose rings and chunks are too long for the others to fill: then no line is demanded."""
    more = [] if ptx_of is ShippedPtx else _more(case)
    batches = [(case, 0), (case, LONGER), *((dataclasses.replace(case, seqs=s), n) for s, n in more)]
    shape = shape_of([batch for batch, _ in batches])
    split_q_len = min(SPLIT_Q_LEN, _half(case), case.max_q_len or SPLIT_Q_LEN)
    compiled = ptx_of.compile(compiler, case, shape, split_q_len=split_q_len)
    # The join goes over a sequence's tokens and its chunks: one token, or a window's few chunks, leave loops of it unused.
    one_step = {JOIN, PORTABLE_JOIN} if split_q_len == 1 or case.sliding_window else set()
    demanded = frozenset(compiled.kernels) - one_step if more else frozenset()
    tolerance = 2 * attention_cases.TOLERANCE[case.dtype]  # weights are rounded to the dtype before they meet the values

    prepared = []
    for one, longer in batches:
        batch = padded(one, shape)
        name = f"{prefix}{case.name} {one.seqs}{f' planned {longer} longer' if longer else ''}"
        prepared.append((name, batch, longer, attention_cases.expected(one, batch)))

    def with_kernels(kernels: dict[str, Kernel]) -> Workload:
        ptx = dataclasses.replace(compiled, kernels=kernels)
        runs = (Run(name, _bind(ptx.run, batch, longer=longer), want, tolerance) for name, batch, longer, want in prepared)
        return Workload(prefix + case.name, kernels, tuple(runs), with_kernels, demanded)

    return with_kernels(compiled.kernels)


def _half(case: Case) -> int:
    """Query tokens of one consumer, at most."""
    return ROWS // (case.heads.N // case.heads.K)


def _more(case: Case) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """(sequences, positions that are planned too many) of a case's other batches."""
    tails = ((1, 74), (1, 94), (1, 109), (1, 192), (1, 400))  # every size of a last copy; more chunks than the join's ring
    if case.max_q_len == 1:
        return [(tails, 0), (((1, 200), (1, 129), (1, 64), (1, 1)), LONGER)]
    if case.max_q_len is not None:
        return [(tails, 0), (((case.max_q_len, 200), (1, 129), (2, 64)), LONGER)]
    half = _half(case)
    whole, more = MOST_CONSUMERS * half, min(half, 48)
    several = ((min(SPLIT_Q_LEN, half), 300), (3, 200), (2, 150), (1, 400))  # split, with more tokens than one
    pass_by = (
        (half + more, BLOCK + more),
        (half + 1, BLOCK + 1),
        (2 * half - 1, 2 * half + BLOCK),
        (1, 129),
        (2 * half, 2 * half + 33),
        *(((whole - 1, whole + BLOCK), (whole, whole + 33)) if case.heads.H <= 64 else ()),  # rows of the third and fourth consumer
    )
    # Items of one block each, all of which have a tail to clean, several to a CTA: one consumer may be an item ahead of the other.
    short = tuple((half + k, half + k) for k in (1, 3, 5, 7, 2, 4))
    return [(tails, 0), (several, 0), (pass_by, 0), (short, 0), (((1, 129), (half + 4, half + 24), (1, 65), (1, 1)), LONGER)]


def _bind(run: Callable, batch: Any, **options: Any) -> Callable[[int], Any]:
    return lambda seed: run(batch, seed=seed, **options)


def experts_program(
    compiler: KernelCompiler, case: experts_cases.Case, rows: int, backend: str = "mosaic_sm90", prefix: str = ""
) -> Workload:
    """The program of a case in tiles of `rows` rows."""
    compiled = ExpertsPtx.compile(compiler, case, rows, backend=backend)
    batch = experts_cases.build(case)
    want = experts_cases.expected(batch)
    tolerance = experts_cases.TOLERANCE[case.dtype] * max(np.abs(want).max(initial=0), 1)

    def with_kernels(kernels: dict[str, Kernel]) -> Workload:
        ptx = dataclasses.replace(compiled, kernel=next(iter(kernels.values())))
        name = f"{prefix}{case.name} in tiles of {rows} rows"
        return Workload(name, kernels, (Run(name, _bind(ptx.run, batch), want, tolerance),), with_kernels, frozenset(kernels))

    return with_kernels({compiled.kernel.name: compiled.kernel})


def rotary_program(compiler: KernelCompiler, case: rotary_cases.Case) -> Workload:
    """The program of a case of the rotary write."""
    compiled, batches = RotaryPtx.compile(compiler, case), [rotary_cases.build(case, seed) for seed in range(2)]

    def with_kernels(kernels: dict[str, Kernel]) -> Workload:
        ptx = dataclasses.replace(compiled, kernel=next(iter(kernels.values())))
        runs = (RotaryRun(f"{ROTARY}{case.name}, batch {i}", ptx, batch) for i, batch in enumerate(batches))
        return Workload(ROTARY + case.name, kernels, tuple(runs), with_kernels, frozenset(kernels))

    return with_kernels({compiled.kernel.name: compiled.kernel})


def fused_program(compiler: KernelCompiler, case: fused_cases.Case, tiles: Tiles | None = None) -> Workload:
    """The program of a case of the fused matmul. tiles: None is what the kernel chooses."""
    compiled, batch = FusedPtx.compile(compiler, case, tiles), fused_cases.build(case)
    want = fused_cases.expected(case, batch)
    tolerance = fused_cases.TOLERANCE[case.dtype] * np.abs(want).max()
    name = FUSED + case.name + (f" in {tiles}" if tiles else "")

    def with_kernels(kernels: dict[str, Kernel]) -> Workload:
        ptx = dataclasses.replace(compiled, kernel=next(iter(kernels.values())))
        return Workload(name, kernels, (Run(name, _bind(ptx.run, batch), want, tolerance),), with_kernels, frozenset(kernels))

    return with_kernels({compiled.kernel.name: compiled.kernel})


def layout_program(compiler: KernelCompiler, case: experts_cases.Case, rows: int) -> Workload:
    """The program that lays out a case of the grouped matmul in tiles of `rows` rows."""
    compiled, name = LayoutPtx.compile(compiler, case, rows), f"{LAYOUT}{case.name} in tiles of {rows} rows"

    def with_kernels(kernels: dict[str, Kernel]) -> Workload:
        ptx = dataclasses.replace(compiled, kernel=next(iter(kernels.values())))
        runs = (LayoutRun(f"{name}, batch {i}", ptx, batch) for i, batch in enumerate(batches(case)))
        return Workload(name, kernels, tuple(runs), with_kernels, frozenset(kernels))

    return with_kernels({compiled.kernel.name: compiled.kernel})


def _fused_suite() -> Suite:
    """Every case in the tiles that the kernel chooses, and some in others."""
    cases = {case.name: case for case in fused_cases.CASES if case.dtype == "bfloat16"}
    found: dict[str, Sequence[Callable[[KernelCompiler], Workload]]] = {}
    for name, case in cases.items():
        others = [tiles for of, tiles in FUSED_TILES if of == name]
        found[FUSED + name] = [partial(fused_program, case=case, tiles=tiles) for tiles in (None, *others)]
    return Suite(found, [FUSED + name for name in ("gate_up", "prefill_qkv", "down")], only_hopper=True)


# Past two rings of every CTA and past two chunks: a decode in each head_dim, and a prefill of each number of consumers.
SHIPPED_CASES = (
    Case("decodes-128", ((1, 1600), (1, 70), (1, 513)), Heads(4, 1, 128), 64, "bfloat16", max_q_len=1),
    Case("decodes-64", ((1, 3300), (1, 70), (1, 513)), Heads(3, 1, 64), 64, "bfloat16", max_q_len=1),
    Case("mixed-128", ((40, 1100), (1, 600)), Heads(4, 1, 128), 64, "bfloat16"),  # two consumers
    Case("mixed-64-few", ((50, 1100), (1, 600)), Heads(3, 1, 64), 64, "bfloat16"),  # three
    Case("mixed-64", ((90, 1100), (1, 600)), Heads(3, 1, 64), 64, "bfloat16"),  # four
)


def _shipped_suite() -> Suite:
    """Attention as it ships."""
    make = partial(attention_program, ptx_of=ShippedPtx, prefix=SHIPPED)
    return Suite({SHIPPED + case.name: [partial(make, case=case)] for case in SHIPPED_CASES}, [], only_hopper=True)


# Two consumers, small and large blocks, and rings that a tile fills several times.
FUSED_TILES = (
    ("qkv", Tiles(1, 32, 1, 2)),
    ("gate_up", Tiles(1, 32, 2, 2, gated=True)),
    ("deep_down", Tiles(1, 32, 1, 3)),
    ("o_bias", Tiles(2, 32, 1, 2)),
    ("prefill_qkv", Tiles(2, 64, 2, 2)),
    ("prefill_gate_up", Tiles(2, 128, 2, 2, gated=True)),
    ("prefill_gate_up", Tiles(2, 64, 2, 3, gated=True)),
    ("prefill_down", Tiles(2, 128, 1, 2)),
)


def _suite(
    prefix: str,
    ptx_of: type[AttentionPtx],
    cases: Sequence[Case],
    backend: str,
    tile_rows: Sequence[int],
    few: Sequence[str],
    *,
    only_hopper: bool = False,
) -> Suite:
    """Attention's cases, and those of the grouped matmul in tiles of so many rows."""
    found: dict[str, Sequence[Callable[[KernelCompiler], Workload]]] = {}
    for case in cases:
        found[prefix + case.name] = [partial(attention_program, case=case, ptx_of=ptx_of, prefix=prefix)]
    for case in experts_cases.CASES:
        if case.dtype != "float32" and (GROUPED_MATMUL[backend].fuses_gate or not case.gated):
            make = partial(experts_program, case=case, backend=backend, prefix=prefix)
            found[prefix + case.name] = [partial(make, rows=rows) for rows in tile_rows]
    return Suite(found, [prefix + name for name in few], only_hopper)


SUITES = (
    _suite(
        "",
        AttentionPtx,
        INTERPRETED,
        "mosaic_sm90",
        (64, 128),
        ("gpu-decodes-0.6b", "gpu-window-soft_cap", "gpu-pass_by-8b", "bfloat16_deep"),
        only_hopper=True,
    ),
    _suite(
        PREFIX,
        PortablePtx,
        (*INTERPRETED, *PORTABLE),
        "mosaic_portable",
        (64,),
        ("gpu-decodes-0.6b", "gpu-window-soft_cap", "bfloat16_deep"),
    ),
    _shipped_suite(),
    _fused_suite(),
    Suite(
        {ROTARY + case.name: [partial(rotary_program, case=case)] for case in rotary_cases.CASES},
        [ROTARY + name for name in ("qwen3", "head_96_norm")],
    ),
    Suite(
        {
            LAYOUT + case.name: [partial(layout_program, case=case, rows=rows) for rows in (64, 128)]
            for case in (*experts_cases.CASES, *experts_cases.LAYOUTS)
            if case.dtype == "float32"  # the others are no different here
        },
        [LAYOUT + "many_groups"],
    ),
)
