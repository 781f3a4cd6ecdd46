"""Batches of attention that a card is asked to compute, and what the reference makes of them.

A few of the kernel's own cases, those with the most ways to go wrong, and large ones: many sequences whose KV is split over the
SMs. For a model, decodes, a mixed step and drafts in its own heads, page size and dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kernels.backends import Backend
from kernels.ragged_paged_attention import plan_work, ragged_paged_attention
from kernels.ragged_paged_attention.cases import CASES, HEADS, TOLERANCE, Batch, Case, Heads, build

_NAMED = {case.name: case for case in CASES}
# Few, since each is compiled. Sequences without queries, and lengths around a page's boundaries; small and large pages; a window
# with a soft cap, whose tiles pass by a last block; decodes with a window, whose pages before are gone; nothing to do at all.
_HARD = (
    *("edges-qwen3_0.6b-bfloat16", "page_128-float16", "gpu-pass_by-window-soft_cap", "window_200-decodes-bfloat16"),
    "gpu-nothing",
)
_SMALL = ("gpu-decodes-smollm2", "gpu-drafts")


def _decodes(num_seqs: int, kv_len: int) -> tuple[tuple[int, int], ...]:
    """Of one long sequence and others of uneven lengths, so that some are split."""
    return tuple((1, kv_len if i == 0 else kv_len * (3 + i % 5) // 8 - i % 3) for i in range(num_seqs))


def _mixed(num_seqs: int, kv_len: int) -> tuple[tuple[int, int], ...]:
    """Decodes beside a chunk in the middle of a prompt and a whole short one."""
    return (*_decodes(num_seqs, kv_len), (150, kv_len // 2), (0, 0), (37, 37))


_LARGE = (
    Case("large-decodes", _decodes(32, 2000), Heads(16, 4, 128), 64, "bfloat16", max_q_len=1),
    Case("large-mixed", _mixed(8, 1500), HEADS["smollm2_135m"], 64, "bfloat16"),
)


@dataclasses.dataclass(frozen=True)
class AttentionCheck:
    """A case of the kernel's. split_q_len: most query tokens of a sequence whose KV may be split, 1 + drafts."""

    tolerances: ClassVar[Mapping[str, float]] = TOLERANCE
    case: Case
    split_q_len: int = 1

    def lacks(self, row: Backend) -> str | None:
        """As the row's own `lacks`."""
        N, K, H = self.case.heads
        shapes = {"num_query_heads": N, "num_kv_heads": K, "head_dim": H, "page_size": self.case.page_size}
        return row.functions.lacks(**shapes, dtype=self.case.dtype)

    def make(self) -> Batch:
        """See cases.build."""
        return build(self.case)

    def program(self, row: Backend, batch: Batch) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
        """[T, N, H] as a step computes them: planned before, on the host where the row says so."""
        T, S = batch.q.shape[0], batch.kv_lens.shape[0]
        max_q_len = min(self.case.max_q_len or T, T)
        packed, planner = jnp.zeros(1, jnp.int32), None
        if row.plans_on_host:
            N, K, H = self.case.heads
            planner = row.functions.make_planner(
                num_tokens=T,
                num_seqs=S,
                max_q_len=max_q_len,
                num_query_heads=N,
                num_kv_heads=K,
                head_dim=H,
                max_kv_len=batch.page_table.shape[1] * self.case.page_size,
                sliding_window=self.case.sliding_window,
                split_q_len=self.split_q_len,
            )
            packed = jnp.asarray(planner.plan(np.diff(np.asarray(batch.cu_q_lens)), np.asarray(batch.kv_lens)))

        def attend(packed, q, kv_pages, page_table, cu_q_lens, kv_lens):
            if planner is not None:
                work = planner.work(packed)
            else:
                work = plan_work(cu_q_lens, kv_lens, num_tokens=T, max_q_len=max_q_len, backend=row.name)
            options = self.case.options | {"max_q_len": max_q_len}
            return ragged_paged_attention(q, kv_pages, page_table, cu_q_lens, kv_lens, backend=row.name, work=work, **options)

        return attend, (packed, *batch.arrays)

    def owned(self, values: np.ndarray) -> np.ndarray:
        """[rows, N, H] of the query rows that some sequence has."""
        return values[: sum(q_len for q_len, _ in self.case.seqs)]

    def reference(self, batch: Batch) -> np.ndarray:
        """f32 [rows, N, H]."""
        return self.owned(reference(batch.arrays, self.case.options))

    def error(self, got: np.ndarray, want: np.ndarray) -> float:
        """The larger of two. One is half the largest difference over 1 + |value|, which a single wrong value shows: half, since a
        kernel may round the weights to the dtype before they meet the values. The other is the difference of all values together,
        relative to them, which shows what is wrong by little everywhere."""
        largest = float((np.abs(got - want) / (1 + np.abs(want))).max())
        return max(largest / 2, float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)))


def reference(arrays: tuple[jax.Array, ...], options: Mapping[str, Any]) -> np.ndarray:  # f32 [T, N, H]
    """What the specification makes of a batch: in float32, with matmuls in full precision on whatever device this is.

    arrays: the positional arguments of `ragged_paged_attention`. options: its keyword arguments.
    """
    q, kv_pages, *rest = arrays
    with jax.default_matmul_precision("highest"):
        attend = jax.jit(lambda *args: ragged_paged_attention(*args, backend="reference", **options))
        return np.asarray(attend(q.astype(jnp.float32), kv_pages.astype(jnp.float32), *rest))


def checks(shapes: Mapping[str, Any] | None, few: bool) -> list[AttentionCheck]:
    """The batches that every card is asked, or those of a model.

    shapes: num_query_heads, num_kv_heads, head_dim, page_size, dtype, sliding_windows (a list, None for none) and num_drafts; where
    a model drafts that attends otherwise, "draft" with its num_query_heads, num_kv_heads, head_dim and sliding_windows.
    few: what an interpreter can run in seconds.
    """
    if shapes is not None:
        of_draft = _own({**shapes, **shapes["draft"]}, few, "the draft") if "draft" in shapes else []
        return _own(shapes, few) + of_draft
    if few:
        return [AttentionCheck(_NAMED[name], _NAMED[name].max_q_len or 1) for name in _SMALL]
    drafts = _NAMED["drafts-bfloat16"]
    return [*(AttentionCheck(_NAMED[name]) for name in _HARD), AttentionCheck(drafts, 5), *map(AttentionCheck, _LARGE)]


def _own(shapes: Mapping[str, Any], few: bool, whose: str = "the model") -> list[AttentionCheck]:
    heads = Heads(shapes["num_query_heads"], shapes["num_kv_heads"], shapes["head_dim"])
    page_size, q_len = shapes["page_size"], 1 + shapes["num_drafts"]
    made = []
    for window in shapes["sliding_windows"]:
        decodes, mixed = (((1, 70), (1, 17)), ((1, 33), (9, 40))) if few else (_decodes(12, 1200), _mixed(4, 1200))
        batches = [("decodes", decodes, 1), ("mixed", mixed, None)]
        if q_len > 1:
            batches.append(("drafts", tuple((min(q_len, kv_len), kv_len) for _, kv_len in decodes), q_len))
        for what, seqs, max_q_len in batches:
            name = f"{what} of {whose}" + ("" if window is None else f", window {window}")
            case = Case(name, seqs, heads, page_size, shapes["dtype"], sliding_window=window, max_q_len=max_q_len)
            made.append(AttentionCheck(case, q_len if max_q_len != 1 else 1))
    return made
