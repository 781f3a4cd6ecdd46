"""EAGLE heads: one decoder layer that drafts from a target's hidden states. Their config, module and table of keys.

EAGLE-1 (Li et al., 2401.15077): the layer reads the target's last hidden state, after its final norm, beside the embedding of the
token that followed, and says the next such state, which the target's own head turns into logits. EAGLE-3 (2503.01840): it reads
hidden states of three layers, joined to one, has norms of its own, and a head over a part of the vocabulary.

Read are the folders that their authors and vLLM's `speculators` publish: config.json with safetensors or `pytorch_model.bin`.
Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.weights import Source, WeightsError, find_problems, load_weights
from jaxserve.models.config import ModelConfig, read_json
from jaxserve.models.decoder import named_leaves, with_leaves
from jaxserve.models.draft_ids import add_draft_ids
from jaxserve.models.hf_keys import as_is, layer_linears, linear
from jaxserve.models.layers import (
    AnyLinear,
    Attend,
    Attention,
    Embedding,
    Fused,
    Linear,
    RMSNorm,
    RopeAngles,
    SwiGLU,
    plain_linear,
    transposed,
)
from jaxserve.models.rope import rope_cos_sin
from kernels.rotary_write.xla import split_heads

NUM_STATES = 3  # hidden states that EAGLE-3 joins
PICKLED = "pytorch_model.bin"  # what its authors call the file


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """The sizes of a head. layer: of its one layer, with the target's vocabulary.

    version: 1 or 3. draft_vocab_size: of its own head; 0: it has none. hidden_layers: the target's layers whose inputs it reads;
    () with version 1. fc_bias: of the matrix that joins what it reads. norm_before_residual: whether the layer adds to the normed
    state in place of the state itself. has_embedding: whether the checkpoint brings an embedding; otherwise it is the target's.
    """

    layer: ModelConfig
    version: int
    draft_vocab_size: int = 0
    hidden_layers: tuple[int, ...] = ()
    fc_bias: bool = False
    norm_before_residual: bool = False
    has_embedding: bool = False

    @classmethod
    def from_hf(
        cls, source: Mapping[str, Any] | str | Path, target: ModelConfig, *, version: int, keys: Collection[str] = ()
    ) -> EagleConfig:
        """Reads a head's config.json. keys: of its tensors.

        Raises:
          NotImplementedError: an option of the layer that is not built, more than one layer, an EAGLE-1 head of `speculators` with
            norms of its own.
          ValueError: `speculators` made it for another method; it is of another vocabulary or hidden size than the target, or reads
            layers that the target does not have; all misfits are listed.
        """
        hf = read_json(source, "config.json")
        kind, wanted = hf.get("speculators_model_type"), "eagle3" if version == 3 else "eagle"
        if kind not in (None, wanted):
            raise ValueError(f"speculators_model_type={kind!r} of this head is not that of an EAGLE-{version} head, {wanted!r}")
        if kind == "eagle" and hf.get("layernorms"):
            raise NotImplementedError("layernorms=true in an EAGLE-1 head of speculators (as HASS has them): without is supported")
        hf = hf | hf.get("transformer_layer_config", {})  # of speculators
        if hf.get("num_hidden_layers", 1) != 1:
            raise NotImplementedError(f"num_hidden_layers={hf['num_hidden_layers']} in an EAGLE head: one layer is supported")
        hf |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
        hf.setdefault("vocab_size", target.vocab_size)
        hf.setdefault("max_position_embeddings", target.max_position_embeddings)
        hf.pop("layer_types", None)
        layer = replace(ModelConfig.from_hf(hf), tie_word_embeddings=False)
        said = hf.get("eagle_config") or {}
        layers = said.get("eagle_aux_hidden_state_layer_ids") or hf.get("eagle_aux_hidden_state_layer_ids")
        if layers is None:
            layers = (2, target.num_layers // 2, target.num_layers - 3)
        has_embedding, fc_bias = "embed_tokens.weight" in keys, "fc.bias" in keys or "fusion_fc.bias" in keys
        config = cls(layer=layer, version=version, fc_bias=fc_bias, has_embedding=has_embedding)
        if version == 3:
            size = hf.get("draft_vocab_size") or layer.vocab_size
            norm_first = bool(hf.get("norm_before_residual"))
            config = replace(config, draft_vocab_size=size, hidden_layers=tuple(layers), norm_before_residual=norm_first)
        faults = config.faults(target, hf.get("target_hidden_size"))
        if faults:
            raise ValueError(f"this EAGLE-{version} head is not for this target: {'; '.join(faults)}")
        return config

    def faults(self, target: ModelConfig, target_hidden_size: int | None = None) -> list[str]:
        """Why the head can't draft for the target. target_hidden_size: that it says it was trained with."""
        found = []
        if self.layer.vocab_size != target.vocab_size:
            found.append(f"its vocab_size is {self.layer.vocab_size}, the target's {target.vocab_size}")
        for name, size in (("hidden_size", self.layer.hidden_size), ("target_hidden_size", target_hidden_size)):
            if size not in (None, target.hidden_size):
                found.append(f"its {name} is {size}, the target's hidden_size {target.hidden_size}")
        if self.version == 3:
            if not 1 <= self.draft_vocab_size <= target.vocab_size:
                found.append(f"its draft_vocab_size={self.draft_vocab_size} must be in [1, {target.vocab_size}]")
            ids = self.hidden_layers
            if len(ids) != NUM_STATES or not all(isinstance(i, int) and 0 <= i < target.num_layers for i in ids):
                found.append(f"it reads the inputs of layers {list(ids)}: must be {NUM_STATES} of the target's {target.num_layers}")
        return found


