"""How many numbers a model's weights hold, by its config."""

from jaxserve.models.config import ModelConfig


def num_weights(config: ModelConfig) -> int:
    """A tied embedding counts once."""
    D, F, H, N, K = config.hidden_size, config.intermediate_size, config.head_dim, config.num_heads, config.num_kv_heads
    attention = D * (N + 2 * K) * H + N * H * D
    attention += config.qkv_bias * (N + 2 * K) * H + config.o_bias * D + config.qk_norm * 2 * H
    dense = 3 * D * F + config.mlp_bias * (2 * F + D)
    sparse = config.num_experts * (3 * D * config.moe_intermediate_size + D)
    mlps = (config.num_layers - len(config.sparse_layers)) * dense + len(config.sparse_layers) * sparse
    embeddings = config.vocab_size * D * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * (attention + 2 * D) + mlps + embeddings + D
