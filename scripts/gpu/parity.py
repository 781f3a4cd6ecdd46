"""Ragged paged attention on the card at hand: whether it computes what it should, and the same bits wherever it should.

Owns which batches are compared, with what, and in which order: what says most comes first, as time may run out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from scripts.gpu.attention import HEADS, PLAIN, SHAPES, Batch, Variant, backend
from scripts.gpu.figures import Figures

LARGE = [(128, 1, 777), (8, 5, 3000), (4, 700, 2100), (1, 4096, 4096)]  # sequences, q_len, kv_len; after 64 decodes of 4096
VARIANTS = [
    ("8b", (8, 5, 3000), Variant(split_q_len=5)),
    ("32b", (8, 5, 3000), Variant(split_q_len=5)),  # 40 rows: two consumers
    ("8b", (32, 1, 4096), Variant(sliding_window=1000)),
    ("8b", (2, 700, 2100), Variant(sliding_window=500, soft_cap=2.0)),  # registers of its own
    ("0.6b", (4, 700, 2100), Variant(soft_cap=2.0)),
    ("8b", (32, 1, 4096), Variant(dtype="float16")),
    ("8b", (2, 700, 2100), Variant(dtype="float16", page_size=16)),
    ("0.6b", (32, 1, 3000), Variant(page_size=16)),
    ("8b", (2, 700, 2100), Variant(page_size=128)),
    ("smollm2", (64, 1, 4096), PLAIN),
    ("smollm2", (2, 700, 2100), PLAIN),
    ("8b", (8, 5, 3000), Variant(sliding_window=1000, split_q_len=5)),
]
RAGGED = [(1, 5000), (4, 90), (200, 3000), (1, 1029)]
DRAFTS = [(5, 5000), (3, 90), (5, 3000), (1, 1029)]


def parity(figures: Figures) -> None:
    """One large batch and equal bits of every head shape, then what a batch may have besides, then every case of the kernel's own
    list against float64, then the other large ones. Large ones are held against the reference in float32."""
    if figures.dry_run:
        return _dry_parity(figures)

    def large(name: str, seqs: tuple[int, int, int], variant: Variant = PLAIN) -> None:
        title = f"parity {name} {seqs[0]} x {seqs[1]} of {seqs[2]}{variant}"
        figures.attempt(title, _parity_large, figures, title, name, *seqs, variant)

    def bits(name: str, seqs: list[tuple[int, int]], s: int, variant: Variant = PLAIN) -> None:
        title = f"bits {name}{variant}"
        figures.attempt(title, _bits, figures, title, name, seqs, s, variant)

    from kernels.ragged_paged_attention.cases import PORTABLE

    for name in HEADS:
        large(name, (64, 1, 4096))
    for name in HEADS:
        bits(name, RAGGED, 2)
    for name, seqs, variant in VARIANTS:
        large(name, seqs, variant)
    bits("8b", DRAFTS, 2, Variant(split_q_len=5))
    _parity_cases(figures)
    for name in HEADS:
        for seqs in LARGE:
            large(name, seqs)
    if backend() == "mosaic_sm90":  # the portable kernel's own head_dims, which this card serves by it
        _parity_cases(figures, PORTABLE, which="mosaic_portable")


def _dry_parity(figures: Figures) -> None:
    """The kernel itself, interpreted, then some cases on what a CPU has."""
    from kernels import gpu
    from kernels.ragged_paged_attention.cases import CASES, INTERPRETED, SPLIT

    drafts = Variant(page_size=16, sliding_window=40, soft_cap=2.0, split_q_len=2)
    with gpu.interpreted():
        figures.attempt("parity interpreted", _parity_large, figures, "parity interpreted", "tiny", 2, 1, 70, PLAIN)
        figures.attempt("drafts interpreted", _parity_large, figures, "drafts interpreted", "tiny", 1, 2, 70, drafts)
        figures.attempt("bits interpreted", _bits, figures, "bits interpreted", "tiny", [(1, 130), (3, 70)], 1, PLAIN)
        _parity_cases(figures, (INTERPRETED[0], SPLIT))  # as on a card: outside of jit, with no work list given
    _parity_cases(figures, CASES[:: len(CASES) // 3])
    figures.attempt("parity tiny", _parity_large, figures, "parity tiny", "tiny", 2, 1, 40, PLAIN)


def _parity_cases(figures: Figures, cases: Any = None, which: str | None = None) -> None:
    """Those of cases.CASES, or of `cases`, that a backend (None: `backend()`) is meant for; FAIL unless all of them passed."""
    from kernels.backends import ATTENTION
    from kernels.ragged_paged_attention.cases import CASES

    cases, which = CASES if cases is None else cases, which or backend()

    def lacks(case: Any) -> str | None:
        N, K, H = case.heads
        shapes = {"num_query_heads": N, "num_kv_heads": K, "head_dim": H, "page_size": case.page_size}
        return ATTENTION[which].functions.lacks(**shapes, dtype=case.dtype)

    meant = [case for case in cases if lacks(case) is None]
    for case in meant:
        figures.attempt(f"parity {which} {case.name}", _parity_case, figures, f"parity {which} {case.name}", case, which)
    passed = {row["name"] for row in figures.rows if row.get("verdict") == "pass"}
    count = sum(f"parity {which} {case.name}" in passed for case in meant)
    figures.record(
        f"parity cases passed on {which}",
        count,
        f"of {len(meant)} supported, {len(cases) - len(meant)} not meant for this backend",
        verdict="pass" if count == len(meant) > 0 else "FAIL",
    )


def _parity_case(figures: Figures, title: str, case: Any, which: str) -> None:
    from kernels.ragged_paged_attention import ragged_paged_attention
    from kernels.ragged_paged_attention.cases import TOLERANCE, build

    batch = build(case)
    # Outside of jit, where the Mosaic backend plans for itself from the lengths.
    got = np.asarray(ragged_paged_attention(*batch.arrays, backend=which, **case.options), np.float64)
    want = dense_attention(case, batch)
    # Mosaic rounds the weights to the dtype before they meet the values.
    tolerance = TOLERANCE[case.dtype] * (2 if which.startswith("mosaic") else 1)
    got = got[: len(want)]  # rows that nobody owns are not written
    error = np.abs(got - want) / (1 + np.abs(want))
    worst = float(error.max()) if error.size else 0.0
    verdict = "pass" if np.isfinite(got).all() and worst <= tolerance else "FAIL"
    figures.record(title, worst, "error over 1 + |value|", verdict=verdict, tolerance=tolerance)


def dense_attention(case: Any, batch: Any) -> np.ndarray:
    """float64[rows, N, H] of a case's real rows, from its keys and values without pages."""
    N, K, H = case.heads
    out = []
    for (q_len, kv_len), keys, values, start in zip(case.seqs, batch.keys, batch.values, np.asarray(batch.cu_q_lens), strict=False):
        q = np.asarray(batch.q[start : start + q_len], np.float64).reshape(q_len, K, N // K, H)
        k, v = np.asarray(keys, np.float64), np.asarray(values, np.float64)
        scale = H**-0.5 if case.scale is None else case.scale
        x = np.einsum("qkgh,tkh->kgqt", q, k) * scale
        if case.soft_cap is not None:
            x = case.soft_cap * np.tanh(x / case.soft_cap)
        distance = np.arange(kv_len - q_len, kv_len)[:, None] - np.arange(kv_len)[None, :]
        seen = (distance >= 0) & (distance < (case.sliding_window or kv_len + 1))
        x = np.where(seen, x, -np.inf)
        weights = np.exp(x - x.max(-1, keepdims=True)) if q_len else x
        weights = weights / weights.sum(-1, keepdims=True) if q_len else x
        out.append(np.einsum("kgqt,tkh->qkgh", weights, v).reshape(q_len, N, H))
    return np.concatenate(out)


def _parity_large(figures: Figures, title: str, name: str, S: int, q_len: int, kv_len: int, variant: Variant) -> None:
    """Relative error of the whole output against the reference with full-precision matmuls; the same bits twice."""
    import jax.numpy as jnp

    from kernels.qualification.attention import reference
    from kernels.qualification.checks import num_differing

    seqs = [(q_len, kv_len - i % 3) for i in range(S)]
    batch = Batch.make(SHAPES[name], seqs, num_pages=S * -(-kv_len // variant.page_size) + 1, variant=variant)
    program = batch.program()
    got, again = (np.asarray(program().astype(jnp.float32)) for _ in range(2))
    want = reference((batch.q, *batch.arrays), variant.options)
    error, same = float(np.linalg.norm(got - want) / np.linalg.norm(want)), num_differing(got, again) == 0
    figures.record(title, error, "relative error", verdict="pass" if error < 1e-2 and same else "FAIL", same_twice=same)


def _bits(figures: Figures, title: str, name: str, seqs: list[tuple[int, int]], s: int, variant: Variant) -> None:
    """Rows that must be equal in every bit: a sequence in company and alone, sequence s's last row in a prefill tile and as a
    decode, a batch planned for the lengths it has and for longer ones; of drafts, whether or not their KV may be split."""
    import jax.numpy as jnp

    def run(batch: Batch, planned_kv_lens: np.ndarray | None = None) -> np.ndarray:
        return np.asarray(batch.program(planned_kv_lens=planned_kv_lens)().astype(jnp.float32))

    num_pages = sum(-(-kv_len // variant.page_size) for _, kv_len in seqs)
    batch = Batch.make(SHAPES[name], seqs, num_pages=num_pages, variant=variant)
    whole, ends = run(batch), np.cumsum([q_len for q_len, _ in seqs])
    same = {}
    for i, (q_len, _) in enumerate(seqs):
        same[f"{i} alone"] = (run(batch.part(i, q_len)) == whole[ends[i] - q_len : ends[i]]).all()
    same["decode of a tile's row"] = (run(batch.part(s, 1)) == whole[ends[s] - 1 : ends[s]]).all()
    kv_lens = np.minimum(batch.lens[1] + 70, batch.arrays[1].shape[1] * variant.page_size)
    same["planned longer"] = (run(batch, kv_lens) == whole).all()
    if variant.split_q_len > 1:
        same["not split"] = (run(replace(batch, variant=replace(variant, split_q_len=1))) == whole).all()
    differ = [what for what, equal in same.items() if not equal]
    figures.record(title, len(same) - len(differ), f"of {len(same)}", verdict="FAIL" if differ else "pass", differ=differ)
