"""Medusa heads: what each says of one token further on, from a target's last hidden state. Their config, module and table of keys.

Medusa (Cai et al., 2401.10774, section 2.1.1): head k is a few blocks x + SiLU(W x + b), and a matrix to logits. It reads the state
that the target's own head reads, after the final norm, and says the token k + 1 places behind the one that this head says.

Read are the folders that its authors publish: config.json and `medusa_lm_head.pt`, or the same tensors as safetensors. Knows
nothing of engines.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.weights import Source, WeightsError, find_problems, load_weights
from jaxserve.models.config import ModelConfig, read_json
from jaxserve.models.decoder import named_leaves, with_leaves
from jaxserve.models.hf_keys import as_is, linear
from jaxserve.models.layers import Linear

logger: logging.Logger = logging.getLogger("jaxserve")

PICKLED = "medusa_lm_head.pt"  # what its authors call the file


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The sizes of Medusa heads. num_layers: blocks of each. hidden_size, vocab_size: the target's."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, target: ModelConfig) -> MedusaConfig:
        """Reads the heads' config.json. What it does not say of sizes is the target's.

        Raises:
          ValueError: numbers of heads or layers that are missing or out of range, or sizes other than the target's; all are listed.
        """
        hf = read_json(source, "config.json")
        sizes = {name: hf.get(name, getattr(target, name)) for name in ("hidden_size", "vocab_size")}
        numbers = {name: hf.get(f"medusa_{name}") for name in ("num_heads", "num_layers")}
        found = []
        for name, least in (("num_heads", 1), ("num_layers", 0)):
            number = numbers[name]
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                found.append(f"its medusa_{name} is {number!r}, which must be an integer of at least {least}")
        if not found:
            config = cls(**numbers, **sizes)
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

    def __init__(self, size: int, **kind: Any):
        self.linear: Linear = Linear(size, size, use_bias=True, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(self.linear(x))


class MedusaHead(nnx.Module):
    """One head: [..., D] to f32[..., V]."""

    def __init__(self, config: MedusaConfig, **kind: Any):
        self.blocks: nnx.List[MedusaBlock] = nnx.List(MedusaBlock(config.hidden_size, **kind) for _ in range(config.num_layers))
        self.lm_head: Linear = Linear(config.hidden_size, config.vocab_size, use_bias=False, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return jnp.dot(x, self.lm_head.kernel[...], preferred_element_type=jnp.float32)


class MedusaHeads(nnx.Module):
    """All heads of a target, `heads[k]` for the token k + 1 places behind the next one.

    Weights by path: heads/k/blocks/i/linear/kernel [D, D] and bias [D], heads/k/lm_head/kernel [D, V].
    """

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs, param_dtype: Any = jnp.bfloat16):
        self.config = config
        kind = {"rngs": rngs, "param_dtype": param_dtype}
        self.heads: nnx.List[MedusaHead] = nnx.List(MedusaHead(config, **kind) for _ in range(config.num_heads))

    @classmethod
    def abstract(cls, config: MedusaConfig, param_dtype: Any) -> MedusaHeads:
        """The module with ShapeDtypeStructs for weights."""
        return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), param_dtype=param_dtype))


def key_table(config: MedusaConfig) -> dict[str, Source]:
    """{our path: Source}: a head is a sequence of blocks and its matrix to logits, numbered on."""
    table: dict[str, Source] = {}
    for k in range(config.num_heads):
        for i in range(config.num_layers):
            table |= linear(f"heads/{k}/blocks/{i}/linear", (f"{k}.{i}.linear.weight",))
            table[f"heads/{k}/blocks/{i}/linear/bias"] = Source((f"{k}.{i}.linear.bias",), as_is)
        table |= linear(f"heads/{k}/lm_head", (f"{k}.{config.num_layers}.weight",))
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
    from checkpoints.huggingface import SafetensorsReader, resolve
    from checkpoints.torch_file import TorchReader

    path = resolve(model)
    config = MedusaConfig.from_hf(path, target)
    pickled = path / PICKLED
    is_pickled = pickled.is_file() and not any(path.glob("*.safetensors"))
    return MedusaFiles(path, config, TorchReader(pickled) if is_pickled else SafetensorsReader(path))


def load_medusa(reader: Any, config: MedusaConfig, dtype: Any) -> MedusaHeads:
    """The heads of `config` with the weights of a checkpoint reader, on the default device. Heads beyond their number, which some
    published files have, are left out, and a warning says so.

    Raises:
      WeightsError: missing, extra or mis-shaped tensors; all are listed.
    """
    abstract = MedusaHeads.abstract(config, dtype)
    leaves, table = named_leaves(abstract), key_table(config)
    further = sorted({int(key.partition(".")[0]) for key in reader.keys() if re.match(r"\d+\.", key)} - {*range(config.num_heads)})
    ignore = [rf"{k}\..*" for k in further]
    problems = find_problems(reader, leaves, table, ignore=ignore)
    if problems:
        listed = "\n  ".join(problems)
        raise WeightsError(f"the checkpoint does not fit {config.num_heads} Medusa heads ({len(problems)} problems):\n  {listed}")
    if further:
        logger.warning("of Medusa heads %d are used, as medusa_num_heads says; the file has %d", config.num_heads, max(further) + 1)
    loaded = load_weights(reader, leaves, table, ignore=ignore)
    return with_leaves(abstract, {path: loaded[path] for path in leaves})
