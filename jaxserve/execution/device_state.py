"""What the device keeps from step to step, as one value that programs take and return.

Owns its shapes, how it begins, and the update of what has no room in a step's own upload. Knows nothing of hosts or requests.

Every program takes a part of `DeviceState` whole, returns that part anew, and its buffers are donated: a body the state itself, a
head and an update its `rows`. Fields that a program only passes on keep their buffers and cost no command. Scoring reads
`step_hidden`. A head takes no KV pages, because each array of a call costs the host about a microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.sampling.edit_rows import EditLayout
from jaxserve.speculative.proposer import NO_DRAFT, Proposer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """What speculation keeps of each sequence row: S = max_num_seqs rows, K drafts each."""

    drafts: jax.Array  # i32[S, K]: what is proposed to follow each row's last token
    probs: jax.Array | None  # f32[S, K, V]: what each was drawn with; None: nothing draws them, or nobody asks
    proposer: Any  # a pytree of the proposer's own


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """What the device keeps of each sequence row, S = max_num_seqs of them. At a row that nobody owns anything may stand.

    Of a pipeline's stages the last one has last_tokens, history and edits.
    """

    page_table: jax.Array  # i32[S, P]
    num_computed: jax.Array  # i32[S]: tokens whose KV is written
    last_tokens: jax.Array | None  # i32[S]: the last sampled token
    history: jax.Array | None  # i32[S, max_model_len]: token ids, of rows that look back on them
    edits: jax.Array | None  # i32[S, columns of edit_rows]
    drafts: DraftState | None  # None: speculation is off


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """All that the device keeps from step to step, beside the weights."""

    kv_pages: list[jax.Array]  # a layer: [num_pages, 2, K, page_size, H]
    step_hidden: jax.Array | None  # [tokens of the largest bucket, D]: hidden rows of the last step's tokens; of a last stage
    rows: RowState


def abstract_state(
    config: ResolvedConfig,
    proposer: Proposer | None,
    num_devices: int = 1,
    *,
    num_layers: int | None = None,
    is_last: bool = True,
) -> DeviceState:
    """The shapes and dtypes of an engine's state; nothing is allocated. num_devices: over which the KV heads are cut. num_layers,
    is_last: of a pipeline's stage; its layers, and whether it is the last one."""
    struct: Any = jax.ShapeDtypeStruct
    num_seqs, layout = config.scheduler.max_num_seqs, EditLayout(config.scheduler.max_model_len, config.model.vocab_size)
    drafts = None
    if proposer is not None:
        assert config.speculative is not None
        shape, probs = (num_seqs, proposer.num_drafts), None
        if proposer.draws and config.speculative.acceptance == "rejection":
            probs = struct((*shape, config.model.vocab_size), jnp.float32)
        drafts = DraftState(struct(shape, jnp.int32), probs, jax.eval_shape(proposer.init_state))
    rows = RowState(
        page_table=struct((num_seqs, config.max_pages_per_seq), jnp.int32),
        num_computed=struct((num_seqs,), jnp.int32),
        last_tokens=struct((num_seqs,), jnp.int32) if is_last else None,
        history=struct((num_seqs, layout.max_model_len), jnp.int32) if is_last else None,
        edits=struct((num_seqs, layout.num_columns), jnp.int32) if is_last else None,
        drafts=drafts,
    )
    pages = config.pages
    all_heads = replace(pages, num_kv_heads=pages.num_kv_heads * num_devices)
    return DeviceState(
        kv_pages=[struct(all_heads.layer(config.cache.num_pages), pages.dtype)] * (num_layers or pages.num_layers),
        step_hidden=struct((config.plan.buckets[-1].tokens, config.model.hidden_size), pages.dtype) if is_last else None,
        rows=rows,
    )


def new_state(abstract: DeviceState, proposer: Proposer | None) -> DeviceState:
    """A state of these shapes (and shardings) on the device: zeros, no drafts, and the proposer's own as it begins."""
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), replace_rows(abstract, drafts=None))
    shapes = abstract.rows.drafts
    if shapes is None:
        return state
    assert proposer is not None
    probs = None if shapes.probs is None else jnp.zeros(shapes.probs.shape, shapes.probs.dtype, device=shapes.probs.sharding)
    nothing = jnp.full(shapes.drafts.shape, NO_DRAFT, jnp.int32, device=shapes.drafts.sharding)
    drafts = DraftState(nothing, probs, proposer.init_state())
    return replace_rows(state, drafts=drafts)


def replace_rows(state: DeviceState, **changes: Any) -> DeviceState:
    """The state with these fields of its rows replaced."""
    return replace(state, rows=replace(state.rows, **changes))


def update_rows(
    rows: RowState,
    page_updates: jax.Array,  # i32[U, 3]: row, column, page
    edit_row: jax.Array,  # i32[1 + max_model_len + columns], as EditLayout.pack makes it
) -> RowState:
    """Writes what has no room in a step's own upload: page-table entries, and one row of history and edits at a request's
    admission. Rows past the end change nothing. A stage that keeps neither history nor edits takes the page-table entries."""
    page_table = rows.page_table.at[page_updates[:, 0], page_updates[:, 1]].set(page_updates[:, 2], mode="drop")
    if rows.history is None or rows.edits is None:
        return replace(rows, page_table=page_table)
    row, end = edit_row[0], 1 + rows.history.shape[1]
    return replace(
        rows,
        page_table=page_table,
        history=rows.history.at[row].set(edit_row[1:end], mode="drop"),
        edits=rows.edits.at[row].set(edit_row[end:], mode="drop"),
    )
