"""The programs of a step, as plain functions to be compiled: body (embed -> layers -> hidden rows) and head (rows -> tokens); where
a prompt's own tokens are scored, also score (rows -> log-probabilities).

Owns what crosses between them and the device-resident state that both work on. A body's shape is a bucket; a head's is a number of
logits rows and whether log-probabilities are wanted, so that their counts add up instead of multiplying. Knows nothing of hosts,
requests or compilation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.batching.context import StepContext
from jaxserve.batching.layout import FROM_DEVICE, StepLayout
from jaxserve.models import Decoder, ModelConfig, named_leaves
from jaxserve.sampling import logit_edits, scoring
from jaxserve.sampling import sampler as sampling
from jaxserve.sampling.rows import POSITION
from jaxserve.speculative import rejection, verify
from jaxserve.speculative.proposer import NO_DRAFT, BodyReader, Proposer, Ran, Seen
from kernels.kv_cache import write_kv
from kernels.ragged_paged_attention import plan_work, ragged_paged_attention

HEAD_PATHS = ("final_norm/", "lm_head/")  # what the head reads of the model, beside a tied embedding


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows", "tokens", "sampling"], meta_fields=[])
@dataclass(frozen=True)
class HeadInputs:
    """What a body hands to its head beside the hidden rows; the same shapes for every bucket. R: the plan's max_head_rows."""

    rows: jax.Array  # i32[R]: the sequence row that each logits row samples for; max_num_seqs for padding
    tokens: jax.Array | None  # i32[R]: the token before the one that it samples; None where nothing is drafted
    sampling: jax.Array  # i32[R, F]: sampling_rows' columns, POSITION filled in from the device's own state


@functools.partial(jax.tree_util.register_dataclass, data_fields=["drafts", "probs", "proposer"], meta_fields=[])
@dataclass(frozen=True)
class DraftState:
    """What speculation keeps on the device."""

    drafts: jax.Array  # i32[max_num_seqs, K]: what is proposed to follow each row's last token
    probs: jax.Array | None  # f32[max_num_seqs, K, V]: what each was drawn with; None: nothing draws them, or nobody asks
    proposer: Any  # a pytree of the proposer's own


class ModelFunctions:
    """A Flax module taken apart once: its weights as a flat list of leaves, and functions from leaves.

    `nnx.jit` and graph definitions as arguments cost 0.5 to 11 ms of host time a call; flat leaves into a plain jit cost 0.1.
    """

    def __init__(self, model: Decoder, moe_backend: str = "auto"):
        self.moe_backend = moe_backend  # of kernels.grouped_matmul
        graphdef, state = nnx.split(model)
        self.graphdef: nnx.GraphDef[Decoder] = graphdef
        leaves, treedef = jax.tree.flatten(state)
        self.treedef: Any = treedef
        self.paths: list[str] = list(named_leaves(model))
        self.leaves = leaves
        self.model_config: ModelConfig = model.config
        self.dtype: Any = leaves[0].dtype  # of weights and activations
        self.num_bytes: int = sum(x.size * x.dtype.itemsize for x in leaves)  # abstract leaves have no nbytes
        self.abstract: list[jax.ShapeDtypeStruct] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        tied = model.lm_head is None
        head = HEAD_PATHS + (("embed_tokens/",) if tied else ())
        self.head_indices: list[int] = [i for i, p in enumerate(self.paths) if p.startswith(head)]
        self.body_indices: list[int] = [i for i, p in enumerate(self.paths) if not p.startswith(HEAD_PATHS)]
        self._layer_functions: dict[Any, Callable] = {}

    def module(self, indices: Sequence[int], leaves: Sequence[jax.Array]) -> Any:
        """The module with these leaves in place; the others are abstract and must not be used."""
        full: list[Any] = list(self.abstract)
        for i, leaf in zip(indices, leaves, strict=True):
            full[i] = leaf
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, full))

    def layer(self, layer: Any, x: jax.Array, rope: Any, kv: jax.Array, context: StepContext) -> tuple[jax.Array, jax.Array]:
        """One decoder layer over paged KV, as a call of an inner jit: layers of one structure are traced and lowered once."""
        graphdef, state = nnx.split(layer)
        leaves, treedef = jax.tree.flatten(state)
        if graphdef not in self._layer_functions:

            def run_layer(leaves, x, rope, kv, context):
                layer = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
                attend = functools.partial(_attend, layer.sliding_window, kv, context)
                return layer(x, rope, attend, num_tokens=context.cu_q_lens[-1], moe_backend=self.moe_backend)

            self._layer_functions[graphdef] = jax.jit(run_layer)
        return self._layer_functions[graphdef](leaves, x, rope, kv, context)


