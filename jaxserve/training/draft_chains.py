"""What a head that is being trained says of whole sequences: the chains of drafts that it would make behind every token.

Owns new heads for a target, their forward over sequences, the loss, and how many drafts of a chain would stand. Pure functions of
weights and states; knows nothing of data, optimizers or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models import Decoder, ModelConfig, named_leaves, with_leaves
from jaxserve.models.eagle import EagleConfig, EagleHead
from jaxserve.models.layers import causal_attention
from jaxserve.models.medusa import MedusaConfig, MedusaHeads

INIT_STD = 0.02
STEP_DECAY = 0.8  # weight of a chain's next draft in the loss, of that of the one before (Medusa, section 2.2.1)

Head = EagleHead | MedusaHeads


def eagle3_config(target: ModelConfig, draft_vocab_size: int) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head for a target: a layer of the target's sizes that reads the inputs of a low, a middle and a
    high layer, its authors' where there are enough."""
    L = target.num_layers
    layers = (2, L // 2, L - 3) if L >= 6 else (0, L // 2, L - 1)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
    }


def medusa_config(num_heads: int) -> dict[str, Any]:
    """The config.json of Medusa heads of one block each."""
    return {"medusa_num_heads": num_heads, "medusa_num_layers": 1}


def new_eagle3(target: Decoder, draft_ids: np.ndarray, seed: int) -> EagleHead:
    """A head in float32 that knows the tokens `draft_ids`, i32[n]: norm and logits as the target's, the rest random."""
    config = EagleConfig.from_hf(eagle3_config(target.config, len(draft_ids)), target.config, version=3)
    given = {
        "draft_ids": draft_ids,
        "lm_head/kernel": _head_kernel(target)[:, draft_ids],
        "norm/scale": target.final_norm.scale[...],
    }
    return _fresh(EagleHead.abstract(config, "float32"), given, seed)


def new_medusa(target: Decoder, num_heads: int, seed: int) -> MedusaHeads:
    """Heads of one block each in float32, that say at first what the target's own head says (Medusa, section 2.1.1)."""
    config = MedusaConfig.from_hf(medusa_config(num_heads), target.config)
    abstract, kernel = MedusaHeads.abstract(config, "float32"), _head_kernel(target)
    given = {path: np.zeros(leaf.shape) for path, leaf in named_leaves(abstract).items() if "/linear/" in path}
    return _fresh(abstract, given | {f"heads/{k}/lm_head/kernel": kernel for k in range(num_heads)}, seed)


def _head_kernel(target: Decoder) -> jax.Array:  # [D, V]
    weight, vocab_axis = target.head_weight()
    return weight if vocab_axis else weight.T


