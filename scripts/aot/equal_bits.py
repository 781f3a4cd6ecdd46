"""Whether programs of several buckets compute a row's matmuls and sums in one order: what of that can be read without a GPU.

From the optimized HLO: which matmuls there are, in which tiles, and which sums of floats. From PTX: the float operations of the
kernels that do them. Works on text alone. What it can't read: the order in which tensor cores add, and what ptxas makes of the PTX.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

GEMM_FUSION = "__triton_nested_gemm_fusion"
TRITON_FUSION = "__triton"  # of XLA's own choice of tile
_COMPUTATION = re.compile(r"^%(?P<name>\S+) \(.*?\n\}", re.M | re.S)
_FUSION = re.compile(r"^\s*(?:ROOT )?%(?P<name>\S+) = .*? fusion\(.*?calls=%(?P<calls>[^,\s]+)(?P<rest>.*)$", re.M)
_DOT = re.compile(r" = (?P<result>\S+) dot\((?P<rest>.*)$", re.M)
_REDUCE = re.compile(r"%\S+ = (?P<results>\([^=]*?\)|\S+) reduce\(%(?P<operand>[\w.\-]+)(?P<rest>.*)$", re.M)
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_ENTRY = re.compile(r"\.visible \.entry (?P<name>\w+)\(.*?\n\}", re.S)
# What can round, and what moves partial sums between threads. Additions of bfloat16 are residuals: each is one operation of HLO.
_FLOAT = re.compile(r"^\s*(?:@!?%\w+ )?((?:wgmma\.mma_async|mma|fma|add|sub|mul)\.\S*(?:f32|f64)\S*|shfl\.\S+)\s", re.M)
_FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True)
class Gemm:
    """One matmul. op: what of the model it is. config: all that decides in which order an element is summed."""

    op: str
    length: int  # summed over
    config: str


@dataclass(frozen=True)
class Sum:
    """One sum of floats over the last axis. kernel: that does it, in PTX."""

    op: str
    length: int
    kernel: str


@dataclass(frozen=True)
class SummedInOrder:
    """What of one program is known: its matmuls, its sums, the float operations of its kernels, and faults seen already."""

    gemms: tuple[Gemm, ...]
    sums: tuple[Sum, ...]
    operations: Mapping[str, frozenset[tuple[tuple[str, int], ...]]]  # kernel -> its counts; more than one where names repeat
    faults: tuple[str, ...]


def read_program(hlo: str, ptx: Iterable[str]) -> SummedInOrder:
    """Reads an optimized module's text and the PTX of its kernels."""
    bodies = {m["name"]: m[0] for m in _COMPUTATION.finditer(hlo)}
    gemms, sums, faults, fused = [], [], [], set()
    for m in _FUSION.finditer(hlo):
        name, body, rest = m["name"], bodies.get(m["calls"], ""), m["rest"]
        fused.add(m["calls"])
        kind = _find(r'"kind":"([^"]*)"', rest)
        reductions = _float_sums(body)
        if kind == GEMM_FUSION:
            gemms += _gemms(name, body, rest)
        elif _DOT.search(body):
            faults.append(f"{name} multiplies in a fusion of kind {kind or 'none'}")
        if kind == TRITON_FUSION and reductions:
            faults.append(f"{name} sums in a Triton fusion, whose tile follows the shape: {_find('output_tiles.*?]}', rest)}")
        kernel = re.sub(r"\W", "_", _find(r'deduplicated_name="([^"]*)"', rest) or name)
        sums += [Sum(_scope(op), length, kernel) for op, length in reductions]
    for name, body in bodies.items():
        if name not in fused:
            faults += [f"{name} has a matmul outside a fusion" for _ in _DOT.finditer(body)]
    faults += sorted({f"calls {target}" for target in re.findall(r'custom_call_target="([^"]*cublas[^"]*)"', hlo)})
    operations: dict[str, set[tuple[tuple[str, int], ...]]] = {}
    for text in ptx:
        for m in _ENTRY.finditer(text):
            operations.setdefault(m["name"], set()).add(tuple(sorted(Counter(_FLOAT.findall(m[0])).items())))
    return SummedInOrder(tuple(gemms), tuple(sums), {k: frozenset(v) for k, v in operations.items()}, tuple(faults))


