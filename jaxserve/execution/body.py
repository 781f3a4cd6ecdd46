"""The body of a step: embed -> layers -> the hidden rows that a head samples from.

A body's shape is a bucket. Owns how it unpacks a step's upload with the state on the device, and what it hands to the head. Knows
nothing of hosts, requests or compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batching.context import StepContext
from jaxserve.batching.layout import FROM_DEVICE, StepLayout
from jaxserve.buckets.plan import Bucket
from jaxserve.execution.device_state import DeviceState, RowState
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.models.row_tiles import RowTiles
from jaxserve.parallel.shard import Shard
from jaxserve.sampling.rows import POSITION
from jaxserve.speculative.proposer import NO_DRAFT, BodyReader, Ran
from kernels.ragged_paged_attention import plan_work


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadInputs:
    """What a body hands to its head; the same shapes for every bucket. R: the plan's max_head_rows."""

    hidden: jax.Array  # [R, D]: what each logits row is made of
    seq_rows: jax.Array  # i32[R]: the sequence row that each logits row samples for; max_num_seqs for padding
    tokens: jax.Array | None  # i32[R]: the token before the one that it samples; None where nothing is drafted
    sampling: jax.Array  # i32[R, F]: the columns of sampling/rows.py, POSITION filled in from the device's own state


def body(
    functions: ModelFunctions,
    layout: StepLayout,
    backend: str,
    reader: BodyReader | None,  # the proposer, if it reads bodies
    weights: Sequence[jax.Array],
    state: DeviceState,
    packed: jax.Array,  # i32[layout.size]
    hidden: jax.Array | None = None,  # [T, D]: of the stage before, if there is one
    *,
    is_read: bool = True,
) -> tuple[DeviceState, HeadInputs | jax.Array]:
    """Runs one bucket: writes the KV of its tokens, and brings the rows' page tables and lengths up to date. A stage of a pipeline
    runs its own layers; but for the last one it returns the hidden rows [T, D] of all tokens, for the next. is_read: whether the
    reader reads; otherwise it skips the step, and `weights` has none of its own."""
    names, num_weights = list(layout.fields), len(functions.body_indices)
    weights, own_weights = weights[:num_weights], weights[num_weights:]  # of the model, of what drafts for it
    with jax.named_scope("unpack"):
        # Unpacked once, behind a barrier: commands of a CUDA graph whose buffers move are recorded again.
        fields = dict(zip(names, lax.optimization_barrier(tuple(layout.unpack(packed)[n] for n in names)), strict=True))
        fixed_tiles = isinstance(functions.map_rows, RowTiles)
        given = layout, backend, fixed_tiles, fields, state.kv_pages[0].shape[0], state.rows, functions.shard
        context, seq, positions, rows = _context(*given)
        tokens = _tokens(fields, seq, state.rows) if functions.is_first else None
    drafts = rows.drafts
    model = functions.module(functions.body_indices, weights)
    embedded = tokens if tokens is None or drafts is None else jnp.maximum(tokens, 0)  # a draft may be none
    x: Any = hidden if embedded is None else model.embed(embedded, functions.shard)
    # Behind a barrier, or every layer's fusions compute the angles and look up the slots again.
    rope, slot_mapping = lax.optimization_barrier((functions.map_rows(model.rope, context.positions), context.slot_mapping))
    context = replace(context, slot_mapping=slot_mapping)
    written, inputs = [], {}
    with jax.named_scope("layers"):
        for i, kv in zip(functions.layers, state.kv_pages, strict=True):
            if reader is not None and is_read and i in reader.hidden_layers:
                inputs[i] = x
            x, kv = functions.layer(model.layers[i], x, rope, kv, context)
            written.append(kv)
    if not functions.is_last:
        return DeviceState(written, state.step_hidden, rows), x
    with jax.named_scope("gather_rows"):
        at = fields["logits_tokens"]
        sampling = fields["sampling"].at[:, POSITION].set(positions[at] + 1)
        assert state.step_hidden is not None
        step_hidden = lax.dynamic_update_slice(state.step_hidden, x, (0, 0))  # in place: the program that scores has one shape
        before = None if tokens is None or drafts is None else tokens[at]
        head_inputs = HeadInputs(x[at], fields["logits_rows"], before, sampling)
    if reader is not None:
        assert drafts is not None and embedded is not None
        with jax.named_scope("read_body"):
            if not is_read:
                own = reader.skip_body(drafts.proposer, fields["seq_rows"], context)
                return DeviceState(written, step_hidden, replace(rows, drafts=replace(drafts, proposer=own))), head_inputs
            read = jnp.concatenate([inputs[i] for i in reader.hidden_layers], -1) if reader.hidden_layers else None
            work = {str(window): planner.work(fields[name]) for window, (name, planner) in layout.draft_work.items()}
            ran = Ran(embedded, fields["seq_rows"], context, x, read, at, work or None)
            own = reader.read_body(own_weights, drafts.proposer, ran)
        rows = replace(rows, drafts=replace(drafts, proposer=own))
    return DeviceState(written, step_hidden, rows), head_inputs