class EagleHead(nnx.Module):
    """The head's weights and forward. `feature` makes what the layer reads of hidden states, `__call__` runs the layer, and its
    output is the next token's feature; `draft_logits` are over draft_ids, the tokens of the target's vocabulary that it knows.

    Weights by path: fc/kernel, attention/..., mlp/..., mlp_norm/scale as a DecoderLayer's; with version 3 input_norm, hidden_norm
    and norm, lm_head/kernel [D, draft_vocab_size] and draft_ids i32[draft_vocab_size], ascending; embed_tokens/embedding where it
    has one.
    """

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs, param_dtype: Any = jnp.bfloat16):
        layer, is_3, kind = config.layer, config.version == 3, {"rngs": rngs, "param_dtype": param_dtype}
        D = layer.hidden_size
        self.config = config
        self.fc: AnyLinear = Linear((NUM_STATES if is_3 else 2) * D, D, use_bias=config.fc_bias, **kind)
        self.attention: Attention = Attention(layer, **kind)
        norm = lambda: RMSNorm(D, layer.rms_norm_eps, param_dtype=param_dtype)  # noqa: E731
        self.mlp_norm: RMSNorm = norm()
        self.mlp: SwiGLU = SwiGLU(layer, **kind)
        self.embed_tokens: Embedding | None = Embedding(layer.vocab_size, D, **kind) if config.has_embedding else None
        self.input_norm: RMSNorm | None = norm() if is_3 else None
        self.hidden_norm: RMSNorm | None = norm() if is_3 else None
        self.norm: RMSNorm | None = norm() if is_3 else None
        self.lm_head: AnyLinear | None = Linear(D, config.draft_vocab_size, use_bias=False, **kind) if is_3 else None
        ids = nnx.Param(jnp.arange(config.draft_vocab_size, dtype=jnp.int32)) if is_3 else None
        self.draft_ids: nnx.Param[jax.Array] | None = ids
        if is_3:
            columns = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
            self.attention.qkv_proj = Linear(2 * D, columns, use_bias=layer.qkv_bias, **kind)

    @classmethod
    def abstract(cls, config: EagleConfig, param_dtype: Any) -> EagleHead:
        """The module with ShapeDtypeStructs for weights."""
        return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), param_dtype=param_dtype))

    def rope(self, positions: jax.Array) -> RopeAngles:  # i32[T] -> cos, sin f32[T, H/2]
        """Of the pairs' positions: those of their hidden states."""
        return rope_cos_sin(self.config.layer.rope, self.config.layer.head_dim, positions)

    def transpose(self) -> None:
        """Lays its matrices out as `transpose_kernels` does a decoder's: as a CPU computes fastest with."""
        blocks = (self, ("fc", "lm_head")), (self.attention, ("qkv_proj", "o_proj")), (self.mlp, ("gate_up_proj", "down_proj"))
        for block, names in blocks:
            for name in names:
                if getattr(block, name) is not None:
                    setattr(block, name, transposed(getattr(block, name)))

    def feature(self, states: jax.Array, fused: Fused | None = None) -> jax.Array:
        """[T, 3 D], the inputs of the layers that it reads, to [T, D]; with version 1 [T, D], normed, as it is."""
        return plain_linear(self.fc, states, fused) if self.config.version == 3 else states

    def __call__(
        self,
        embedded: jax.Array,  # [T, D]: of each token
        feature: jax.Array,  # [T, D]: of the token before it, or the output at that
        rope: RopeAngles,
        attend: Attend,
        fused: Fused | None = None,
    ) -> tuple[jax.Array, Any]:
        """([T, D], the kv that attend returned). fused: what computes the matmuls, where it takes any layout."""
        fused = fused if fused is not None and fused.any_layout else None
        if self.input_norm is None or self.hidden_norm is None:
            residual = x = plain_linear(self.fc, jnp.concatenate([embedded, feature], -1), fused)
        else:
            normed = self.hidden_norm(feature)
            residual = normed if self.config.norm_before_residual else feature
            x = jnp.concatenate([self.input_norm(embedded), normed], -1)
        attention = self.attention
        qkv = plain_linear(attention.qkv_proj, x, fused).reshape(*x.shape[:-1], -1, attention.head_dim)
        q, k, v = split_heads(qkv, attention.num_kv_heads, *rope, None, None, eps=0.0)
        o, kv = attend(q, k, v)
        return self.mlp.add(attention.add_output(residual, o, fused), self.mlp_norm, fused), kv

    def draft_logits(self, x: jax.Array, fused: Fused | None = None) -> jax.Array:  # [T, D] -> f32[T, draft_vocab_size]
        """Logits of the layer's output, of a head of its own."""
        assert self.norm is not None and self.lm_head is not None
        return plain_linear(self.lm_head, self.norm(x), fused, jnp.float32)


