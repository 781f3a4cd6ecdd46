"""Drafts by prompt lookup: what followed the last tokens where they stood before.

Owns the search, on the device, over the tokens that the head keeps there anyway. Prompt lookup decoding (Saxena, 2023), as vLLM's
ngram method, but for two things: of equally long matches the most recent counts, and a match that ends less than K tokens before
the end goes on in cycles, as LZ77's overlapping copies do.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.speculative.proposer import NO_DRAFT, Seen, WithoutWeights


@dataclass(frozen=True)
class NgramProposer(WithoutWeights):
    """Of the longest n-gram, `most` to `least` tokens, that ends a sequence and occurred before."""

    num_drafts: int
    least: int
    most: int
    draws = False

    def init_state(self) -> tuple[()]:
        return ()

    def propose(self, weights: tuple[()], state: tuple[()], seen: Seen) -> tuple[tuple[()], jax.Array, None]:
        tokens = seen.history.at[seen.seq_rows].get(mode="fill", fill_value=0)
        with jax.named_scope("ngram_lookup"):
            return state, lookup(tokens, seen.num_tokens, num_drafts=self.num_drafts, least=self.least, most=self.most), None


def lookup(
    tokens: jax.Array,  # i32[R, L]
    num_tokens: jax.Array,  # i32[R]: what stands behind is ignored
    *,
    num_drafts: int,  # K
    least: int,
    most: int,
) -> jax.Array:  # i32[R, K]
    """What followed the longest suffix of `most` to `least` tokens that occurred before, at its most recent occurrence."""
    L = tokens.shape[1]
    place = jnp.arange(L, dtype=jnp.int32)[None]  # where an earlier occurrence may end
    end = num_tokens[:, None] - 1
    run, length = place < end, jnp.zeros_like(tokens)
    for j in range(most):  # tokens before the ends of both that agree
        wanted = jnp.take_along_axis(tokens, jnp.maximum(end - j, 0), 1)
        earlier = jnp.pad(tokens, ((0, 0), (j, 0)))[:, :L]
        run &= (place >= j) & (earlier == wanted)
        length += run
    best = jnp.where(length >= least, length * L + place, -1).max(1, keepdims=True)  # the longest, then the last
    start = best % L + 1
    ahead = jnp.arange(num_drafts, dtype=jnp.int32)[None] % jnp.maximum(end + 1 - start, 1)
    drafts = jnp.take_along_axis(tokens, jnp.minimum(start + ahead, L - 1), 1)
    return jnp.where(best >= 0, drafts, NO_DRAFT)