def _context(
    layout: StepLayout,
    backend: str,
    fixed_tiles: bool,  # of the attention
    fields: dict[str, jax.Array],  # of the upload
    num_pages: int,
    state: RowState,
    shard: Shard,
) -> tuple[StepContext, jax.Array, jax.Array, RowState]:
    """Where each token stands. Returns (StepContext, of every token its sequence and its position i32[T], the state with page
    tables and lengths up to date)."""
    part, page_size = layout.bucket.part(layout.num_groups), layout.page_size
    rows, q_lens = fields["seq_rows"], fields["q_lens"]
    update = fields["page_updates"]
    page_table = state.page_table.at[update[:, 0], update[:, 1]].set(update[:, 2], mode="drop")
    known = state.num_computed.at[rows].get(mode="fill", fill_value=0)
    starts = jnp.where(fields["starts"] < 0, known, fields["starts"])
    kv_lens = jnp.where(q_lens > 0, starts + q_lens, 0)
    num_computed = state.num_computed.at[rows].set(kv_lens, mode="drop")

    own, seq, positions, num_tokens = _places(part, q_lens, starts, shard)
    table = page_table.at[shard.own_rows(rows)].get(mode="fill", fill_value=0)
    kv_lens = shard.own_rows(kv_lens)
    page = table[own.seq, own.positions // page_size]
    t = jnp.arange(part.tokens, dtype=jnp.int32)
    slots = jnp.where(own.real, page * page_size + own.positions % page_size, num_pages * page_size + t)
    if layout.planners:
        lists = {name: fields[name] if shard.groups == 1 else shard.own_rows(fields[name])[0] for name, _ in layout.work.values()}
        work = {str(window): planner.work(lists[name]) for window, (name, planner) in layout.work.items()}
    else:
        shape = {"num_tokens": part.tokens, "max_q_len": part.max_q_len}
        work = plan_work(own.cu_q_lens, kv_lens, **shape, backend=backend, fixed_tiles=fixed_tiles)
    context = StepContext(
        own.positions, slots, table, own.cu_q_lens, kv_lens, num_tokens, work, max_q_len=part.max_q_len, backend=backend
    )
    return context, seq, positions, replace(state, page_table=page_table, num_computed=num_computed)


class _Places(NamedTuple):
    """Where T tokens stand, those of S sequences one after the other."""

    cu_q_lens: jax.Array  # i32[S+1]
    seq: jax.Array  # i32[T]
    real: jax.Array  # bool[T]: not padding
    positions: jax.Array  # i32[T]

    @classmethod
    def of(cls, T: int, q_lens: jax.Array, starts: jax.Array) -> _Places:  # i32[S] each
        cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
        t = jnp.arange(T, dtype=jnp.int32)
        seq = jnp.minimum((t[:, None] >= cu_q_lens[None, 1:]).sum(1, dtype=jnp.int32), len(q_lens) - 1)
        real = t < cu_q_lens[-1]
        return cls(cu_q_lens, seq, real, jnp.where(real, starts[seq] + t - cu_q_lens[seq], 0))


def _places(part: Bucket, q_lens: jax.Array, starts: jax.Array, shard: Shard) -> tuple[_Places, jax.Array, jax.Array, jax.Array]:
    """(the places of the tokens of this device's group, of every token its sequence and position, tokens of each group: i32[] or
    i32[groups]). part: the shape of a group."""
    if shard.groups == 1:
        own = _Places.of(part.tokens, q_lens, starts)
        return own, own.seq, own.positions, own.cu_q_lens[-1]
    shape = shard.groups, part.seqs
    each = jax.vmap(functools.partial(_Places.of, part.tokens))(q_lens.reshape(shape), starts.reshape(shape))
    firsts = jnp.arange(shard.groups, dtype=jnp.int32)[:, None] * part.seqs
    own = jax.tree.map(lambda x: shard.own_rows(x)[0], each)
    return own, (each.seq + firsts).reshape(-1), each.positions.reshape(-1), each.cu_q_lens[:, -1]


def _tokens(fields: dict[str, jax.Array], seq: jax.Array, state: RowState) -> jax.Array:  # i32[T]
    """The ids of the step's tokens: those that the host sent, and those that the device sampled or drafted. seq: of each token. To
    a pipeline, whose first stage samples none, the host sends all."""
    rows = fields["seq_rows"]
    if state.last_tokens is None:
        return fields["token_ids"]
    sampled = state.last_tokens.at[rows].get(mode="fill", fill_value=0)
    if state.drafts is None:
        from_device = sampled[seq]
    else:
        known_next = jnp.concatenate([sampled[:, None], state.drafts.drafts.at[rows].get(mode="fill", fill_value=NO_DRAFT)], 1)
        from_device = known_next[seq, jnp.maximum(FROM_DEVICE - fields["token_ids"], 0)]
    return jnp.where(fields["token_ids"] < 0, from_device, fields["token_ids"])
