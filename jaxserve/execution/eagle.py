"""An EAGLE head as a proposer: what it reads of the target's bodies, its keys and values, and how it goes on from there.

The head's sequence is one of pairs: the target's hidden state at a position and the token that followed it. A pair lies in the
slot of its state's position, so that the slot of the last token is empty until the next one is known. A body makes the pairs of
all tokens that it runs; the state before its first token is kept from the step before. After a hit of the prefix cache it is not
known, and the pair at the end of the shared pages stays the one of the request that computed them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.batching.context import StepContext
from jaxserve.execution.draft_functions import HeadFunctions, WithPages, blank, choose, in_turn, new_pages, spread
from jaxserve.execution.draft_pages import DraftPages, LastRows
from jaxserve.execution.model_functions import ModelFunctions, attend_paged
from jaxserve.models.eagle import EagleHead
from jaxserve.models.layers import Attend
from jaxserve.sampling.sampler import SamplingRows
from jaxserve.speculative.proposer import Ran, Seen
from kernels.kv_cache import write_kv


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EagleState:
    """S sequence rows, R logits rows of a step."""

    kv_pages: list[jax.Array]  # one: [total pages, 2, K, page_size, H]
    of_rows: jax.Array  # [R, D]: the feature that each logits row of the last body was made with
    kept: jax.Array  # [S, D]: the last feature of each sequence
    kept_at: jax.Array  # i32[S]: its position; -1: there is none


@dataclass(frozen=True, eq=False)
class Eagle(WithPages):
    """Proposes what an EAGLE head says. draws: as DraftModel's."""

    functions: HeadFunctions[EagleHead]
    target: ModelFunctions
    pages: DraftPages
    draws: bool
    max_rows: int  # R

    @property
    def shared(self) -> list[int]:
        """The target's weights that it takes: the embedding, and with version 1 final norm and head."""
        target = self.target
        embedding = [] if self.functions.config.has_embedding else [target.paths.index("embed_tokens/embedding")]
        return sorted({*embedding, *(target.head_indices if self.functions.config.version == 1 else ())})

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.functions.config.hidden_layers

    def init_state(self) -> EagleState:
        D, dtype, seqs = self.functions.config.layer.hidden_size, self.functions.dtype, self.pages.max_num_seqs
        rows, kept = jnp.zeros((self.max_rows, D), dtype), jnp.zeros((seqs, D), dtype)
        return EagleState(new_pages(self.functions, self.pages), rows, kept, jnp.full(seqs, -1, jnp.int32))

    def _modules(self, weights: list[jax.Array]) -> tuple[EagleHead, Any]:
        """(the head, the target with what is shared of it in place)."""
        n = len(self.weights)
        return self.functions.module(weights[:n]), self.target.module(self.shared, weights[n:])

    def _embed(self, head: EagleHead, target: Any, tokens: jax.Array) -> jax.Array:
        return target.embed(tokens) if head.embed_tokens is None else head.embed_tokens(tokens)

    def _run(
        self, head: EagleHead, embedded: jax.Array, feature: jax.Array, positions: jax.Array, attend: Attend, num_pairs: jax.Array
    ) -> Any:
        """([T, D], what attend returned behind its output) of pairs; those from num_pairs on are padding."""
        with jax.named_scope("eagle"):
            return head(embedded, feature, head.rope(positions), attend, self.functions.fused_of(num_pairs))

    def read_body(self, weights: list[jax.Array], state: EagleState, ran: Ran) -> EagleState:
        head, target = self._modules(weights)
        states = ran.layer_inputs if head.config.version == 3 else target.final_norm(ran.hidden)
        assert states is not None
        feature = head.feature(states, self.functions.fused_of(ran.context.num_tokens))
        kept = state.kept.at[ran.seq_rows].get(mode="fill", fill_value=0)
        kept_at = state.kept_at.at[ran.seq_rows].get(mode="fill", fill_value=-1)
        if ran.context.max_q_len == 1 and len(ran.tokens) == len(kept_at):
            pairs, known = _single_pairs(ran.context, kept_at, self.pages), kept
        else:
            pairs = _pairs(ran.context, kept_at, self.pages)
            known = jnp.where(pairs.from_before[:, None], kept[pairs.seq], feature[jnp.maximum(pairs.token - 1, 0)])
        embedded = self._embed(head, target, ran.tokens[pairs.token])

        def write(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            return q, write_kv(state.kv_pages[0], k, v, pairs.slots)  # nobody reads what its one layer would attend to

        _, kv = self._run(head, embedded, known, pairs.positions, write, pairs.num_pairs)
        # The last feature of each sequence, as if all drafts stood: `propose` puts that right.
        q_lens = ran.context.cu_q_lens[1:] - ran.context.cu_q_lens[:-1]
        rows = jnp.where(q_lens > 0, ran.seq_rows, len(state.kept))
        last = feature[jnp.maximum(ran.context.cu_q_lens[1:] - 1, 0)]
        return EagleState(
            [kv],
            feature[ran.logits_tokens],
            state.kept.at[rows].set(last, mode="drop"),
            state.kept_at.at[rows].set(ran.context.kv_lens - 1, mode="drop"),
        )

    def skip_body(self, state: EagleState, seq_rows: jax.Array, context: StepContext) -> EagleState:
        """Neither the pair before each token, where its state was kept, nor, behind it, that of its own state will be known. Where
        it was not, the pair before is another's, whose page may be shared, or was given up a step ago."""
        kept_at = state.kept_at.at[seq_rows].get(mode="fill", fill_value=-1)
        seq, size = jnp.arange(len(context.kv_lens), dtype=jnp.int32), self.pages.page_size
        places = jnp.concatenate([context.kv_lens - 2, context.kv_lens - 1])
        is_own = jnp.concatenate([kept_at == context.kv_lens - 2, jnp.ones(len(seq), bool)]) & (places >= 0)
        of, at = jnp.tile(seq, 2), jnp.maximum(places, 0)
        past = self.pages.total * size + jnp.arange(len(places), dtype=jnp.int32)
        slots = jnp.where(is_own, context.page_table[of, at // size] * size + at % size, past)
        return replace(state, kv_pages=[blank(kv, slots) for kv in state.kv_pages])

    def propose(self, weights: list[jax.Array], state: EagleState, seen: Seen) -> tuple[EagleState, jax.Array, jax.Array | None]:
        head, target = self._modules(weights)
        last = LastRows.of(seen)
        feature, before = state.of_rows[last.order], jnp.maximum(last.positions - 1, 0)
        (kv,), table = self.pages.branch(state.kv_pages, seen.page_table, last.seq_rows, before)
        work = self.pages.plan_drafts(table, last.is_real, before)

        def draft(carry: tuple[jax.Array, jax.Array, jax.Array], j: jax.Array) -> Any:
            kv, tokens, feature = carry
            head, target = self._modules(weights)
            context = self.pages.of_drafts(table, last.is_real, jnp.where(last.is_real, before + j, 0), work)
            attend = functools.partial(attend_paged, None, kv, context)
            feature, kv = self._run(head, self._embed(head, target, tokens), feature, context.positions, attend, last.num_real)
            rows = replace(last.sampling, position=last.positions + 1 + j)
            tokens, probs = self._choose(head, target, feature, rows, last.num_real)
            return (kv, tokens, feature), (tokens, probs)

        (kv, _, _), (drafts, probs) = in_turn(draft, (kv, last.tokens, feature), self.num_drafts, 1)
        kept = state.kept.at[last.seq_rows].set(feature, mode="drop")
        kept_at = state.kept_at.at[last.seq_rows].set(before, mode="drop")
        state = EagleState([kv], state.of_rows, kept, kept_at)
        return state, *spread(last, drafts, probs, len(seen.seq_rows))

    def _choose(
        self, head: EagleHead, target: Any, x: jax.Array, rows: SamplingRows, num_real: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:  # [B, D] -> i32[B], f32[B, V]
        """Drafts among the tokens that the head knows."""
        if head.lm_head is None or head.draft_ids is None:
            return choose(target.logits(x), rows, self.draws)
        logits, V = head.draft_logits(x, self.functions.fused_of(num_real)), self.target.model_config.vocab_size
        return choose(logits, rows, self.draws, head.draft_ids[...], V)


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a body: T of them, padding behind."""

    positions: jax.Array  # i32[T]
    slots: jax.Array  # i32[T]
    seq: jax.Array  # i32[T]
    num_pairs: jax.Array  # i32[]: that are not padding
    token: jax.Array  # i32[T]: the place in the step of each pair's token, whose state is that of the place before
    from_before: jax.Array  # bool[T]: but for these, whose state the step before has kept


def _single_pairs(context: StepContext, kept_at: jax.Array, pages: DraftPages) -> _Pairs:  # i32[B]
    """`_pairs` of sequences of one token each, of T = B tokens: the states are those that were kept."""
    seq, size = jnp.arange(len(kept_at), dtype=jnp.int32), pages.page_size
    position = jnp.maximum(context.kv_lens - 2, 0)  # 0 of padding, whose tokens are 0 as well
    written = (context.kv_lens > 1) & (kept_at == position)
    slots = jnp.where(written, context.page_table[seq, position // size] * size + position % size, pages.total * size + seq)
    return _Pairs(position, slots, seq, context.num_tokens, context.cu_q_lens[:-1], jnp.ones(len(seq), bool))


def _pairs(context: StepContext, kept_at: jax.Array, pages: DraftPages) -> _Pairs:  # i32[B]
    """A sequence whose tokens begin at position p > 0 has pairs from p - 1 on, one that begins at 0 from there; both up to the last
    token's. The pair at p - 1 is written only if its state was kept."""
    T, size, cu = len(context.positions), pages.page_size, context.cu_q_lens
    q_lens = cu[1:] - cu[:-1]
    starts = context.kv_lens - q_lens
    num_pairs = jnp.where(starts > 0, q_lens, jnp.maximum(q_lens - 1, 0))
    ends = jnp.cumsum(num_pairs, dtype=jnp.int32)
    t = jnp.arange(T, dtype=jnp.int32)
    seq = jnp.minimum((t[:, None] >= ends[None]).sum(1, dtype=jnp.int32), len(q_lens) - 1)
    real = t < ends[-1]
    offset = t - (ends - num_pairs)[seq] + (starts == 0)[seq]  # of the pair's token among its sequence's
    token = jnp.where(real, cu[seq] + offset, 0)
    position = jnp.where(real, starts[seq] + offset - 1, 0)
    from_before = real & (offset == 0)
    written = real & (~from_before | (kept_at[seq] == position))
    slots = jnp.where(written, context.page_table[seq, position // size] * size + position % size, pages.total * size + t)
    return _Pairs(position, slots, seq, ends[-1], token, from_before)
