"""What instructions compute that only read and write registers (PTX ISA 9.7.1 to 9.7.9): 32 lanes at a time, or many registers.

Owns a table of pure functions. An instruction becomes one `Step` or more, each of which assigns one register. Floats follow PTX
where it is exact; `div.full`, `ex2.approx` and `rsqrt.approx`, which it leaves open, are the correctly rounded values. PTX lets
ptxas contract a `mul` and an `add` without rounding modifier: no such contraction is made here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scripts.ptx.program import Address, Group, Instruction, Literal, Operand, PtxError

DTYPES: dict[str, Any] = {
    **{"pred": np.bool_, "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32},
    **{"s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64},
}
BANK_OF = {t: "pred" if t == "pred" else f"b{np.dtype(d).itemsize * 8}" for t, d in DTYPES.items()}
LANES = np.arange(32)
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


@dataclasses.dataclass(frozen=True)
class Step:
    """destination = function(*sources), each source with the type that it is read in. name: equal for equal functions."""

    name: str
    function: Callable[..., Any]
    type: str
    destination: Operand
    sources: tuple[tuple[Operand, str], ...]


def steps(i: Instruction) -> list[Step] | None:
    """What the instruction assigns; None if it does more than compute. Raises PtxError for a form that is not known."""
    opcode, *modifiers = i.opcode.split(".")
    pairs = {"f32x2": _two_floats, "bf16x2": _two_halves, "f16x2": _two_halves}
    make = pairs.get(modifiers[-1] if modifiers else "") or _MAKERS.get(opcode)
    made = None if make is None else make(i, modifiers)
    if made is None:
        return None
    floats = modifiers[-1:] == ["f32"] and opcode in ("add", "sub", "mul", "fma", "div", "ex2", "rcp", "rsqrt", "max", "min")
    return [dataclasses.replace(s, function=_canonical(s.function)) if floats else s for s in made]


def _canonical(function: Callable[..., Any]) -> Callable[..., Any]:
    """A NaN that is computed has one pattern of bits, whatever NaN went in (9.7.3)."""

    def compute(*sources):
        out = function(*sources)
        unordered = out != out
        if unordered.any():
            out = np.where(unordered, _NAN, out)
        return out

    return compute


def _plain(i: Instruction, function: Callable[..., Any], types: list[str], result: str) -> Iterator[Step]:
    if len(i.operands) != 1 + len(types):
        raise PtxError(f"{i}: {len(i.operands)} operands, expected {1 + len(types)}")
    yield Step(i.opcode, function, result, i.operands[0], tuple(zip(i.operands[1:], types, strict=True)))


def _type(i: Instruction, modifiers: list[str], *, also: tuple[str, ...] = ()) -> str:
    """The last modifier; what else stands there must be in `also`: a rounding or a saturation that is not known is refused."""
    if not modifiers or modifiers[-1] not in DTYPES or any(m not in also for m in modifiers[:-1]):
        raise PtxError(f"{i}: the form {i.opcode} is not known")
    return modifiers[-1]


def _same(function: Callable[..., Any], count: int, also: tuple[str, ...] = ("rn",)):
    """Sources and result of the one type that the instruction names."""

    def make(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
        t = _type(i, modifiers, also=also)
        return _plain(i, function, [t] * count, t)

    return make


def _move(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    t = _type(i, modifiers)
    to, of = i.operands
    if t == "b64" and (isinstance(to, Group) or isinstance(of, Group)):
        yield from _move_words(i, to, of)
    elif isinstance(to, Group):
        if t != "b32" or len(to.items) != 2:
            raise PtxError(f"{i}: only two halves of a 32-bit register are known")
        yield Step("low", lambda a: a.astype(np.uint16), "b16", to.items[0], ((of, "b32"),))
        yield Step("high", lambda a: (a >> np.uint32(16)).astype(np.uint16), "b16", to.items[1], ((of, "b32"),))
    elif isinstance(of, Group):
        if t != "b32" or len(of.items) != 2:
            raise PtxError(f"{i}: only two halves of a 32-bit register are known")
        yield Step("pack", _pack, "b32", to, tuple((item, "b16") for item in of.items))
    else:
        yield Step("mov", _copy, t, to, ((of, t),))


def _move_words(i: Instruction, to: Operand, of: Operand) -> Iterator[Step]:
    """Two 32-bit registers as one of 64 bits, or the reverse."""
    group = to if isinstance(to, Group) else of
    if not isinstance(group, Group) or len(group.items) != 2 or isinstance(to, Group) and isinstance(of, Group):
        raise PtxError(f"{i}: only two halves of a 64-bit register are known")
    if isinstance(to, Group):
        yield Step("low word", lambda a: a.astype(np.uint32), "b32", to.items[0], ((of, "b64"),))
        yield Step("high word", lambda a: (a >> np.uint64(32)).astype(np.uint32), "b32", to.items[1], ((of, "b64"),))
    else:
        yield Step("pack words", _pack_words, "b64", to, tuple((item, "b32") for item in group.items))


def _pack_words(low, high):
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def _two_floats(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    """Two float32 operations on the halves of 64-bit registers (9.7.3.3 to 9.7.3.6, from sm_100 on)."""
    opcode, *rounding = i.opcode.split(".")
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": _fma}
    if opcode not in functions or rounding not in (["f32x2"], ["rn", "f32x2"]):
        raise PtxError(f"{i}: the form {i.opcode} is not known")
    halves = _canonical(functions[opcode])

    def compute(*sources):
        return halves(*(np.ascontiguousarray(x).view(np.float32) for x in sources)).view(np.uint64)

    return _plain(i, compute, ["b64"] * (3 if opcode == "fma" else 2), "b64")


def _two_halves(i: Instruction, modifiers: list[str]) -> Iterator[Step] | None:
    """mul and fma of the 16-bit halves of 32-bit registers (9.7.4.3, 9.7.4.4): rounded once. A conversion to them is none of it."""
    opcode, *rounding = i.opcode.split(".")
    functions = {"mul": np.multiply, "fma": lambda a, b, c: a * b + c}
    if opcode not in functions or rounding not in ([modifiers[-1]], ["rn", modifiers[-1]]):
        raise PtxError(f"{i}: the form {i.opcode} is not known")
    kind = modifiers[-1].removesuffix("x2")

    def halves(word):
        return (from_half(half.astype(np.uint16), kind).astype(np.float64) for half in (word, word >> np.uint32(16)))

    def compute(*words):
        rounded = []
        for sources in zip(*map(halves, words), strict=True):
            exact = functions[opcode](*sources)
            wide = exact.astype(np.float32)
            if (np.isfinite(exact) & (wide != exact)).any():
                raise PtxError(f"{i}: a result that float32 does not hold exactly is not known")
            rounded.append(to_bf16(wide) if kind == "bf16" else to_f16(wide))
        return _pack(*rounded)

    return _plain(i, compute, ["b32"] * (3 if opcode == "fma" else 2), "b32")


def from_half(bits, kind: str):
    """float32 of bits of bfloat16 or float16."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def _pack(low, high):
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _copy(a):
    return a


