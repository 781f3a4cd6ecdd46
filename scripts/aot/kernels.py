"""Our own kernels as cases for a deviceless compile: head shapes that are served, decode and mixed, in bfloat16 and pages of 64,
and what else the attention kernel is specialised for, each at a head shape or two: page sizes, float16, window, soft-cap, drafts.
A window with a soft-cap, which takes most registers, in small and large pages and every kind of bucket.

Owns the list, and which kernels a case must call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from scripts.aot.compiled_report import CompiledReport
from scripts.aot.compiler import device_of
from scripts.aot.verdicts import (
    ATTENTION,
    EXPERTS,
    FUSED_MATMUL,
    JOIN,
    LAYOUT,
    PORTABLE_ATTENTION,
    PORTABLE_EXPERTS,
    PORTABLE_JOIN,
    ROTARY_WRITE,
)

# Head shapes of Qwen3 0.6B, 4B and 8B, 32B, 30B-A3B, and of SmolLM2: (query heads, KV heads, head_dim).
HEADS = {"0.6b": (16, 8, 128), "8b": (32, 8, 128), "32b": (64, 8, 128), "30b-a3b": (32, 4, 128), "smollm2": (9, 3, 64)}
SHAPES = {"decode": (64, 64, 1), "mixed": (2048, 128, 2048), "drafts": (80, 16, 5)}  # (T, S, max_q_len)
EXPERTS_30B_A3B = ((2048, 1536), (768, 2048))  # [in, out] of an expert's gate and up, and of its down projection
EXPERTS_TOKENS = (8, 64, 256, 2048)  # 0.5, 4, 16 and 128 rows an expert
# A model's matrix -> [D, F], and what it is multiplied together with: the norm, norm and gate, or what the product is added to.
FUSED = {
    "0.6b qkv": (1024, 4096, "norm"),
    "0.6b gate_up": (1024, 6144, "gate"),
    "0.6b o": (2048, 1024, "residual"),
    "0.6b down": (3072, 1024, "residual"),
    "8b qkv": (4096, 6144, "norm"),
    "8b gate_up": (4096, 24576, "gate"),
    "8b down": (12288, 4096, "residual"),
    "smollm2 qkv": (576, 960, "norm"),
}
FUSED_TOKENS = (8, 256, 2048)
WINDOW_AND_CAP: dict[str, Any] = {"sliding_window": 4096, "soft_cap": 50.0}
_MAX_KV_LEN, _NUM_PAGES = 32768, 4096


@dataclass(frozen=True)
class KernelCase:
    """function(*args), args being ShapeDtypeStructs. kernels: the Mosaic kernels that it must call, once each. same_bits: the
    attention, fused matmul or grouped matmul for Hopper of all cases in which this is equal gives a row equal bits."""

    name: str
    function: Callable
    args: tuple[Any, ...]
    kernels: tuple[str, ...]
    same_bits: str = ""

    def faults(self, report: CompiledReport) -> list[str]:
        called = sorted(call.mosaic_kernel for call in report.mosaic_calls)
        if called == sorted(self.kernels):
            return []
        return [f"{self.name}: calls {', '.join(called) or 'no Mosaic kernel'}, expected {', '.join(self.kernels)}"]


def few_cases(num_sms: int, device_kind: str) -> list[KernelCase]:
    """Those that tell most beside an engine's step: head_dim 64, float16 in pages of 16, pages larger than a block, a window with a
    soft-cap in pages of 16 (where registers are scarcest), and experts with less than a row each."""
    return [
        attention_case("smollm2", "mixed", num_sms, device_kind),
        attention_case("0.6b", "decode", num_sms, device_kind, page_size=16, dtype="float16"),
        attention_case("8b", "mixed", num_sms, device_kind, page_size=128),
        attention_case("8b", "decode", num_sms, device_kind, page_size=128),  # a row's bits are those of the mixed bucket
        attention_case("0.6b", "mixed", num_sms, device_kind, page_size=16, **WINDOW_AND_CAP),
        experts_case(EXPERTS_TOKENS[0], *EXPERTS_30B_A3B[0]),
        fused_case("0.6b qkv", FUSED_TOKENS[0]),
        fused_case("8b gate_up", FUSED_TOKENS[-1]),
    ]


def kernel_cases(num_sms: int, device_kind: str) -> list[KernelCase]:
    """Every case, for a device of so many SMs; those of `few_cases` first."""
    attention = functools.partial(attention_case, num_sms=num_sms, device_kind=device_kind)
    cases = [
        *few_cases(num_sms, device_kind),
        *(attention(name, shape) for name in HEADS for shape in ("decode", "mixed")),
        *(attention("0.6b", shape, page_size=16, dtype="float16") for shape in ("decode", "mixed")),
        attention("smollm2", "mixed", dtype="float16"),
        attention("8b", "mixed", page_size=32),
        attention("8b", "mixed", sliding_window=4096),
        attention("8b", "decode", sliding_window=4096),
        attention("8b", "mixed", soft_cap=50.0),
        attention("8b", "mixed", **WINDOW_AND_CAP),
        *(
            attention(name, shape, page_size=page_size, **WINDOW_AND_CAP)
            for name in ("0.6b", "smollm2")
            for page_size in (16, 128)
            for shape in SHAPES
        ),
        attention("8b", "drafts"),
        attention("32b", "drafts"),  # 40 rows
        *(experts_case(num_tokens, *matrix) for num_tokens in EXPERTS_TOKENS for matrix in EXPERTS_30B_A3B),
        *(fused_case(name, num_tokens) for name in FUSED for num_tokens in FUSED_TOKENS),
    ]
    return list({case.name: case for case in cases}.values())


# Head shapes for the portable kernel alone: of Phi-3, Llama 2 7B, Gemma 2 9B and Gemma 3 4B.
PORTABLE_HEADS = {"phi3": (32, 32, 96), "llama2": (32, 32, 128), "gemma2": (16, 8, 256), "gemma3": (8, 4, 256)}
ALL_HEADS = {**HEADS, **PORTABLE_HEADS}
ROTARY_NORMS = ("0.6b", "8b", "32b", "30b-a3b", "gemma3")  # whose query and key heads are normed


def few_portable_cases(target: str) -> list[KernelCase]:
    """Those that tell most beside an engine's step: each head_dim, small pages with a window and a soft-cap."""
    case = functools.partial(portable_case, target)
    return [
        case("smollm2", "mixed"),
        case("phi3", "mixed", page_size=32, dtype="float16"),
        case("0.6b", "mixed", page_size=16, **WINDOW_AND_CAP),
        case("gemma2", "mixed", page_size=16, **WINDOW_AND_CAP),
        experts_case(EXPERTS_TOKENS[0], *EXPERTS_30B_A3B[0], backend="mosaic_portable"),
        *(rotary_case(target, heads) for heads in ("0.6b", "smollm2", "phi3", "gemma3")),
    ]


