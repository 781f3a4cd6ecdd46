"""Medusa heads: what each says of one token further on, from a target's last hidden state. Their config, module and table of keys.

Medusa (Cai et al., 2401.10774, section 2.1.1): head k is a few blocks x + SiLU(W x + b), and a matrix to logits. It reads the state
that the target's own head reads, after the final norm, and says the token k + 1 places behind the one that this head says.

Read are the folders that its authors publish: config.json and `medusa_lm_head.pt`, or the same tensors as safetensors; and those
for vLLM (`model_type: medusa`), where heads may share one matrix to logits and know a part of the vocabulary. Knows nothing of
engines.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
from jaxserve.models.hf_keys import as_is, linear
from jaxserve.models.layers import AnyLinear, Fused, Linear, plain_linear, transposed

logger: logging.Logger = logging.getLogger("jaxserve")

PICKLED = "medusa_lm_head.pt"  # what its authors call the file
PREFIX = "medusa_heads."  # that vLLM's names may have
OF_HEAD = r"(?:medusa_heads\.)?(?:blocks\.|lm_heads\.)?"  # what stands before a head's number
NUMBERS: dict[str, tuple[str, ...]] = {
    "num_heads": ("num_heads",),
    "num_layers": ("num_hidden_layers", "num_layers"),
}  # what vLLM's configs call them


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The sizes of Medusa heads. num_layers: blocks of each. hidden_size, vocab_size: the target's.

    fc_bias: whether blocks have a bias. shared_head: whether all heads have one matrix to logits. draft_vocab_size: tokens that
    they know; 0: all.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    fc_bias: bool = True
    shared_head: bool = False
    draft_vocab_size: int = 0

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, target: ModelConfig, *, keys: Collection[str] = ()) -> MedusaConfig:
        """Reads the heads' config.json. What it does not say of sizes is the target's. keys: of their tensors.

        Raises:
          NotImplementedError: logits that are scaled.
          ValueError: numbers of heads or layers that are missing or out of range, or sizes other than the target's; all are listed.
        """
        hf = read_json(source, "config.json")
        given = {name: hf.get(name, getattr(target, name)) for name in ("hidden_size", "vocab_size")}
        others = {name: names if hf.get("model_type") == "medusa" else () for name, names in NUMBERS.items()}
        found = []
        for name, least in (("num_heads", 1), ("num_layers", 0)):
            said = {key: hf[key] for key in (f"medusa_{name}", *others[name]) if key in hf} or {f"medusa_{name}": None}
            key, number = next(iter(said.items()))
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                found.append(f"its {key} is {number!r}, which must be an integer of at least {least}")
            given[name] = number
        if of_vllm(keys):
            size = hf.get("truncated_vocab_size") or 0
            if not isinstance(size, int) or not 0 <= size <= given["vocab_size"]:
                found.append(f"its truncated_vocab_size is {size!r}, which must be an integer of at most {given['vocab_size']}")
            elif size < given["vocab_size"]:
                given["draft_vocab_size"] = size
            given |= {"fc_bias": bool(hf.get("medusa_fc_bias")), "shared_head": bool(hf.get("original_lm_head"))}
            if hf.get("logit_scale", 1.0) != 1.0:
                raise NotImplementedError(f"logit_scale={hf['logit_scale']} of Medusa heads: only 1.0 is supported")
        if not found:
            config = cls(**given)
            found = config.faults(target)
            if not found:
                return config
        raise ValueError(f"these Medusa heads are not for this target: {'; '.join(found)}")

    def faults(self, target: ModelConfig) -> list[str]:
        """Why the heads can't draft for the target."""
        return [
            f"their {name} is {getattr(self, name)}, the target's {getattr(target, name)}"
            for name in ("hidden_size", "vocab_size")
            if getattr(self, name) != getattr(target, name)
        ]


class MedusaBlock(nnx.Module):
    """x + SiLU(x W + b), [..., D] to [..., D]."""

    def __init__(self, config: MedusaConfig, **kind: Any):
        self.linear: AnyLinear = Linear(config.hidden_size, config.hidden_size, use_bias=config.fc_bias, **kind)

    def __call__(self, x: jax.Array, fused: Fused | None = None) -> jax.Array:
        return x + jax.nn.silu(plain_linear(self.linear, x, fused))