def key_table(config: EagleConfig, keys: Collection[str] = ()) -> dict[str, Source]:
    """{our path: Source} of every float weight. keys: what the checkpoint holds: the layer of version 3 is `midlayer` by its
    authors, `layers.0` by others; version 1 has `transformer` and `fusion_fc` in speculators."""
    theirs, fc = "layers.0" if config.version == 1 or any(key.startswith("layers.0.") for key in keys) else "midlayer", "fc"
    if config.version == 1 and "fusion_fc.weight" in keys:
        theirs, fc = "transformer", "fusion_fc"
    table = linear("fc", (f"{fc}.weight",)) | layer_linears(config.layer, "", theirs)
    if config.fc_bias:
        table["fc/bias"] = Source((f"{fc}.bias",), as_is)
    table["mlp_norm/scale"] = Source((f"{theirs}.post_attention_layernorm.weight",), as_is)
    if config.has_embedding:
        table["embed_tokens/embedding"] = Source(("embed_tokens.weight",), as_is)
    if config.version == 3:
        table["input_norm/scale"] = Source((f"{theirs}.input_layernorm.weight",), as_is)
        table["hidden_norm/scale"] = Source((f"{theirs}.hidden_norm.weight",), as_is)
        table["norm/scale"] = Source(("norm.weight",), as_is)
        table |= linear("lm_head", ("lm_head.weight",))
    return table


@dataclass(frozen=True)
class EagleFiles:
    """A head on disk, of which the config is read and fits its target."""

    path: Path
    config: EagleConfig
    reader: Any


def find_eagle(model: str | Path, target: ModelConfig, *, version: int) -> EagleFiles:
    """Where a head lies. Reads no weight. Errors as those of `EagleConfig.from_hf`; FileNotFoundError or WeightsError where there
    is no folder of safetensors, nor one with `pytorch_model.bin`."""
    from checkpoints.huggingface import resolve
    from checkpoints.torch_file import open_folder

    path = resolve(model)
    reader = open_folder(path, PICKLED)
    return EagleFiles(path, EagleConfig.from_hf(path, target, version=version, keys=reader.keys()), reader)


def load_eagle(reader: Any, config: EagleConfig, dtype: Any) -> EagleHead:
    """The head of `config` with the weights of a checkpoint reader, on the default device.

    Raises:
      WeightsError: missing, extra or mis-shaped tensors, or a d2t that names no tokens; all are listed.
    """
    abstract, keys = EagleHead.abstract(config, dtype), reader.keys()
    leaves, table = named_leaves(abstract), key_table(config, keys)
    floats = {path: leaf for path, leaf in leaves.items() if path != "draft_ids"}
    ignore = (r"d2t", r"t2d", r".*rotary_emb\.inv_freq", *((r"lm_head\.weight",) if config.version == 1 else ()))
    problems = list(find_problems(reader, floats, table, ignore=ignore))
    ids = None
    if config.version == 3:
        ids, fault = _draft_ids(reader, config)
        problems += [fault] if fault else []
    if problems:
        listed = "\n  ".join(problems)
        raise WeightsError(f"the checkpoint does not fit an EAGLE-{config.version} head ({len(problems)} problems):\n  {listed}")
    loaded = dict(load_weights(reader, floats, table, ignore=ignore))
    if ids is not None:
        add_draft_ids(loaded, ids)
    return with_leaves(abstract, {path: loaded[path] for path in leaves})


def _draft_ids(reader: Any, config: EagleConfig) -> tuple[np.ndarray, str | None]:
    """(i32[draft_vocab_size]: the target's id of each draft id; what is wrong, if anything is)."""
    places = np.arange(config.draft_vocab_size, dtype=np.int32)
    if "d2t" not in reader.keys():
        same = config.draft_vocab_size == config.layer.vocab_size
        return places, None if same else "d2t is missing: the target's id less the draft's own, of each draft id"
    offsets = reader.read("d2t")
    if offsets.shape != places.shape or not np.issubdtype(offsets.dtype, np.integer):
        return places, f"d2t is {offsets.dtype}{list(offsets.shape)}, not integers [{len(places)}]"
    ids = (places + offsets).astype(np.int32)
    if len(np.unique(ids)) < len(ids) or not 0 <= ids.min() <= ids.max() < config.layer.vocab_size:
        return places, f"d2t does not name {len(places)} different tokens below {config.layer.vocab_size}"
    return ids, None
