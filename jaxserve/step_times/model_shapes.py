"""Models in numbers, for models that need not be loadable: what a step's operators are sized by.

Owns ModelShape and the published shapes of models that benchmarks name. Knows no weights and no device.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder. window: positions that a query sees (sliding-window attention), None: all. gated: the MLP has a gate beside its up
    projection. parallel_block: attention and MLP read one norm and add into one sum (Falcon), one all-reduce a layer. With
    num_experts, ffn_size is an expert's.

    Raises:
      ValueError: sizes that do not fit together.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    gated: bool = True
    tied: bool = False
    window: int | None = None
    parallel_block: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.num_experts and not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(f"num_experts_per_token={self.num_experts_per_token} must lie in 1 to {self.num_experts=}")

    @classmethod
    def from_config(cls, config: ModelConfig, name: str) -> ModelShape:
        """The shape of a model that the engine could run. NotImplementedError where its layers differ."""
        windows, sparse = set(config.sliding_windows), len(config.sparse_layers)
        if len(windows) > 1 or sparse not in (0, config.num_layers):
            raise NotImplementedError(f"{name} has layers of several kinds, which analytic step times don't know")
        return cls(
            name=name,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn_size=config.moe_intermediate_size if sparse else config.intermediate_size,
            vocab_size=config.vocab_size,
            tied=config.tie_word_embeddings,
            window=windows.pop(),
            num_experts=config.num_experts if sparse else 0,
            num_experts_per_token=config.num_experts_per_token if sparse else 0,
        )

    @property
    def attention_weights(self) -> int:
        """Numbers in the matrices of a layer's attention."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def layer_weights(self) -> int:
        """Numbers in a layer's matrices (norms are nothing beside them)."""
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_size
        return self.attention_weights + max(1, self.num_experts) * mlp + self.num_experts * self.hidden_size

    @property
    def embedding_weights(self) -> int:
        """Numbers in the embedding, and in the output matrix where it is another."""
        return self.vocab_size * self.hidden_size


def _qwen3(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        name=name, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=128, ffn_size=ffn,
        vocab_size=151_936, tied=tied,
    )  # fmt: skip


# From the config.json of each on Hugging Face: mistralai/Mistral-7B-v0.1, 01-ai/Yi-34B, meta-llama/Llama-2-70b-hf,
# meta-llama/Llama-3.1-8B-Instruct, tiiuae/falcon-180B, Qwen/Qwen3-*.
MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        ModelShape(
            name="mistral-7b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14_336,
            vocab_size=32_000, window=4096,
        ),
        ModelShape(
            name="yi-34b", num_layers=60, hidden_size=7168, num_heads=56, num_kv_heads=8, head_dim=128, ffn_size=20_480,
            vocab_size=64_000,
        ),
        ModelShape(
            name="llama2-70b", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=28_672,
            vocab_size=32_000,
        ),
        ModelShape(
            name="llama3.1-8b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14_336,
            vocab_size=128_256,
        ),
        ModelShape(
            name="falcon-180b", num_layers=80, hidden_size=14_848, num_heads=232, num_kv_heads=8, head_dim=64, ffn_size=4 * 14_848,
            vocab_size=65_024, gated=False, tied=True, parallel_block=True,
        ),
        _qwen3("qwen3-0.6b", 28, 1024, 16, 8, 3072, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 32, 8, 12_288),
        _qwen3("qwen3-32b", 64, 5120, 64, 8, 25_600),
        ModelShape(
            name="qwen3-30b-a3b", num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, ffn_size=768,
            vocab_size=151_936, num_experts=128, num_experts_per_token=8,
        ),
        ModelShape(
            name="qwen3-235b-a22b", num_layers=94, hidden_size=4096, num_heads=64, num_kv_heads=4, head_dim=128, ffn_size=1536,
            vocab_size=151_936, num_experts=128, num_experts_per_token=8,
        ),
    )
}  # fmt: skip
