"""Where a proposer that attends keeps its keys and values: pages beside the target's, under the same numbers.

Owns the slots of tokens that a body has run, which are the target's, and of drafts, which have no page yet. These go into pages of
the row's own behind the pool: the last page that a sequence has begun is copied there, and the drafts follow it. So attention reads
one page table for both, and what was drafted and refused leaves no trace in pages that others may share.

Which positions the drafts come to is known on the device alone. So there their attention is planned, also for a kernel whose other
work the host plans: once, for all drafts of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.batching.context import StepContext
from jaxserve.sampling.sampler import SamplingRows
from jaxserve.speculative.proposer import Seen
from kernels.ragged_paged_attention import plan_work


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LastRows:
    """Of the rows of a head those that end a sequence, B of them, padding behind."""

    order: jax.Array  # i32[B]: which rows of the head
    seq_rows: jax.Array  # i32[B]: the sequence row of each; S for padding
    positions: jax.Array  # i32[B]: of the token just sampled; 0 for padding
    tokens: jax.Array  # i32[B]: that token
    sampling: SamplingRows  # of B rows
    is_real: jax.Array  # bool[B]
    num_real: jax.Array  # i32[]

    @classmethod
    def of(cls, seen: Seen) -> LastRows:
        S = len(seen.history)
        order = jnp.argsort(seen.seq_rows == S, stable=True)[: min(len(seen.seq_rows), S)].astype(jnp.int32)
        seq_rows = seen.seq_rows[order]
        positions = jnp.where(seq_rows < S, seen.num_tokens[order] - 1, 0)
        tokens = seen.history.at[seq_rows, positions].get(mode="fill", fill_value=0)
        is_real, sampling = seq_rows < S, jax.tree.map(lambda x: x[order], seen.sampling)
        return cls(order, seq_rows, positions, tokens, sampling, is_real, is_real.sum(dtype=jnp.int32))


@dataclass(frozen=True)
class DraftPages:
    """The pages of one proposer. backend: of its attention. planners: where that is planned on the host, what makes the planners of
    so many rows of one token each and of so many positions a row, by sliding window of its layers."""

    num_pages: int  # of the target's pool
    page_size: int
    max_num_seqs: int
    num_drafts: int
    backend: str
    planners: Callable[[int, int], dict[int | None, Any]] | None = None

    @property
    def pages_per_row(self) -> int:
        """That hold the last page begun and a row's drafts behind it."""
        return 1 + (self.page_size + self.num_drafts - 2) // self.page_size

    @property
    def total(self) -> int:
        """Pages of each layer."""
        return self.num_pages + self.max_num_seqs * self.pages_per_row

    def slots_of_body(self, context: StepContext) -> jax.Array:  # i32[T]
        """Where a body's tokens are kept in these pages."""
        slots, past = context.slot_mapping, self.num_pages * self.page_size
        return jnp.where(slots >= past, slots + (self.total - self.num_pages) * self.page_size, slots)

    def of_body(self, context: StepContext, work: Any = None) -> StepContext:
        """A body's context for these pages. work: the plan of their attention, where the host made one."""
        own = replace(context, slot_mapping=self.slots_of_body(context), backend=self.backend)
        if work is not None:
            return replace(own, work=work)
        return own if context.backend == self.backend else self.planned(own, len(own.slot_mapping))

    def planned(self, context: StepContext, num_tokens: int) -> StepContext:
        """The context with the plan of these pages' attention."""
        lens = context.cu_q_lens, context.kv_lens
        work = plan_work(*lens, num_tokens=num_tokens, max_q_len=context.max_q_len, backend=self.backend)
        return replace(context, work=work)

    def branch(
        self,
        kv_pages: list[jax.Array],  # a layer: [total, 2, K, page_size, H]
        page_table: jax.Array,  # i32[S, P]
        seq_rows: jax.Array,  # i32[B]
        positions: jax.Array,  # i32[B]: where each row's drafts begin
    ) -> tuple[list[jax.Array], jax.Array]:
        """The pages with each row's last one copied to its own, and a table i32[B, P + pages_per_row] that goes on there."""
        n, B = self.pages_per_row, len(seq_rows)
        table = page_table.at[seq_rows].get(mode="fill", fill_value=0)
        own = self.num_pages + jnp.arange(B, dtype=jnp.int32) * n  # by place in the step, as the drafts do not outlive it
        first = positions[:, None] // self.page_size
        last = jnp.take_along_axis(table, jnp.minimum(first, table.shape[1] - 1), 1)[:, 0]
        with jax.named_scope("branch_pages"):
            kv_pages = [kv.at[own].set(kv[last], unique_indices=True) for kv in kv_pages]
        column = jnp.arange(table.shape[1] + n, dtype=jnp.int32)[None]
        table = jnp.pad(table, ((0, 0), (0, n)))
        return kv_pages, jnp.where(column >= first, own[:, None] + jnp.minimum(column - first, n - 1), table)

    def plan_drafts(
        self,
        table: jax.Array,  # i32[B, P + pages_per_row]: what `branch` made
        is_real: jax.Array,  # bool[B]
        positions: jax.Array,  # i32[B]: where each row's drafts begin
    ) -> Any:
        """The plan that the attention of all drafts shares, as StepContext.work; None where each draft's is planned by itself."""
        if self.planners is None:
            return None
        B, P = table.shape
        least = jnp.where(is_real, positions + 1, 0)
        most = jnp.where(is_real, positions + self.num_drafts, 0)
        planners = self.planners(B, P * self.page_size)
        with jax.named_scope("plan_work"):
            return {str(window): planner.work(planner.plan_decodes(most, least)) for window, planner in planners.items()}

    def of_drafts(
        self,
        table: jax.Array,  # i32[B, P + pages_per_row]: what `branch` made
        is_real: jax.Array,  # bool[B]: the first ones
        positions: jax.Array,  # i32[B]
        work: Any,  # what `plan_drafts` made
    ) -> StepContext:
        """The context in which each row runs one token at its position."""
        B, size = len(positions), self.page_size
        row, num_real = jnp.arange(B, dtype=jnp.int32), jnp.sum(is_real, dtype=jnp.int32)
        slots = jnp.where(is_real, table[row, positions // size] * size + positions % size, self.total * size + row)
        lens = jnp.minimum(jnp.arange(B + 1, dtype=jnp.int32), num_real), jnp.where(is_real, positions + 1, 0)
        context = StepContext(positions, slots, table, *lens, num_real, work, max_q_len=1, backend=self.backend)
        return context if work is not None else self.planned(context, B)