def _attend(sliding_window: int | None, kv: jax.Array, context: StepContext, q: jax.Array, k: jax.Array, v: jax.Array):
    """Writes this step's keys and values, then attends over the pages."""
    kv = write_kv(kv, k, v, context.slot_mapping)
    o = ragged_paged_attention(
        q,
        kv,
        context.page_table,
        context.cu_q_lens,
        context.kv_lens,
        sliding_window=sliding_window,
        max_q_len=context.max_q_len,
        backend=context.backend,
        work=context.work[str(sliding_window)] if isinstance(context.work, dict) else context.work,
    )
    return o, kv


def body(
    functions: ModelFunctions,
    layout: StepLayout,
    backend: str,
    leaves: Sequence[jax.Array],
    kv_pages: Sequence[jax.Array],  # a layer: [num_pages, 2, K, page_size, H]
    page_table: jax.Array,  # i32[max_num_seqs, P]
    num_computed: jax.Array,  # i32[max_num_seqs]: tokens of each row whose KV is written
    step_hidden: jax.Array,  # [tokens of the largest bucket, D]: hidden rows of one step's tokens
    last_tokens: jax.Array,  # i32[max_num_seqs]: last sampled token of each row
    packed: jax.Array,  # i32[layout.size]
    drafts: jax.Array | None = None,  # i32[max_num_seqs, K]; None: speculation is off
    own: Any = None,  # the proposer's state, if it is a reader
    *,
    reader: BodyReader | None = None,
) -> tuple[jax.Array, HeadInputs, list[jax.Array], jax.Array, jax.Array, jax.Array, Any]:
    """Runs one bucket. Returns (hidden [R, D], HeadInputs, kv_pages, page_table, num_computed, step_hidden, the reader's state)."""
    names = list(layout.fields)
    with jax.named_scope("unpack"):
        # Unpacked once, behind a barrier: commands of a CUDA graph whose buffers move are recorded again.
        fields = dict(zip(names, lax.optimization_barrier(tuple(layout.unpack(packed)[n] for n in names)), strict=True))
        context, tokens, page_table, num_computed = _context(
            layout, backend, fields, kv_pages[0].shape[0], page_table, num_computed, last_tokens, drafts
        )
    model = functions.module(functions.body_indices, leaves)
    embedded = tokens if drafts is None else jnp.maximum(tokens, 0)  # a draft may be none
    x = model.embed(embedded)
    # Behind a barrier, or every layer's fusions compute the angles and look up the slots again.
    rope, slot_mapping = lax.optimization_barrier((model.rope(context.positions), context.slot_mapping))
    context = dataclasses.replace(context, slot_mapping=slot_mapping)
    written = []
    with jax.named_scope("layers"):
        for layer, kv in zip(model.layers, kv_pages, strict=True):
            x, kv = functions.layer(layer, x, rope, kv, context)
            written.append(kv)
    with jax.named_scope("gather_rows"):
        at = fields["head_tokens"]
        sampling_fields = fields["sampling"].at[:, POSITION].set(context.positions[at] + 1)
        head_inputs = HeadInputs(fields["head_rows"], None if drafts is None else tokens[at], sampling_fields)
        step_hidden = lax.dynamic_update_slice(step_hidden, x, (0, 0))  # in place: the program that scores has one shape
        hidden = x[at]
    if reader is not None:
        with jax.named_scope("read_body"):
            own = reader.read_body(own, Ran(embedded, fields["seq_rows"], context, x))
    return hidden, head_inputs, written, page_table, num_computed, step_hidden, own