def _cvta(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    if modifiers not in (["to", "global", "u64"], ["param", "u64"], ["to", "shared", "u64"]):
        raise PtxError(f"{i}: the form {i.opcode} is not known")
    yield Step("mov", _copy, "b64", i.operands[0], ((i.operands[1], "b64"),))


def _multiply(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    if modifiers[0] == "wide":
        t = _type(i, modifiers[1:])
        wide = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}[t]
        return _plain(i, lambda a, b: a.astype(DTYPES[wide]) * b.astype(DTYPES[wide]), [t, t], wide)
    if modifiers[0] == "hi":
        t = _type(i, modifiers[1:])
        return _plain(i, _high64 if t == "u64" else _high, [t, t], t)
    t = _type(i, modifiers, also=("lo", "rn"))
    return _plain(i, np.multiply, [t, t], t)


def _high(a, b):
    """Of 16 or 32 bits."""
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(8 * a.itemsize)).astype(a.dtype)


def _high64(a, b):
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    return a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half)


def _fma(a, b, c):
    """The product is exact in float64; the sum is rounded there before it is rounded to float32."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _shift(left: bool):
    def make(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
        t = _type(i, modifiers)
        bits = np.dtype(DTYPES[t]).itemsize * 8

        def shift(a, n):
            n_in = np.minimum(n, bits - 1).astype(a.dtype)
            moved = a << n_in if left else a >> n_in
            return moved if not left and a.dtype.kind == "i" else np.where(n < bits, moved, a.dtype.type(0))

        return _plain(i, shift, [t, "u32"], t)

    return make


def _bfe(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    t = _type(i, modifiers)
    bits = np.dtype(DTYPES[t]).itemsize * 8

    def extract(a, at, length):
        at, length = np.minimum(at & 255, bits).astype(np.int64), np.minimum(length & 255, bits).astype(np.int64)
        if a.dtype.kind == "i":  # the sign is the field's topmost bit
            if (at + length > bits).any() or (length == 0).any():
                raise PtxError(f"{i}: a signed field past the top of the register is not known")
            up = (bits - at - length).astype(a.dtype)
            return (a << up) >> (bits - length).astype(a.dtype)
        wide = np.uint64(1) << np.minimum(length, 63).astype(np.uint64)
        return ((a.astype(np.uint64) >> at.astype(np.uint64)) & (wide - np.uint64(1))).astype(a.dtype)

    return _plain(i, extract, [t, "u32", "u32"], t)


_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def _setp(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    t = _type(i, modifiers[1:])
    compare = _COMPARE.get(modifiers[0])
    if compare is None or (t == "f32" and modifiers[0] == "ne"):  # of floats, ne is false for NaN and numpy's is true
        raise PtxError(f"{i}: the comparison {i.opcode} is not known")
    return _plain(i, compare, [t, t], "pred")


def _select(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    t = _type(i, modifiers)
    return _plain(i, lambda a, b, p: np.where(p, a, b), [t, t, "pred"], t)


def _convert(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    if modifiers in (["rn", "bf16x2", "f32"], ["rn", "f16x2", "f32"]):
        narrow = to_bf16 if modifiers[1] == "bf16x2" else to_f16
        return _plain(i, lambda high, low: _pack(narrow(low), narrow(high)), ["f32", "f32"], "b32")
    if modifiers in (["rn", "bf16", "f32"], ["rn", "f16", "f32"]):
        return _plain(i, to_bf16 if modifiers[1] == "bf16" else to_f16, ["f32"], "b16")
    if modifiers in (["f32", "bf16"], ["f32", "f16"]):
        return _plain(i, functools.partial(from_half, kind=modifiers[1]), ["b16"], "f32")
    if len(modifiers) != 2 or not all(re.fullmatch(r"[su](16|32|64)", m) for m in modifiers):
        raise PtxError(f"{i}: the conversion {i.opcode} is not known")
    to, of = modifiers
    return _plain(i, lambda a: a.astype(DTYPES[to]), [of], to)


def to_bf16(x):
    """bfloat16 bits of float32, to nearest even; u16."""
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def to_f16(x):
    """float16 bits of float32; u16."""
    return x.astype(np.float16).view(np.uint16)


def _shuffle(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    """shfl.sync of the whole warp: 9.7.9.6."""
    mode = modifiers[1] if len(modifiers) == 3 else ""
    clamp, members = i.operands[3:5] if len(i.operands) == 5 else (None, None)
    if mode not in ("idx", "bfly") or clamp != Literal("31") or members != Literal("-1"):
        raise PtxError(f"{i}: only shfl.sync.idx and .bfly of whole warps are known")

    def exchange(a, b):
        lane = b.astype(np.int64) & 31
        return np.take_along_axis(a, lane if mode == "idx" else LANES ^ lane, axis=-1)

    yield Step(i.opcode, exchange, "b32", i.operands[0], tuple(zip(i.operands[1:3], ("b32", "u32"), strict=True)))


def _elect(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
    """elect.sync (9.7.13.14): the leader is any lane, the same each time."""
    pair = i.operands[0]
    if modifiers != ["sync"] or not isinstance(pair, Group) or i.operands[1] != Literal("-1"):
        raise PtxError(f"{i}: only elect.sync of a whole warp is known")
    yield Step("mov", _copy, "u32", pair.items[0], ((Literal("%leader"), "u32"),))
    yield Step("mov", _copy, "pred", pair.items[1], ((Literal("%is_leader"), "pred"),))


def _load(i: Instruction, modifiers: list[str]) -> Iterator[Step] | None:
    """ld.param of a whole 64-bit parameter; other loads do more than compute."""
    if modifiers[0] not in ("param", "param::entry"):
        return None
    address = i.operands[1]
    if modifiers[-1] not in ("b64", "u64") or not isinstance(address, Address) or address.offset:
        raise PtxError(f"{i}: only loads of whole 64-bit parameters are known")
    assert isinstance(address.base, Literal)
    return iter([Step("mov", _copy, "b64", i.operands[0], ((Literal(f"value of {address.base.text}"), "b64"),))])


def _max(pick, pick_nan):
    def make(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
        t = _type(i, modifiers, also=("NaN",))
        nan = "NaN" in modifiers
        return _plain(i, pick if t != "f32" or nan else pick_nan, [t, t], t)

    return make


def _only(name: str, function: Callable[..., Any], count: int, result: str):
    """One form alone."""

    def make(i: Instruction, modifiers: list[str]) -> Iterator[Step]:
        if i.opcode != name:
            raise PtxError(f"{i}: the form {i.opcode} is not known, only {name}")
        return _plain(i, function, [result] * count, result)

    return make


_MAKERS: dict[str, Callable[[Instruction, list[str]], Any]] = {
    "mov": _move,
    "cvta": _cvta,
    "add": _same(np.add, 2),
    "sub": _same(np.subtract, 2),
    "neg": _same(np.negative, 1),
    "mul": _multiply,
    "mad": _same(lambda a, b, c: a * b + c, 3, also=("lo",)),
    "fma": _only("fma.rn.f32", _fma, 3, "f32"),
    "div": _only("div.full.f32", np.divide, 2, "f32"),
    "ex2": _only("ex2.approx.ftz.f32", lambda a: np.exp2(a.astype(np.float64)).astype(np.float32), 1, "f32"),
    "rcp": _only("rcp.approx.ftz.f32", lambda a: np.divide(np.float32(1), a), 1, "f32"),
    "rsqrt": _only("rsqrt.approx.f32", lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32), 1, "f32"),
    "max": _max(np.maximum, np.fmax),
    "min": _max(np.minimum, np.fmin),
    "and": _same(np.bitwise_and, 2),
    "or": _same(np.bitwise_or, 2),
    "xor": _same(np.bitwise_xor, 2),
    "not": _same(np.invert, 1),
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "bfe": _bfe,
    "setp": _setp,
    "selp": _select,
    "cvt": _convert,
    "shfl": _shuffle,
    "elect": _elect,
    "ld": _load,
}


def literal(text: str, t: str) -> int:
    """The bits of a number as an operand of type t. Raises PtxError if it is none."""
    if t == "pred" and text in ("0", "1"):
        return int(text)
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return int(text[2:], 16)
    try:
        return int(text, 0) & ((1 << np.dtype(DTYPES[t]).itemsize * 8) - 1)
    except ValueError:
        raise PtxError(f"operand {text!r} of type .{t} is not known") from None
