"""The head of a step: hidden rows -> logits -> tokens; and scoring, the log-probabilities of a prompt's own tokens.

A head's shape is a number of logits rows and whether log-probabilities are wanted, so that the counts of bodies and heads add up
instead of multiplying. Knows nothing of hosts, requests or compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.execution.body import HeadInputs
from jaxserve.execution.device_state import DraftState, RowState
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.models.row_tiles import RowTiles, whole
from jaxserve.sampling import logit_edits, sampler, scoring
from jaxserve.sampling.sampler import TokenLogprobs
from jaxserve.speculative import rejection, verify
from jaxserve.speculative.proposer import NO_DRAFT, Proposer, Seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Masks:
    """The tokens that grammars allow each logits row of a head; on several devices each has the part of its vocabulary."""

    allowed: jax.Array  # i32[num_rows, ceil(V / 32)]: a bit a token
    given: jax.Array  # bool[]: whether any grammar is; `allowed` is not read otherwise


def head(
    functions: ModelFunctions,
    num_rows: int,
    max_logprobs: int,
    weights: Sequence[jax.Array],
    rows: RowState,
    inputs: HeadInputs,
    masks: Masks,
) -> tuple[RowState, jax.Array]:
    """A token of each of the first `num_rows` logits rows, none of which is a draft's. Returns the rows with these tokens in, and
    what the host fetches: i32[num_rows, columns of sampler.pack_sampled]. weights: the model's; a proposer's behind them are not
    read."""
    weights = weights[: len(functions.head_indices)]
    seq_rows, asked = inputs.seq_rows[:num_rows], sampler.unpack_rows(inputs.sampling[:num_rows])
    assert rows.last_tokens is not None and rows.history is not None and rows.edits is not None  # a last stage's
    num_real = (seq_rows < len(rows.last_tokens)).sum(dtype=jnp.int32)
    logits = _logits(functions, weights, inputs.hidden[:num_rows], num_real)
    edit = _edit(functions, seq_rows, asked, rows.edits, rows.history)
    given = logit_edits.given_ids(asked.edits, seq_rows, rows.edits)
    sampled = _sample(logits, asked, max_logprobs, masks, edit, given=given, map_rows=functions.map_rows, shard=functions.shard)
    last_tokens = rows.last_tokens.at[seq_rows].set(sampled.tokens, mode="drop")
    history = logit_edits.remember(rows.history, seq_rows, asked.position, sampled.tokens)
    return replace(rows, last_tokens=last_tokens, history=history), sampler.pack_sampled(sampled)


def drafting_head(
    functions: ModelFunctions,
    proposer: Proposer,
    acceptance: str,  # as SpeculativeConfig's
    num_rows: int,
    max_logprobs: int,
    weights: Sequence[jax.Array],
    rows: RowState,
    inputs: HeadInputs,
    masks: Masks,
) -> tuple[RowState, jax.Array]:
    """`head` where speculation is on: the rows that follow a sequence's first are its drafts', which are verified here, and new
    drafts are proposed. `rows.num_computed` comes as if every draft stood. What the host fetches has K columns of drafts more."""
    num_weights = len(functions.head_indices)
    weights, own_weights = weights[:num_weights], weights[num_weights:]  # of the model, of the proposer
    seq_rows, asked = inputs.seq_rows[:num_rows], sampler.unpack_rows(inputs.sampling[:num_rows])
    assert rows.last_tokens is not None and rows.history is not None and rows.edits is not None
    state, num_seqs = rows.drafts, len(rows.last_tokens)  # num_seqs as a sequence row: nobody's
    assert inputs.tokens is not None and state is not None
    with jax.named_scope("drafts"):
        tokens, is_draft = inputs.tokens[:num_rows], verify.follows(seq_rows)
        # What is sampled after a draft looks back on it; what is refused is overwritten when a token comes to its position.
        where = jnp.where(is_draft & (tokens != NO_DRAFT), seq_rows, num_seqs)
        history = logit_edits.remember(rows.history, where, asked.position - 1, tokens)
    hidden = inputs.hidden[:num_rows]
    logits = _logits(functions, weights, hidden, (seq_rows < num_seqs).sum(dtype=jnp.int32))
    draw = None
    if acceptance == "rejection":
        proposal = None if state.probs is None else verify.probs_after(is_draft, seq_rows, state.probs)
        draw = functools.partial(rejection.draw_token, drafts=verify.drafts_after(is_draft, tokens), proposal=proposal)
    edit = _edit(functions, seq_rows, asked, rows.edits, history)
    how: dict[str, Any] = {"draw": draw, "map_rows": functions.map_rows, "shard": functions.shard}
    given = logit_edits.given_ids(asked.edits, seq_rows, rows.edits)
    sampled = _sample(logits, asked, max_logprobs, masks, edit, given=given, **how)
    with jax.named_scope("verify"):
        delivered = verify.delivered(is_draft, tokens, sampled.tokens, sampled.bad_logits)
        last = jnp.where(verify.last_delivered(is_draft, delivered), seq_rows, num_seqs)
        last_tokens = rows.last_tokens.at[last].set(sampled.tokens, mode="drop")
        num_computed = rows.num_computed.at[last].set(asked.position, mode="drop")
        history = logit_edits.remember(history, jnp.where(delivered, seq_rows, num_seqs), asked.position, sampled.tokens)
    with jax.named_scope("propose"):
        known = {"history": history, "hidden": hidden, "sampling": asked, "page_table": rows.page_table}
        seen = Seen(seq_rows=last, num_tokens=asked.position + 1, **known)
        own, drafts, probs = proposer.propose(own_weights, state.proposer, seen)
        kept = state.probs if state.probs is None or probs is None else state.probs.at[last].set(probs, mode="drop")
        state = DraftState(state.drafts.at[last].set(drafts, mode="drop"), kept, own)
    rows = replace(rows, num_computed=num_computed, last_tokens=last_tokens, history=history, drafts=state)
    return rows, jnp.concatenate([sampler.pack_sampled(sampled, delivered), drafts], axis=1)


def _logits(
    functions: ModelFunctions,
    weights: Sequence[jax.Array],
    hidden: jax.Array,  # [rows, D]
    num_real: jax.Array,  # i32[]: rows from here on are padding
) -> jax.Array:  # f32[rows, V]
    """Of several devices each has its part of the vocabulary, and -inf past its end."""
    model, shard = functions.module(functions.head_indices, weights), functions.shard
    map_rows = whole if functions.is_row_exact else functions.map_rows
    fused = functions.kernels.fused_of(num_real, map_rows)
    logits = map_rows(lambda x: model.normed_logits(x, fused), hidden)
    return scoring.mask_past_end(logits, functions.model_config.vocab_size, shard)


def _edit(
    functions: ModelFunctions, seq_rows: jax.Array, asked: sampler.SamplingRows, edits: jax.Array, history: jax.Array
) -> Callable:
    return functools.partial(
        logit_edits.edit,
        kinds=asked.edits,
        seq_rows=seq_rows,
        positions=asked.position,
        table=edits,
        history=history,
        map_rows=functions.map_rows,
        shard=functions.shard,
    )


def _sample(logits, asked, max_logprobs, masks: Masks, edit, **how: Any) -> sampler.Sampled:
    """`sampler.sample` of what grammars allow. how: its given, draw, map_rows and shard."""
    edited = sampler.has_edits(asked)

    def forbid(logits):
        with jax.named_scope("grammar_masks"):
            return lax.cond(masks.given, logit_edits.apply_masks, lambda logits, _: logits, logits, masks.allowed)

    if max_logprobs:  # which are those of masked logits before any edit
        return sampler.sample(forbid(logits), asked, max_logprobs=max_logprobs, edit=edit, edit_wanted=edited, **how)

    def forbid_and_edit(logits):
        return lax.cond(edited, edit, lambda logits: logits, forbid(logits))

    # One conditional around both, since one that has nothing to do still copies its logits.
    return sampler.sample(logits, asked, edit=forbid_and_edit, edit_wanted=masks.given | edited, **how)


def score(
    functions: ModelFunctions,
    max_logprobs: int,
    weights: Sequence[jax.Array],
    step_hidden: jax.Array,  # [tokens of the largest bucket, D], as the step's body left it
    packed: jax.Array,  # i32[1 + 2C], as prompt_scores.pack_spans makes it
) -> jax.Array:
    """Log-probabilities of C tokens, each by one hidden row of the step: what the host fetches, i32[C, 2 + 2N]."""
    C = packed.size // 2
    model = functions.module(functions.head_indices, weights[: len(functions.head_indices)])
    vocab_weight, vocab_axis = model.head_weight()

    def score_rows(hidden: jax.Array, tokens: jax.Array) -> TokenLogprobs:
        x = model.final_norm(hidden)
        with jax.named_scope("score"):
            how: dict[str, Any] = {"vocab_size": functions.model_config.vocab_size, "shard": functions.shard}
            how |= {"max_logprobs": max_logprobs, "one_shape": isinstance(functions.map_rows, RowTiles)}
            return scoring.score(x, vocab_weight, vocab_axis, tokens, packed[0] != 0, **how)

    scored = functions.map_rows(score_rows, step_hidden[packed[1 : 1 + C]], packed[1 + C :])
    return scoring.pack_scored(scored)