class MedusaHead(nnx.Module):
    """One head: its blocks, and its matrix to logits unless all heads share one."""

    def __init__(self, config: MedusaConfig, **kind: Any):
        self.blocks: nnx.List[MedusaBlock] = nnx.List(MedusaBlock(config, **kind) for _ in range(config.num_layers))
        self.lm_head: AnyLinear | None = None if config.shared_head else _lm_head(config, **kind)


class MedusaHeads(nnx.Module):
    """All heads of a target: `logits(k, x)` of the token k + 1 places behind the next one, over draft_ids where they know a part of
    the vocabulary.

    Weights by path: heads/k/blocks/i/linear/kernel [D, D] and bias [D], heads/k/lm_head/kernel [D, n], or lm_head/kernel where it
    is shared; draft_ids i32[n], ascending, where n, the tokens that they know, is not V.
    """

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs, param_dtype: Any = jnp.bfloat16):
        self.config = config
        kind = {"rngs": rngs, "param_dtype": param_dtype}
        self.heads: nnx.List[MedusaHead] = nnx.List(MedusaHead(config, **kind) for _ in range(config.num_heads))
        self.lm_head: AnyLinear | None = _lm_head(config, **kind) if config.shared_head else None
        n = config.draft_vocab_size
        self.draft_ids: nnx.Param[jax.Array] | None = nnx.Param(jnp.arange(n, dtype=jnp.int32)) if n else None

    @classmethod
    def abstract(cls, config: MedusaConfig, param_dtype: Any) -> MedusaHeads:
        """The module with ShapeDtypeStructs for weights."""
        return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), param_dtype=param_dtype))

    def transpose(self) -> None:
        """Lays its matrices out as `transpose_kernels` does a decoder's: as a CPU computes fastest with."""
        for head in self.heads:
            for block in head.blocks:
                block.linear = transposed(block.linear)
        for owner in (*self.heads, self):
            owner.lm_head = None if owner.lm_head is None else transposed(owner.lm_head)

    def logits(self, k: int, x: jax.Array, fused: Fused | None = None) -> jax.Array:  # [..., D] -> f32[..., n]
        """Of head k, from the state that the target's own head reads. fused: what computes the matmuls of x[T, D], where it takes
        any layout."""
        head = self.heads[k]
        for block in head.blocks:
            x = block(x, fused)
        lm_head = self.lm_head if head.lm_head is None else head.lm_head
        assert lm_head is not None
        return plain_linear(lm_head, x, fused, jnp.float32)


def _lm_head(config: MedusaConfig, **kind: Any) -> Linear:
    return Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, use_bias=False, **kind)


def of_vllm(keys: Collection[str]) -> bool:
    """Whether tensors have vLLM's names, as its `Medusa` module has them."""
    return any(key.removeprefix(PREFIX).startswith(("blocks.", "lm_head")) for key in keys)


def key_table(config: MedusaConfig, keys: Collection[str] = ()) -> dict[str, Source]:
    """{our path: Source} of every float weight. keys: what the checkpoint holds. By its authors a head is a sequence of blocks and
    its matrix to logits, numbered on; vLLM has blocks and matrices apart."""
    vllm = of_vllm(keys)

    def stored(name: str) -> str:
        return f"{PREFIX}{name}" if f"{PREFIX}{name}" in keys else name

    table: dict[str, Source] = {}
    for k in range(config.num_heads):
        for i in range(config.num_layers):
            block = f"blocks.{k}.layers.{i}" if vllm else f"{k}.{i}.linear"
            table |= linear(f"heads/{k}/blocks/{i}/linear", (stored(f"{block}.weight"),))
            if config.fc_bias:
                table[f"heads/{k}/blocks/{i}/linear/bias"] = Source((stored(f"{block}.bias"),), as_is)
        if not config.shared_head:
            name = f"lm_heads.{k}.weight" if vllm else f"{k}.{config.num_layers}.weight"
            table |= linear(f"heads/{k}/lm_head", (stored(name),))
    if config.shared_head:
        name = "lm_head.weight" if stored("lm_head.weight") in keys else "lm_heads.0.weight"
        table |= linear("lm_head", (stored(name),))
    return table