def order_faults(programs: Mapping[str, SummedInOrder], *, ours: bool = False) -> list[str]:
    """Faults of programs that must give a row equal bits: matmuls in more than one configuration, a split K, sums of one length by
    other float operations. ours: whether all matmuls are kernels of ours, whose order `scripts.ptx_check` is to show."""
    faults = [f"{name}: {fault}" for name, program in programs.items() for fault in program.faults]
    configs = {gemm.config for program in programs.values() for gemm in program.gemms}
    if len(configs) > 1:
        faults.append(f"matmuls in {len(configs)} configurations: {'; '.join(sorted(configs))}")
    if configs and ours:
        faults.append("XLA multiplies beside our kernels")
    if not configs and not ours:
        faults.append("no matmul was found: the text of HLO has changed")
    seen: dict[tuple[str, int], dict[frozenset, str]] = {}
    for name, program in programs.items():
        for each in program.sums:
            ways = {_sum_only(way) for way in program.operations.get(each.kernel, ())}
            if not ways:
                faults.append(f"{name}: nothing is known of {each.kernel}, which sums {each.op}")
            seen.setdefault((each.op, each.length), {}).setdefault(frozenset(ways), name)
    for (op, length), ways in seen.items():
        if len(ways) > 1:
            told = "; ".join(f"{where}: {sorted(map(dict, way), key=str)}" for way, where in ways.items())
            faults.append(f"sums of {length} in {op} differ between programs: {told}")
    return faults


def _gemms(name: str, body: str, rest: str) -> list[Gemm]:
    """The matmuls of a fusion that Triton makes."""
    tile = _find(r'"block_level_fusion_config":\{(.*?\}\].*?)\}', rest)
    shapes = {m[1]: m[2] for m in re.finditer(r"%(\S+) = (\S+) ", body)}
    found = []
    for m in _DOT.finditer(body):
        left = re.match(r"%([\w.\-]+)", m["rest"])
        axes = [int(i) for i in _find(r"lhs_contracting_dims=\{([\d,]*)\}", m["rest"]).split(",")]
        dims = _dims(shapes[left[1]]) if left else ()
        sides = " ".join(re.findall(r"[lr]hs_(?:contracting|batch)_dims=\{[\d,]*\}", m["rest"]))
        config = f"{tile} K {_find(r'sizes.:(.*?])', m['rest'])} {sides}".replace('"', "")
        length = math.prod(dims[i] for i in axes) if dims else 0
        found.append(Gemm(_scope(_find(r'op_name="([^"]*)"', m["rest"]) or name), length, config))
    return found


def _float_sums(body: str) -> list[tuple[str, int]]:
    """(op_name, length) of a computation's sums of floats."""
    shapes = {m[1]: m[2] for m in re.finditer(r"%(\S+) = (\S+) ", body)}
    found = []
    for m in _REDUCE.finditer(body):
        shape = _SHAPE.match(m["results"])
        op = _find(r'op_name="([^"]*)"', m["rest"])
        if shape is None or shape["dtype"] not in _FLOATS or not op.endswith("reduce_sum"):
            continue
        dims = _dims(shapes.get(m["operand"], ""))
        axes = [int(i) for i in _find(r"dimensions=\{([\d,]*)\}", m["rest"]).split(",")]
        found.append((op, math.prod(dims[i] for i in axes) if dims else 0))
    return found


def _sum_only(way: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, count) for name, count in way if "bf16" not in name or name.startswith(("wgmma", "mma")))


def _dims(shape: str) -> tuple[int, ...]:
    m = _SHAPE.match(shape)
    return tuple(int(d) for d in m["dims"].split(",") if d) if m else ()


def _scope(op_name: str) -> str:
    """An op_name without the program's own name."""
    return op_name.partition("/")[2]


def _find(pattern: str, text: str) -> str:
    m = re.search(pattern, text)
    return "" if m is None else m[m.lastindex or 0]
