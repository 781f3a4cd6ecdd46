"""What a head that is being trained says of whole sequences: the chains of drafts that it would make behind every token.

Owns new heads for a target, their forward over sequences, the loss, and how well each draft of a chain is guessed. Pure functions
of weights and states; knows nothing of data, optimizers or files.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models import Decoder, ModelConfig, named_leaves, with_leaves
from jaxserve.models.eagle import EagleConfig, EagleHead
from jaxserve.models.layers import Fused, causal_attention
from jaxserve.models.medusa import MedusaConfig, MedusaHeads

INIT_STD = 0.02
SMALL = 0.05  # of that, what an EAGLE-3 head takes from low and middle layers at first
STEP_DECAY = 0.8  # weight of a chain's next draft in the loss, of that of the one before (Medusa, section 2.2.1)
_OF_NO_FORM = ("draft_vocab_size", "dtype", "max_position_embeddings", "eos_token_ids", "bos_token_id", "pad_token_id")

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


def medusa_config(config: MedusaConfig) -> dict[str, Any]:
    """The config.json of Medusa heads: their authors', or vLLM's where they share a head."""
    if not config.shared_head:
        return {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": config.fc_bias,
        "original_lm_head": True,
    }


def new_eagle3(target: Decoder, draft_ids: np.ndarray, seed: int, text: Sequence[int]) -> EagleHead:
    """A head in float32 that knows the tokens `draft_ids`, i32[n]: norm and logits as the target's, the rest random. Its feature is
    at first the high layer's state in about unit size, measured along a text of token ids: in 20 steps (SmolLM2-135M) a loss of
    18.1 and 12% of first drafts, where all random weights had 20.7 and 8%."""
    config = EagleConfig.from_hf(eagle3_config(target.config, len(draft_ids)), target.config, version=3)
    given = {
        "draft_ids": draft_ids,
        "lm_head/kernel": _head_kernel(target)[:, draft_ids],
        "norm/scale": target.final_norm.scale[...],
    }
    head = _fresh(EagleHead.abstract(config, "float32"), given, seed)
    D = target.config.hidden_size
    high = target_states(target, head, jnp.asarray([text])).read[0, 1:, -D:].astype(jnp.float32)  # the first token's is far larger
    kernel = (SMALL * head.fc.kernel[...]).at[-D:].set(jnp.eye(D) / jnp.sqrt((high**2).mean()))
    return with_leaves(head, named_leaves(head) | {"fc/kernel": kernel})


def new_medusa(target: Decoder, num_heads: int, seed: int, draft_ids: np.ndarray | None = None) -> MedusaHeads:
    """Heads of one block each in float32, that say at first what the target's own head says (Medusa, section 2.1.1). draft_ids,
    i32[n]: they all use the target's head, and know these tokens."""
    sizes: dict[str, Any] = {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
    kernel, given = _head_kernel(target), dict[str, Any]()
    if draft_ids is not None:
        sizes |= {"shared_head": True, "draft_vocab_size": len(draft_ids)}
        given = {"draft_ids": draft_ids, "lm_head/kernel": kernel[:, draft_ids]}
    abstract = MedusaHeads.abstract(MedusaConfig(num_heads=num_heads, num_layers=1, **sizes), "float32")
    given |= {path: np.zeros(leaf.shape) for path, leaf in named_leaves(abstract).items() if "/linear/" in path}
    return _fresh(abstract, given | {f"heads/{k}/lm_head/kernel": kernel for k in range(num_heads)}, seed)


def begin_with(head: Head, earlier: Head) -> Head:
    """A new head with the weights of an earlier one, so that it is trained further. Tokens that only the new one knows keep its
    weights to logits.

    Raises:
      ValueError: the earlier head is of another kind, has other sizes, or reads other layers.
    """
    if type(head) is not type(earlier):
        raise ValueError(f"a {type(earlier).__name__} can't be trained further as a {type(head).__name__}")
    ours, theirs = _form(head), _form(earlier)
    others = [f"{name}={theirs[name]!r} there, {value!r} here" for name, value in ours.items() if theirs[name] != value]
    if others:
        raise ValueError(f"the earlier head is not of the new one's form: {'; '.join(others)}")
    leaves, given = named_leaves(head), named_leaves(earlier)
    ids, their_ids = known_ids(head), known_ids(earlier)
    fixed = {"draft_ids", *(("lm_head/kernel",) if getattr(head.config, "shared_head", False) else ())}  # the target's own
    for path in leaves.keys() & given.keys() - fixed:
        if path.endswith("lm_head/kernel") and (ids is not None or their_ids is not None):
            n = max(leaves[path].shape[1], given[path].shape[1])
            known = (np.arange(n) if each is None else np.asarray(each) for each in (ids, their_ids))
            _, here, there = np.intersect1d(*known, assume_unique=True, return_indices=True)
            leaves[path] = leaves[path].at[:, here].set(given[path][:, there].astype(leaves[path].dtype))
        else:
            leaves[path] = jnp.array(given[path], leaves[path].dtype)
    return with_leaves(head, leaves)


def _form(head: Head) -> dict[str, Any]:
    """What two heads must have in common for one to have the other's weights."""
    said = asdict(head.config)
    layer = said.pop("layer", {})
    return {name: value for name, value in (said | layer).items() if name not in _OF_NO_FORM}


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
    logits: jax.Array  # f32[B, S, n]: of the token behind it, over the n tokens that the head knows


def hidden_states(target: Decoder, head: Head, tokens: jax.Array) -> jax.Array:  # i32[B, S] -> [B, S, W]
    """Of each token what the head reads of the target, and behind that, if it is not the same, what the target's own head reads. W
    is D for Medusa heads and 4D for EAGLE-3. One forward of the target, no gradient."""
    B, S = tokens.shape  # all rows are computed as one matrix, [B * S, D]
    x, rope, inputs = target.embed(tokens.reshape(-1)), target.rope(jnp.tile(jnp.arange(S), B)), []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> tuple[jax.Array, None]:
        q, k, v = (x.reshape(B, S, *x.shape[1:]) for x in (q, k, v))
        return causal_attention(q, k, v, sliding_window=window).reshape(B * S, *q.shape[2:]), None

    for layer in target.layers:
        inputs.append(x)
        x, _ = layer(x, rope, functools.partial(attend, window=layer.sliding_window))
    read = [inputs[i] for i in head.config.hidden_layers] if isinstance(head, EagleHead) else []
    return jax.lax.stop_gradient(jnp.concatenate([*read, target.final_norm(x)], -1).reshape(B, S, -1))


def states_of(target: Decoder, head: Head, tokens: jax.Array, hidden: jax.Array) -> States:  # i32[B, S], [B, S, W]
    """What a head learns from of these tokens, given `hidden_states` of them."""
    D, ids = target.config.hidden_size, known_ids(head)
    read, normed = (hidden[..., :-D], hidden[..., -D:]) if isinstance(head, EagleHead) else (hidden, hidden)
    if ids is None:
        logits = target.logits(normed)
    else:
        logits = jnp.dot(normed, _head_kernel(target)[:, ids], preferred_element_type=jnp.float32)
    return jax.tree.map(jax.lax.stop_gradient, States(target.embed(tokens), read, logits))


def target_states(target: Decoder, head: Head, tokens: jax.Array) -> States:  # i32[B, S]
    """Both in one."""
    return states_of(target, head, tokens, hidden_states(target, head, tokens))


class DraftLogits(NamedTuple):
    """Of one draft of all chains: logits[:, i] are of the chain that began so many places before i."""

    logits: jax.Array  # f32[B, S, tokens that the head knows]
    places_ago: int


def chain_logits(head: Head, states: States, num_drafts: int) -> list[jax.Array]:  # num_drafts of f32[B, S, tokens it knows]
    """Of each token the logits of a chain's first draft behind the token that follows it, of the second one, and so on, each given
    that those before it are the sequence's own tokens. What would stand behind the end is of no use."""
    return [jnp.roll(logits, -ago, 1) for logits, ago in _draft_logits(head, states, num_drafts, None)]


def _draft_logits(head: Head, states: States, num_drafts: int, fused: Fused | None) -> list[DraftLogits]:
    if isinstance(head, EagleHead):
        return _eagle_logits(head, states, num_drafts, fused)
    rows = states.read.reshape(-1, states.read.shape[-1])
    return [DraftLogits(head.logits(k, rows, fused).reshape(*states.read.shape[:2], -1), 0) for k in range(num_drafts)]


def _eagle_logits(head: EagleHead, states: States, num_drafts: int, fused: Fused | None) -> list[DraftLogits]:
    """EAGLE-3's training-time test (2503.01840, section 3.2): the head runs over the sequences once for each draft of a chain, and
    each time reads its own outputs of the time before, where the first time it reads the target's. All rows are computed as one
    matrix, [B * S, D]."""
    B, S = states.read.shape[:2]
    rows = lambda x: x.reshape(B * S, *x.shape[2:])  # noqa: E731
    rope, feature = head.rope(jnp.tile(jnp.arange(S), B)), head.feature(rows(states.read), fused)
    following, keys, values, logits = rows(jnp.roll(states.embedded, -1, 1)), [], [], []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        q, k, v = (x.reshape(B, S, *x.shape[1:]) for x in (q, k, v))
        keys.append(k)
        values.append(v)
        return rows(jax.vmap(_attend_chains)(q, keys, values)), None

    for j in range(num_drafts):
        x, _ = head(following, feature, rope, attend, fused)
        logits.append(DraftLogits(head.draft_logits(x, fused).reshape(B, S, -1), j))
        feature = rows(jnp.roll(x.reshape(B, S, -1), 1, 1))
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


def loss(
    head: Head,
    states: States,
    tokens: jax.Array,
    begins: jax.Array,
    ends: jax.Array,
    num_drafts: int,
    fused: Fused | None = None,
) -> jax.Array:  # i32[B, S], i32[B], i32[B] -> f32[]
    """Cross entropy of each draft against the target's distribution over the tokens that the head knows, in a mean over those
    tokens of begins to ends that it knows. begins, ends: of what is learnt of each sequence. fused: what computes the matmuls;
    None: as each linear does."""
    place, ids = jnp.arange(tokens.shape[1]), known_ids(head)
    wanted = jax.nn.softmax(states.logits, -1)
    known = jnp.ones(tokens.shape, bool) if ids is None else jnp.isin(tokens, ids)
    total = jnp.float32(0)
    for j, (logits, ago) in enumerate(_draft_logits(head, states, num_drafts, fused)):
        ahead = 2 + j - ago  # places from here to the token that this draft is to say
        at = place + ahead
        counts = (place >= ago) & (at >= begins[:, None]) & (at < ends[:, None]) & jnp.roll(known, -ahead, 1)
        each = jax.nn.logsumexp(logits, -1) - (jnp.roll(wanted, 1 - ahead, 1) * logits).sum(-1)
        total += STEP_DECAY**j * jnp.where(counts, each, 0).sum() / jnp.maximum(counts.sum(), 1)
    return total


def chain_ranks(
    head: Head, states: States, tokens: jax.Array, begins: jax.Array, ends: jax.Array, num_drafts: int
) -> tuple[jax.Array, jax.Array]:  # i32[B, S, num_drafts], bool[B, S]
    """Of the chain behind the token at each place + 1, that is given the answer's own tokens: how many tokens the head finds
    likelier than the answer's, at each draft; as many as it knows where it doesn't know that one. And which places have a chain:
    those of answers' tokens that num_drafts more follow. A greedy chain stands as far as its ranks are 0."""
    place, ids = jnp.arange(tokens.shape[1]), known_ids(head)
    chains = (place + 1 >= begins[:, None]) & (place + 1 + num_drafts < ends[:, None])
    ranks = []
    for j, logits in enumerate(chain_logits(head, states, num_drafts)):
        wanted = jnp.roll(tokens, -2 - j, 1)
        known, at = jnp.ones(wanted.shape, bool), wanted
        if ids is not None:
            hits = wanted[..., None] == ids
            known, at = hits.any(-1), hits.argmax(-1)
        own = jnp.take_along_axis(logits, at[..., None], -1)
        ranks.append(jnp.where(known, (logits > own).sum(-1), logits.shape[-1]))
    return jnp.stack(ranks, -1), chains


def known_ids(head: Head) -> jax.Array | None:
    """The target's ids of the tokens that a head knows, i32[n]; None for all."""
    return None if head.draft_ids is None else head.draft_ids[...]