def portable_cases(target: str) -> list[KernelCase]:
    """Every case of the portable kernels on a target; those of `few_portable_cases` first."""
    case = functools.partial(portable_case, target)
    cases = [
        *few_portable_cases(target),
        *(case(name, shape) for name in (*HEADS, *PORTABLE_HEADS) for shape in ("decode", "mixed")),
        *(case("8b", "mixed", page_size=page_size, dtype="float16") for page_size in (16, 32, 64, 128)),
        *(case(name, "drafts") for name in ("8b", "phi3", "gemma3")),
        *(
            case(name, shape, page_size=page_size, **WINDOW_AND_CAP)
            for name in ("smollm2", "phi3", "8b", "gemma2")
            for page_size in (16, 128)
            for shape in ("decode", "mixed")
        ),
        *(experts_case(T, *matrix, backend="mosaic_portable") for T in EXPERTS_TOKENS for matrix in EXPERTS_30B_A3B),
        *(rotary_case(target, heads, dtype="float16") for heads in ("8b", "32b", "30b-a3b", "smollm2", "llama2", "gemma2")),
    ]
    return list({case.name: case for case in cases}.values())


def portable_case(
    target: str, heads: str, shape: str, *, page_size: int = 64, dtype: str = "bfloat16", **options: Any
) -> KernelCase:
    """Ragged paged attention by the portable kernel, of one head shape in one bucket."""
    from kernels import gpu
    from kernels.ragged_paged_attention.mosaic_portable.tiles import PortablePlanner

    with gpu.assume(device_of(target)):
        planner = PortablePlanner.make(**_planned(heads, shape, options))
    case = _case(planner, heads, shape, page_size, dtype, options, backend="mosaic_portable")
    kernels = (PORTABLE_ATTENTION, PORTABLE_JOIN) if planner.shape.num_slots else (PORTABLE_ATTENTION,)
    return replace(case, name=f"portable {case.name}", kernels=kernels, same_bits="")


