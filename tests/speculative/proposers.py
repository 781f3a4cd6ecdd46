"""Proposers that draw: one by a matrix, and one that keeps what it sees of bodies, as draft models and heads will."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.sampler import uniform
from jaxserve.speculative.proposer import DRAFT_STREAM, Ran, Seen, WithoutWeights


@dataclass(frozen=True, eq=False)
class Markov(WithoutWeights):
    """Each draft is drawn by the token before it."""

    num_drafts: int
    matrix: np.ndarray  # [V, V]: row t is the distribution of what follows token t
    draws = True

    def init_state(self) -> Any:
        return {"matrix": jnp.asarray(self.matrix, jnp.float32)}

    def propose(self, weights: Any, state: Any, seen: Seen) -> tuple[Any, jax.Array, jax.Array]:
        last = seen.history.at[seen.seq_rows, seen.num_tokens - 1].get(mode="fill", fill_value=0)
        drafts, probs = [], []
        for j in range(self.num_drafts):
            probs.append(state["matrix"][last])
            at = uniform(dataclasses.replace(seen.sampling, position=seen.num_tokens + j), DRAFT_STREAM).astype(jnp.float32)
            last = (jnp.cumsum(probs[-1], 1) <= at[:, None]).sum(1, dtype=jnp.int32)
            last = jnp.minimum(last, len(self.matrix) - 1)
            drafts.append(last)
        return state, jnp.stack(drafts, 1), jnp.stack(probs, 1)


@dataclass(frozen=True, eq=False)
class Reader(Markov):
    """Also keeps the hidden row and the id of every token of the engine's pages, where the target keeps its KV."""

    num_slots: int
    max_num_seqs: int
    pages_per_seq: int
    hidden_size: int

    def init_state(self) -> Any:
        hidden = jnp.full((self.num_slots, self.hidden_size), jnp.nan)
        pages = jnp.full((self.max_num_seqs, self.pages_per_seq), -1, jnp.int32)
        return super().init_state() | {"hidden": hidden, "tokens": jnp.full(self.num_slots, -1, jnp.int32), "pages": pages}

    def skip_body(self, state: Any, seq_rows: Any, context: Any) -> Any:
        raise NotImplementedError("it does not adapt, and reads every step")

    def read_body(self, weights: Any, state: Any, ran: Ran) -> Any:
        slots = ran.context.slot_mapping
        return state | {
            "hidden": state["hidden"].at[slots].set(ran.hidden, mode="drop"),
            "tokens": state["tokens"].at[slots].set(ran.tokens, mode="drop"),
            "pages": state["pages"].at[ran.seq_rows].set(ran.context.page_table, mode="drop"),
        }