def _fresh(abstract: Any, given: dict[str, Any], seed: int) -> Any:
    rng, leaves = np.random.default_rng(seed), {}
    for path, leaf in named_leaves(abstract).items():
        if path in given:
            leaves[path] = jnp.array(given[path], leaf.dtype)  # a copy: training gives its buffers away
        elif path.endswith("/scale"):
            leaves[path] = jnp.ones(leaf.shape, leaf.dtype)
        else:
            leaves[path] = jnp.asarray(INIT_STD * rng.standard_normal(leaf.shape), leaf.dtype)
    return with_leaves(abstract, leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class States:
    """What the target makes of B sequences of S tokens, those behind a sequence's end included."""

    embedded: jax.Array  # [B, S, D]: of each token
    read: jax.Array  # [B, S, D or 3D]: what the head reads of it
    logits: jax.Array  # f32[B, S, V]: of the token behind it


def target_states(target: Decoder, head: Head, tokens: jax.Array) -> States:  # i32[B, S]
    """One forward of the target, no gradient."""
    x, rope, inputs = target.embed(tokens), target.rope(jnp.arange(tokens.shape[1])), []
    embedded = x
    for layer in target.layers:
        inputs.append(x)
        window = layer.sliding_window
        x, _ = layer(x, rope, lambda q, k, v, window=window: (causal_attention(q, k, v, sliding_window=window), None))
    normed = target.final_norm(x)
    read = jnp.concatenate([inputs[i] for i in head.config.hidden_layers], -1) if isinstance(head, EagleHead) else normed
    return jax.tree.map(jax.lax.stop_gradient, States(embedded, read, target.logits(normed)))


def chain_logits(head: Head, states: States, num_drafts: int) -> list[jax.Array]:  # num_drafts of f32[B, S, tokens it knows]
    """Of each token the logits of a chain's first draft behind the token that follows it, of the second one, and so on, each given
    that those before it are the sequence's own tokens. What would stand behind the end is of no use."""
    if isinstance(head, MedusaHeads):
        return [head.heads[k](states.read) for k in range(num_drafts)]
    each = jax.vmap(lambda embedded, read: _eagle_logits(head, embedded, read, num_drafts))
    return each(states.embedded, states.read)


def _eagle_logits(head: EagleHead, embedded: jax.Array, read: jax.Array, num_drafts: int) -> list[jax.Array]:  # [S, D], [S, 3D]
    """EAGLE-3's training-time test (2503.01840, section 3.2): the head runs over the sequence once for each draft of a chain, and
    each time reads its own outputs of the time before, where the first time it reads the target's."""
    rope, feature = head.rope(jnp.arange(len(read))), head.feature(read)
    following, keys, values, logits = jnp.roll(embedded, -1, 0), [], [], []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        keys.append(k)
        values.append(v)
        return _attend_chains(q, keys, values), None

    for j in range(num_drafts):
        x, _ = head(following, feature, rope, attend)
        logits.append(jnp.roll(head.draft_logits(x), -j, 0))  # at the token behind which the chain began
        feature = jnp.roll(x, 1, 0)
    return logits


def _attend_chains(q: jax.Array, keys: Sequence[jax.Array], values: Sequence[jax.Array]) -> jax.Array:
    """Attention of the j-th drafts of all chains, [S, N, H]. That at place i attends to the first pass up to the chain's beginning
    at i - j, and to the chain's own drafts, one of each later pass. keys, values: j + 1 passes of [S, K, H]."""
    S, N, H = q.shape
    K, j = keys[0].shape[1], len(keys) - 1
    grouped = q.reshape(S, K, N // K, H).astype(jnp.float32) * H**-0.5
    place = jnp.arange(S)
    first = jnp.einsum("QKGH,SKH->QKGS", grouped, keys[0].astype(jnp.float32))
    first = jnp.where((place[None] <= place[:, None] - j)[:, None, None], first, -jnp.inf)
    own = [jnp.roll(keys[m], j - m, 0) for m in range(1, j + 1)]
    scores = [first, *(jnp.einsum("QKGH,QKH->QKG", grouped, k.astype(jnp.float32))[..., None] for k in own)]
    weights = jax.nn.softmax(jnp.concatenate(scores, -1), -1)
    o = jnp.einsum("QKGS,SKH->QKGH", weights[..., :S], values[0].astype(jnp.float32))
    for m in range(1, j + 1):
        o += weights[..., S + m - 1, None] * jnp.roll(values[m], j - m, 0)[:, :, None].astype(jnp.float32)
    return o.reshape(S, N, H).astype(q.dtype)


def loss(head: Head, states: States, begins: jax.Array, ends: jax.Array, num_drafts: int) -> jax.Array:  # i32[B], i32[B] -> f32[]
    """Cross entropy of each draft against the target's distribution over the tokens that the head knows, in a mean over answers'
    tokens whose likeliest is one of these. begins, ends: where each sequence's answer begins, and where it ends."""
    place, ids = jnp.arange(states.logits.shape[1]), known_ids(head)
    likeliest = states.logits.argmax(-1)
    wanted = jax.nn.softmax(states.logits if ids is None else states.logits[..., ids], -1)
    known = jnp.ones(states.logits.shape[-1], bool) if ids is None else jnp.zeros(states.logits.shape[-1], bool).at[ids].set(True)
    total = jnp.float32(0)
    for j, logits in enumerate(chain_logits(head, states, num_drafts)):
        at = place + 1 + j  # the target's distribution there is what this draft is to say
        counts = (at >= begins[:, None] - 1) & (at < ends[:, None]) & jnp.roll(known[likeliest], -1 - j, 1)
        each = -(jnp.roll(wanted, -1 - j, 1) * jax.nn.log_softmax(logits, -1)).sum(-1)
        total += STEP_DECAY**j * jnp.where(counts, each, 0).sum() / jnp.maximum(counts.sum(), 1)
    return total


def num_standing(
    head: Head, states: States, tokens: jax.Array, begins: jax.Array, ends: jax.Array, num_drafts: int
) -> tuple[jax.Array, jax.Array]:  # i32[num_drafts], i32[]
    """Of greedy chains behind the answers' tokens, as far as num_drafts tokens follow: how many have their j-th draft and those
    before it right, and how many chains there are."""
    place, ids = jnp.arange(tokens.shape[1]), known_ids(head)
    # The chain behind the token at place + 1, which was sampled of the state at `place`.
    stands = chains = (place + 1 >= begins[:, None]) & (place + 1 + num_drafts < ends[:, None])
    right = []
    for j, logits in enumerate(chain_logits(head, states, num_drafts)):
        drafts = logits.argmax(-1)
        drafts = drafts if ids is None else ids[drafts]
        stands &= drafts == jnp.roll(tokens, -2 - j, 1)
        right.append(stands.sum())
    return jnp.stack(right), chains.sum()


def known_ids(head: Head) -> jax.Array | None:
    """The target's ids of the tokens that a head knows, i32[n]; None for all."""
    return head.draft_ids[...] if isinstance(head, EagleHead) and head.draft_ids is not None else None