def attention_case(
    heads: str, shape: str, num_sms: int, device_kind: str, *, page_size: int = 64, dtype: str = "bfloat16", **options: Any
) -> KernelCase:
    """Ragged paged attention by the Hopper kernel, of one head shape in one bucket."""
    from kernels.ragged_paged_attention.mosaic_sm90.planner import Planner
    from kernels.ragged_paged_attention.mosaic_sm90.tiles import choose_tiles

    (N, K, H), max_q_len = HEADS[heads], SHAPES[shape][2]
    tiles = choose_tiles(head_dim=H, group=N // K, max_q_len=max_q_len, device_kind=device_kind)
    planner = Planner.make(**_planned(heads, shape, options), num_ctas=num_sms, tiles=tiles)
    return _case(planner, heads, shape, page_size, dtype, options, backend="mosaic_sm90")


def _planned(heads: str, shape: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a planner of either kernel is made from."""
    (N, K, H), (T, S, max_q_len) = ALL_HEADS[heads], SHAPES[shape]
    return {
        "num_tokens": T,
        "num_seqs": S,
        "max_q_len": max_q_len,
        "num_query_heads": N,
        "num_kv_heads": K,
        "head_dim": H,
        "max_kv_len": _MAX_KV_LEN,
        "split_q_len": max_q_len if shape == "drafts" else 1,
        "sliding_window": options.get("sliding_window"),
    }


def _case(planner: Any, heads: str, shape: str, page_size: int, dtype: str, options: dict[str, Any], *, backend: str) -> KernelCase:
    """Attention of a backend on work that was planned; it calls both kernels for Hopper."""
    from kernels.ragged_paged_attention import ragged_paged_attention

    (N, K, H), (T, S, max_q_len) = ALL_HEADS[heads], SHAPES[shape]

    def function(q, kv_pages, page_table, cu_q_lens, kv_lens, packed):
        return ragged_paged_attention(
            q, kv_pages, page_table, cu_q_lens, kv_lens,
            max_q_len=max_q_len, backend=backend, work=planner.work(packed), **options,
        )  # fmt: skip

    args = _attention_args(T, S, N, K, H, page_size, dtype, planner.size)
    what = _describe(heads, N, K, H, page_size, dtype, options)
    return KernelCase(f"attention {shape} {what}", function, args, (ATTENTION, JOIN), what)


def _attention_args(T: int, S: int, N: int, K: int, H: int, page_size: int, dtype: str, work: int) -> tuple[Any, ...]:
    import jax

    def array(*shape: int, dtype: Any = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = array(_NUM_PAGES, 2, K, page_size, H, dtype=dtype)
    return (array(T, N, H, dtype=dtype), pages, array(S, _MAX_KV_LEN // page_size), array(S + 1), array(S), array(work))


def _describe(heads: str, N: int, K: int, H: int, page_size: int, dtype: str, options: dict[str, Any]) -> str:
    text = "".join(f" {name}={value}" for name, value in options.items())
    return f"{heads} ({N}/{K}x{H}, page {page_size}, {dtype}{text})"


def fused_case(name: str, num_tokens: int) -> KernelCase:
    """One of FUSED."""
    import jax

    from kernels.fused_matmul import fused_matmul

    D, F, step = FUSED[name]

    def product(x, w, other):
        beside = {"residual": other} if step == "residual" else {"scale": other, "eps": 1e-6, "gated": step == "gate"}
        return fused_matmul(x, w, **beside, backend="mosaic_sm90")

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    other = array(num_tokens, F) if step == "residual" else array(D)
    case = f"fused matmul {name} {D}x{F} T={num_tokens} ({step})"
    same_bits = f"fused matmul with {'no norm' if step == 'residual' else 'a norm'}"
    return KernelCase(case, product, (array(num_tokens, D), array(D, F), other), (FUSED_MATMUL,), same_bits)


def experts_case(num_tokens: int, in_dim: int, out_dim: int, backend: str = "mosaic_sm90") -> KernelCase:
    """One grouped matmul of 30B-A3B's experts, 8 of 128 a token, with its plan on the device; that of gates and what they gate with
    the gate, where the backend does both at once."""
    import jax
    import jax.numpy as jnp

    from kernels.grouped_matmul import gather_rows, grouped_matmul, plan_groups

    gated = (in_dim, out_dim) == EXPERTS_30B_A3B[0] and backend == "mosaic_sm90"

    def experts(x, group_ids, w, num_real):
        groups = plan_groups(group_ids, [w], num_tokens=num_real, backend=backend)
        return grouped_matmul(gather_rows(x, groups), w, groups, gated=gated)

    S = jax.ShapeDtypeStruct
    w = S((128, in_dim, out_dim), jnp.bfloat16)
    args = (S((num_tokens, in_dim), jnp.bfloat16), S((num_tokens, 8), jnp.int32), w, S((), jnp.int32))
    prefix, kernel = ("", EXPERTS) if backend == "mosaic_sm90" else ("portable ", PORTABLE_EXPERTS)
    name = f"{prefix}experts 30b-a3b {in_dim}x{out_dim}"
    return KernelCase(f"{name} T={num_tokens}", experts, args, (LAYOUT, kernel), name)


def rotary_case(target: str, heads: str, *, dtype: str = "bfloat16") -> KernelCase:
    """The rotary write of a mixed bucket, with norms where the model of these heads has them."""
    import jax

    from kernels import gpu
    from kernels.rotary_write import rotary_write

    (N, K, H), (T, *_) = ALL_HEADS[heads], SHAPES["mixed"]
    norms = 2 if heads in ROTARY_NORMS else 0

    def function(qkv, kv_pages, cos, sin, slot_mapping, *scales):
        write = functools.partial(rotary_write, qkv, kv_pages, cos, sin, slot_mapping, eps=1e-6, backend="mosaic")
        with gpu.assume(device_of(target)):
            return write(q_scale=scales[0], k_scale=scales[1]) if scales else write()

    def array(*shape: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    angles = array(T, H // 2, dtype="float32")
    args = (array(T, N + 2 * K, H), array(_NUM_PAGES, 2, K, 64, H), angles, angles, array(T, dtype="int32"))
    name = f"rotary write {_describe(heads, N, K, H, 64, dtype, {'norm': bool(norms)})}"
    return KernelCase(name, function, (*args, *[array(H)] * norms), (ROTARY_WRITE,))