def _context(layout, backend, fields, num_pages, page_table, num_computed, last_tokens, drafts):
    """Where each token stands. Returns (StepContext, token ids i32[T], page_table, num_computed), the state brought up to date."""
    T, S, page_size = layout.bucket.tokens, layout.bucket.seqs, layout.page_size
    rows, q_lens = fields["seq_rows"], fields["q_lens"]
    update = fields["page_updates"]
    page_table = page_table.at[update[:, 0], update[:, 1]].set(update[:, 2], mode="drop")
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
    known = num_computed.at[rows].get(mode="fill", fill_value=0)
    starts = jnp.where(fields["starts"] < 0, known, fields["starts"])
    kv_lens = jnp.where(q_lens > 0, starts + q_lens, 0)
    num_computed = num_computed.at[rows].set(kv_lens, mode="drop")

    t = jnp.arange(T, dtype=jnp.int32)
    seq = jnp.minimum((t[:, None] >= cu_q_lens[None, 1:]).sum(1, dtype=jnp.int32), S - 1)
    real = t < cu_q_lens[-1]
    positions = jnp.where(real, starts[seq] + t - cu_q_lens[seq], 0)
    sampled = last_tokens.at[rows].get(mode="fill", fill_value=0)
    if drafts is None:
        from_device = sampled[seq]
    else:
        known_next = jnp.concatenate([sampled[:, None], drafts.at[rows].get(mode="fill", fill_value=NO_DRAFT)], 1)
        from_device = known_next[seq, jnp.maximum(FROM_DEVICE - fields["token_ids"], 0)]
    tokens = jnp.where(fields["token_ids"] < 0, from_device, fields["token_ids"])
    table = page_table.at[rows].get(mode="fill", fill_value=0)
    page = table[seq, positions // page_size]
    slots = jnp.where(real, page * page_size + positions % page_size, num_pages * page_size + t)
    max_q_len = layout.bucket.max_q_len
    if layout.planners:
        work = {str(window): planner.work(fields[name]) for window, (name, planner) in layout.work.items()}
    else:
        work = plan_work(cu_q_lens, kv_lens, num_tokens=T, max_q_len=max_q_len, backend=backend)
    context = StepContext(positions, slots, table, cu_q_lens, kv_lens, work, max_q_len=max_q_len, backend=backend)
    return context, tokens, page_table, num_computed


def head(
    functions: ModelFunctions,
    num_rows: int,
    max_logprobs: int,
    leaves: Sequence[jax.Array],
    last_tokens: jax.Array,  # i32[max_num_seqs]
    history: jax.Array,  # i32[max_num_seqs, max_model_len]: token ids of each row that looks back
    edits: jax.Array,  # i32[max_num_seqs, columns of edit_rows]
    hidden: jax.Array,  # [R, D]
    inputs: HeadInputs,
    masks: jax.Array,  # i32[num_rows, ceil(V / 32)]: the tokens that grammars allow
    masked: jax.Array,  # bool[]: whether any grammar does
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits of the first `num_rows` hidden rows, and a token of each. Returns (last_tokens, history, what the host
    fetches: i32[rows, ...])."""
    seq_rows, rows = inputs.rows[:num_rows], sampling.unpack_rows(inputs.sampling[:num_rows])
    logits = _logits(functions, leaves, hidden[:num_rows])
    sampled = _sample(logits, rows, max_logprobs, masks, masked, _edit(seq_rows, rows, edits, history))
    last_tokens = last_tokens.at[seq_rows].set(sampled.tokens, mode="drop")
    history = logit_edits.remember(history, seq_rows, rows.position, sampled.tokens)
    return last_tokens, history, sampling.pack_sampled(sampled)


def drafting_head(
    functions: ModelFunctions,
    proposer: Proposer,
    acceptance: str,
    num_rows: int,
    max_logprobs: int,
    leaves: Sequence[jax.Array],
    last_tokens: jax.Array,  # i32[max_num_seqs]
    history: jax.Array,  # i32[max_num_seqs, max_model_len]: token ids of every row
    num_computed: jax.Array,  # i32[max_num_seqs], as the body left it: as if every draft stood
    state: DraftState,
    edits: jax.Array,  # i32[max_num_seqs, columns of edit_rows]
    hidden: jax.Array,  # [R, D]
    inputs: HeadInputs,
    masks: jax.Array,  # i32[num_rows, ceil(V / 32)]
    masked: jax.Array,  # bool[]
) -> tuple[jax.Array, jax.Array, jax.Array, DraftState, jax.Array]:
    """`head` where speculation is on: the rows that follow a sequence's first are its drafts', which are verified here, and new
    drafts are proposed. acceptance: as SpeculativeConfig's. Returns (last_tokens, history, num_computed, state, what the host
    fetches: i32[rows, ... and K drafts])."""
    seq_rows, rows = inputs.rows[:num_rows], sampling.unpack_rows(inputs.sampling[:num_rows])
    num_seqs = len(last_tokens)  # as a sequence row: nobody's
    assert inputs.tokens is not None
    with jax.named_scope("drafts"):
        tokens, is_draft = inputs.tokens[:num_rows], verify.follows(seq_rows)
        # What is sampled after a draft looks back on it; what is refused is overwritten when a token comes to its position.
        where = jnp.where(is_draft & (tokens != NO_DRAFT), seq_rows, num_seqs)
        history = logit_edits.remember(history, where, rows.position - 1, tokens)
    logits = _logits(functions, leaves, hidden[:num_rows])
    draw = None
    if acceptance == "rejection":
        proposal = None if state.probs is None else verify.probs_after(is_draft, seq_rows, state.probs)
        draw = functools.partial(rejection.draw_token, drafts=verify.drafts_after(is_draft, tokens), proposal=proposal)
    sampled = _sample(logits, rows, max_logprobs, masks, masked, _edit(seq_rows, rows, edits, history), draw)
    with jax.named_scope("verify"):
        delivered = verify.delivered(is_draft, tokens, sampled.tokens, sampled.bad_logits)
        last = jnp.where(verify.last_delivered(is_draft, delivered), seq_rows, num_seqs)
        last_tokens = last_tokens.at[last].set(sampled.tokens, mode="drop")
        num_computed = num_computed.at[last].set(rows.position, mode="drop")
        history = logit_edits.remember(history, jnp.where(delivered, seq_rows, num_seqs), rows.position, sampled.tokens)
    with jax.named_scope("propose"):
        seen = Seen(seq_rows=last, num_tokens=rows.position + 1, history=history, hidden=hidden[:num_rows], sampling=rows)
        own, drafts, probs = proposer.propose(state.proposer, seen)
        kept = None if state.probs is None else state.probs.at[last].set(probs, mode="drop")
        state = DraftState(state.drafts.at[last].set(drafts, mode="drop"), kept, own)
    out = jnp.concatenate([sampling.pack_sampled(sampled, delivered), drafts], axis=1)
    return last_tokens, history, num_computed, state, out


def _logits(functions: ModelFunctions, leaves, hidden) -> jax.Array:  # f32[rows, V]
    model = functions.module(functions.head_indices, leaves)
    return model.logits(model.final_norm(hidden))


def _edit(seq_rows: jax.Array, rows: sampling.SamplingRows, edits: jax.Array, history: jax.Array) -> Callable:
    return functools.partial(
        logit_edits.edit, kinds=rows.edits, seq_rows=seq_rows, positions=rows.position, table=edits, history=history
    )


def _sample(logits, rows, max_logprobs, masks, masked, edit, draw=None) -> sampling.Sampled:
    """`sampling.sample` of what grammars allow."""
    edited = (rows.edits != 0).any()

    def forbid(logits):
        with jax.named_scope("grammar_masks"):
            return lax.cond(masked, logit_edits.apply_masks, lambda logits, _: logits, logits, masks)

    if max_logprobs:  # which are those of masked logits before any edit
        return sampling.sample(forbid(logits), rows, max_logprobs=max_logprobs, edit=edit, draw=draw)

    def forbid_and_edit(logits):
        return lax.cond(edited, edit, lambda logits: logits, forbid(logits))

    # One conditional around both, since one that has nothing to do still copies its logits.
    return sampling.sample(logits, rows, edit=forbid_and_edit, edit_wanted=masked | edited, draw=draw)


def score(
    functions: ModelFunctions,
    max_logprobs: int,
    leaves: Sequence[jax.Array],
    step_hidden: jax.Array,  # [tokens of the largest bucket, D], as the step's body left it
    packed: jax.Array,  # i32[1 + 2C], as prompt_scores.pack_spans makes it
) -> jax.Array:
    """Log-probabilities of C tokens, each by one hidden row of the step: what the host fetches, i32[C, 2 + 2N]."""
    C = packed.size // 2
    model = functions.module(functions.head_indices, leaves)
    x = model.final_norm(step_hidden[packed[1 : 1 + C]])
    weight, vocab_axis = model.head_weight()
    with jax.named_scope("score"):
        scored = scoring.score(x, weight, vocab_axis, packed[1 + C :], packed[0] != 0, max_logprobs=max_logprobs)
        return scoring.pack_scored(scored)


def update_state(
    page_table: jax.Array,  # i32[max_num_seqs, P]
    history: jax.Array,  # i32[max_num_seqs, max_model_len]
    edits: jax.Array,  # i32[max_num_seqs, columns]
    page_updates: jax.Array,  # i32[U, 3]: row, column, page
    edit_row: jax.Array,  # i32[1 + max_model_len + columns], as EditLayout.pack makes it
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What has no room in a step's own upload: page-table entries, and one row of history and edits at a request's admission.
    Rows past the end change nothing. Returns (page_table, history, edits)."""
    page_table = page_table.at[page_updates[:, 0], page_updates[:, 1]].set(page_updates[:, 2], mode="drop")
    row, end = edit_row[0], 1 + history.shape[1]
    history = history.at[row].set(edit_row[1:end], mode="drop")
    return page_table, history, edits.at[row].set(edit_row[end:], mode="drop")
