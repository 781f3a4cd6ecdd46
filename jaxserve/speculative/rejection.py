"""Exact rejection sampling of drafts: whatever proposed them, the output is distributed as the target model's own.

Owns the acceptance rule and its random numbers. Knows nothing of models, of who proposes, or of schedules. The target's logits are
processed as everywhere (sampler.py): edits, temperature and filters come first, and a draft that they forbid is never accepted.

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

import jax
import jax.numpy as jnp

from jaxserve.parallel.shard import ALONE, Shard
from jaxserve.sampling import sampler
from jaxserve.sampling.sampler import SamplingRows
from jaxserve.speculative.proposer import NO_DRAFT

ACCEPTANCE_STREAM = 1  # of sampler.uniform; what is drawn has the first, and what proposes a third (proposer.DRAFT_STREAM)


def draw_token(
    weights: jax.Array,  # i32[R, B, BLOCK]: the target, as sampler.draw_token takes it
    rows: SamplingRows,
    shard: Shard = ALONE,
    *,
    drafts: jax.Array,  # i32[R]; NO_DRAFT where there is none
    proposal: jax.Array | None,  # f32[R, V]: the probabilities with which each draft was drawn; None: they are point masses
) -> jax.Array:  # i32[R]
    """A token of each row: its draft if that is accepted, another if not; `sampler.sample` draws with it.

    A row's token depends on its weights, its draft and that draft's proposal, and (seed, sample index, position) only; without a
    draft it is sampler.draw_token's. In integers, like the weights: the proposal is scaled to the target's total, so that no sum
    depends on its order. Greedy rows never come here: their draft stands if it equals the argmax. shard: the device, where each has
    the weights of a part of the vocabulary; it has all of the proposal.
    """
    R, N = weights.shape[0], weights[0].size
    total = shard.sum(weights.sum((1, 2), dtype=jnp.int64))[:, None, None]
    if proposal is None:
        ids = shard.ids(N).reshape(weights.shape[1:])
        proposed = jnp.where(ids == drafts[:, None, None], total, 0)
    else:
        shares = sampler.in_blocks(shard.part(proposal, 1, N), 0.0).astype(jnp.float64)
        proposed = jnp.where((drafts == NO_DRAFT)[:, None, None], 0, jnp.round(shares * total).astype(jnp.int64))
    of_draft = lambda x: shard.pick(x, jnp.maximum(drafts, 0)[:, None])[:, 0]  # noqa: E731
    stands = _stands(
        of_draft(weights.reshape(R, N)),
        of_draft(proposed.reshape(R, N)),
        sampler.uniform(rows, ACCEPTANCE_STREAM),
    )
    other = sampler.invert_cdf(_residual(weights, proposed, shard), sampler.uniform(rows), shard)
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
    shard: Shard,
) -> jax.Array:  # i32[R, B, BLOCK]
    """What the target has over the proposal; all of the target where rounding leaves nothing."""
    residual = jnp.maximum(weights - proposed, 0).astype(jnp.int32)
    return jnp.where(shard.any((residual > 0).any((1, 2), keepdims=True)), residual, weights)