@dataclass(frozen=True)
class MedusaFiles:
    """Heads on disk, of which the config is read and fits their target."""

    path: Path
    config: MedusaConfig
    reader: Any


def find_medusa(model: str | Path, target: ModelConfig) -> MedusaFiles:
    """Where heads lie. Reads no weight. Errors as those of `MedusaConfig.from_hf`; FileNotFoundError or WeightsError where there
    is no folder of safetensors, nor one with `medusa_lm_head.pt`."""
    from checkpoints.huggingface import resolve
    from checkpoints.torch_file import open_folder

    path = resolve(model)
    reader = open_folder(path, PICKLED)
    return MedusaFiles(path, MedusaConfig.from_hf(path, target, keys=reader.keys()), reader)


def load_medusa(reader: Any, config: MedusaConfig, dtype: Any) -> MedusaHeads:
    """The heads of `config` with the weights of a checkpoint reader, on the default device. Heads beyond their number, which some
    published files have, are left out, and a warning says so.

    Raises:
      WeightsError: missing, extra or mis-shaped tensors, or a token_map that names no tokens; all are listed.
    """
    abstract, keys = MedusaHeads.abstract(config, dtype), reader.keys()
    leaves, table = named_leaves(abstract), key_table(config, keys)
    floats = {path: leaf for path, leaf in leaves.items() if path != "draft_ids"}
    numbers = {int(match[1]) for key in keys if (match := re.match(OF_HEAD + r"(\d+)\.", key))}
    further = sorted(numbers - {*range(config.num_heads)})
    ignore = [rf"{OF_HEAD}{k}\..*" for k in further]
    problems, ids = [], None
    if of_vllm(keys):
        ignore.append("token_map")  # of heads that know all tokens it says nothing
    if config.shared_head:
        ignore.append(r"(?:medusa_heads\.)?lm_heads\.\d+\.weight")  # copies
    if config.draft_vocab_size:
        ids, problems = _token_map(reader, config)
        for path in [path for path in table if path.endswith("lm_head/kernel")]:
            table[path] = _of_tokens(table[path], ids, config)
    problems += find_problems(reader, floats, table, ignore=ignore)
    if problems:
        listed = "\n  ".join(problems)
        raise WeightsError(f"the checkpoint does not fit {config.num_heads} Medusa heads ({len(problems)} problems):\n  {listed}")
    if further:
        logger.warning("of Medusa heads %d are used, as medusa_num_heads says; the file has %d", config.num_heads, max(further) + 1)
    loaded = dict(load_weights(reader, floats, table, ignore=ignore))
    if ids is not None:
        add_draft_ids(loaded, ids)
    return with_leaves(abstract, {path: loaded[path] for path in leaves})


def _token_map(reader: Any, config: MedusaConfig) -> tuple[np.ndarray, list[str]]:
    """(i32[draft_vocab_size]: the target's id of each token that the heads know; what is wrong)."""
    n, V = config.draft_vocab_size, config.vocab_size
    places = np.arange(n, dtype=np.int32)
    if "token_map" not in reader.keys():
        return places, [f"missing: token_map, the ids of the {n} tokens that truncated_vocab_size says"]
    ids = reader.read("token_map")
    if ids.shape != (n,) or not np.issubdtype(ids.dtype, np.integer):
        return places, [f"token_map is {ids.dtype}{list(ids.shape)}, not integers [{n}]"]
    if len(np.unique(ids)) < n or not 0 <= ids.min() <= ids.max() < V:
        return places, [f"token_map does not name {n} different tokens below {V}"]
    return ids.astype(np.int32), []


def _of_tokens(source: Source, ids: np.ndarray, config: MedusaConfig) -> Source:
    """Of a matrix to logits, which may be stored of all tokens."""

    def convert(arrays: list[np.ndarray]) -> np.ndarray:
        (weight,) = arrays
        return (weight[ids] if len(weight) == config.vocab_size else weight).T

    return Source(source.keys, convert)
