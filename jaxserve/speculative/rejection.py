"""Exact rejection sampling of drafts: whatever proposed them, the output is distributed as the target model's own.

Owns the acceptance rule and its random numbers. Knows nothing of models, of who proposes, or of schedules. The target's logits are
processed as everywhere (sampling.py): edits, temperature and filters come first, and a draft that they forbid is never accepted.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), algorithm 1; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023), algorithm 2. With p the target and q what the draft
x was drawn from: x stands with probability min(1, p(x) / q(x)); where it does not, the token comes from max(p - q, 0),
renormalised, and where there is no draft, from p. Either way the token is distributed as p.

A row rejects only where p(x) < q(x), which leaves the residual nothing at x: its token equals its draft if and only if the draft
was accepted. So each logits row is decided by itself, wherever it stands, and drafts are counted by comparing tokens, as where the
target's own samples decide. Of a proposal that is a point mass (n-grams) the two rules accept equally often, p(x); of one that was
drawn, this one accepts as often as any rule can: sum(min(p, q)).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxserve import sampling
from jaxserve.sampling import Sampled, SamplingRows
from jaxserve.speculative.proposer import NO_DRAFT

ACCEPTANCE_STREAM = 1  # of sampling.uniform. A proposer that draws from q must use a third, or its drafts are not independent


def verify(
    logits: jax.Array,  # f32[S * (k + 1), V]: of a sequence's next token, then of the one after each of its drafts
    rows: SamplingRows,  # of the S * (k + 1) rows
    drafts: jax.Array,  # i32[S, k]; NO_DRAFT after a sequence's last
    proposal: jax.Array | None = None,  # f32[S, k, V]: the probabilities that each draft was drawn with; None: all are point masses
    *,
    max_logprobs: int = 0,
    edit: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, Sampled]:  # i32[S] accepted drafts; a token of each row
    """Samples every row and says how many drafts of each sequence stand: its output grows by its first 1 + accepted tokens.

    Greedy rows (temperature 0) accept what equals their argmax. A row's token depends on its logits, its draft and that draft's
    proposal, its parameters and (seed, sample index, position) only; without a draft it is `sampling.sample`'s.

    max_logprobs, edit: as `sampling.sample`'s.

    Raises:
      TypeError: logits are not float32.
      ValueError: shapes that don't belong together.
    """
    S, k = drafts.shape
    if logits.shape[0] != S * (k + 1):
        raise ValueError(f"{logits.shape[0]} rows of logits must be {S * (k + 1)}: one more a sequence than {drafts.shape=} has")
    if proposal is not None and proposal.shape != (S, k, logits.shape[1]):
        raise ValueError(f"{proposal.shape=} must be {(S, k, logits.shape[1])}: a probability of each token for each draft")
    draft_of_row = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=NO_DRAFT).reshape(-1)
    if proposal is not None:
        proposal = jnp.pad(proposal, ((0, 0), (0, 1), (0, 0))).reshape(logits.shape)
    draw = partial(draw_token, drafts=draft_of_row, proposal=proposal)
    sampled = sampling.sample(logits, rows, max_logprobs=max_logprobs, edit=edit, draw=draw)
    good = ~sampled.bad_logits.reshape(S, k + 1)[:, :k]
    return num_accepted(sampled.tokens.reshape(S, k + 1), jnp.where(good, drafts, NO_DRAFT)), sampled


def num_accepted(
    tokens: jax.Array,  # i32[S, k + 1]
    drafts: jax.Array,  # i32[S, k]; NO_DRAFT where there is none
) -> jax.Array:  # i32[S]
    """How many drafts equal the tokens before the first that does not."""
    return jnp.cumprod(tokens[:, :-1] == drafts, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)


def draw_token(
    weights: jax.Array,  # i32[R, B, BLOCK]: the target, as sampling.draw_token takes it
    rows: SamplingRows,
    *,
    drafts: jax.Array,  # i32[R]; NO_DRAFT where there is none
    proposal: jax.Array | None,  # f32[R, V]; None: point masses
) -> jax.Array:  # i32[R]
    """A token of each row: its draft if that is accepted, another if not.

    In integers, like the weights: the proposal in units in which it has the target's total, so that no sum depends on its order.
    """
    R, N = weights.shape[0], weights[0].size
    total = weights.sum((1, 2), dtype=jnp.int64)[:, None, None]
    if proposal is None:
        ids = jnp.arange(N, dtype=jnp.int32).reshape(weights.shape[1:])
        proposed = jnp.where(ids == drafts[:, None, None], total, 0)
    else:
        shares = sampling.in_blocks(proposal, 0.0).astype(jnp.float64)
        proposed = jnp.where((drafts == NO_DRAFT)[:, None, None], 0, jnp.round(shares * total).astype(jnp.int64))
    at_draft = jnp.maximum(drafts, 0)[:, None]
    of_draft = partial(jnp.take_along_axis, indices=at_draft, axis=1)
    stands = _stands(
        of_draft(weights.reshape(R, N))[:, 0],
        of_draft(proposed.reshape(R, N))[:, 0],
        sampling.uniform(rows, ACCEPTANCE_STREAM),
    )
    other = sampling.invert_cdf(_residual(weights, proposed), sampling.uniform(rows))
    return jnp.where(stands & (drafts != NO_DRAFT), drafts, other)


def _stands(
    weight: jax.Array,  # i32[R]: of the draft, in the target
    proposed: jax.Array,  # i64[R]: and in the proposal
    at: jax.Array,  # f64[R]; in [0, 1)
) -> jax.Array:  # bool[R]
    return at * proposed < weight


def _residual(
    weights: jax.Array,  # i32[R, B, BLOCK]
    proposed: jax.Array,  # i64[R, B, BLOCK]
) -> jax.Array:  # i32[R, B, BLOCK]
    """What the target has over the proposal; all of the target where rounding leaves nothing."""
    residual = jnp.maximum(weights - proposed, 0).astype(jnp.int32)
    return jnp.where((residual > 0).any((1, 2), keepdims=True), residual, weights)
