"""Fits the weights of a trainer's tree to the engine's flat leaves, and uses the trainer's own arrays wherever they fit.

Owns the list of what does not fit, and the conversions: cast, reshape, transpose, fuse. models/trainer_keys.py has the names. Knows
nothing of engines or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jaxserve.models import ModelConfig
from jaxserve.models.trainer_keys import Part, find_name, parts

FLOAT_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Fitted:
    """One of our weights and the arrays that it is made of, which are parts along the last axis of [in, out]."""

    path: str
    target: jax.ShapeDtypeStruct
    arrays: list[Any]
    shapes: list[tuple[int, ...]]  # of the parts, [in, out] or [out]
    turned: list[bool]  # whether each array is [out, in]
    target_turned: bool  # whether the target is [out, in]

    @property
    def is_as_given(self) -> bool:
        """Whether it is one array, of the right shape, orientation and dtype."""
        if len(self.arrays) > 1 or self.turned[0] != self.target_turned:
            return False
        return (self.arrays[0].shape, self.arrays[0].dtype) == (self.target.shape, self.target.dtype)


def flat_weights(weights: Any) -> dict[str, Any]:
    """{path: leaf} of a Flax NNX module or State, Linen variables, or any pytree of arrays; paths joined by "/".

    Of a module only the `nnx.Param`s are taken. Variables and boxed values (`nn.Partitioned`) are unwrapped. Nothing is copied.
    """
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights, nnx.Param)
    if isinstance(weights, nnx.State):
        return {"/".join(map(str, path)): _unwrapped(leaf) for path, leaf in nnx.to_flat_state(weights)}
    found, _ = jax.tree_util.tree_flatten_with_path(weights, is_leaf=_is_wrapped)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): _unwrapped(leaf) for path, leaf in found}


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, nnx.Variable) or hasattr(x, "unbox")


def _unwrapped(x: Any) -> Any:
    if isinstance(x, nnx.Variable):
        return x.get_value()
    return x.unbox() if hasattr(x, "unbox") else x


def common_dtype(weights: Any) -> str:
    """The dtype that all leaves have. Raises ValueError where they have several, or one that is not supported."""
    found = sorted({str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in flat_weights(weights).values()})
    if len(found) == 1 and found[0] in FLOAT_DTYPES:
        return found[0]
    raise ValueError(f"the weights' dtypes are {', '.join(found) or 'none'}: give dtype=, one of {', '.join(FLOAT_DTYPES)}")


def fit(weights: Any, config: ModelConfig, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> list[Fitted]:
    """The arrays that each weight of `abstract` is made of, in its order. Reads no data.

    weights: the trainer's tree, as `flat_weights` takes it. abstract: path -> shape and dtype of each of `Decoder`'s weights.

    Raises:
      ValueError: leaves are missing, unknown, of the wrong shape, of a dtype that is not a float, or given twice. Or they are
        deleted: their buffer was donated to a computation. The message lists all of them.
    """
    given, problems = {}, []
    for theirs, leaf in flat_weights(weights).items():
        path, transposed = find_name(theirs)
        if path in given:
            problems.append(f"twice: {theirs} and {given[path][0]} both stand for {path}")
        given[path] = (theirs, leaf, transposed)
    fitted, used = [], set()
    for path, target in abstract.items():
        logical, target_turned = find_name(path)
        ways = parts(config, logical, target.shape[::-1] if target_turned else target.shape)
        way = next((w for w in ways if any(part.path in given for part in w)), ways[0])
        missing = [part.path for part in way if part.path not in given]
        used |= {part.path for part in way} - set(missing)
        problems += [f"missing: {name} {list(part.shape)}" for part in way if (name := part.path) in missing]
        problems += [p for part in way if part.path in given for p in _misfits(part, *given[part.path])]
        if not missing:
            arrays, turned = [given[part.path][1] for part in way], [given[part.path][2] for part in way]
            fitted.append(Fitted(path, target, arrays, [part.shape for part in way], turned, target_turned))
    problems += [f"unknown: {given[path][0]} has no place in the model" for path in given if path not in used]
    if problems:
        raise ValueError(f"the weights do not fit the model ({len(problems)} problems):\n  " + "\n  ".join(problems))
    return fitted


def _misfits(part: Part, name: str, leaf: Any, transposed: bool) -> list[str]:
    """Messages on why a leaf can't be that part; none where it can."""
    if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, Tracer):
        return [f"type: {name} is a {type(leaf).__name__}, not an array of numbers"]
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return [f"deleted: {name} was donated to a computation or deleted; give the array that came out of it"]
    problems = []
    if str(leaf.dtype) not in FLOAT_DTYPES:
        problems.append(f"dtype: {name} is {leaf.dtype}; only {', '.join(FLOAT_DTYPES)} can be used")
    wanted = [part.shape[::-1]] if transposed else list(dict.fromkeys([part.shape, part.by_heads]))
    if leaf.shape not in wanted:
        either = " or ".join(str(list(shape)) for shape in wanted)
        problems.append(f"shape: {name} is {list(leaf.shape)}, not {either} (for {part.path})")
    return problems


def placed(fitted: Sequence[Fitted], device: Any) -> Iterator[jax.Array]:
    """Yields each weight on `device`: the trainer's own array where shape, dtype and placement are right, else a new one.

    A conversion is compiled once for each shape. A second tree of the same shapes compiles nothing.
    """
    for leaf in fitted:
        arrays = [_on_device(x, device) for x in leaf.arrays]
        if leaf.is_as_given:
            yield arrays[0]
        else:
            yield _made_of(arrays, tuple(leaf.shapes), tuple(leaf.turned), leaf.target_turned, leaf.target.dtype)


def _on_device(x: Any, device: Any) -> jax.Array:
    if isinstance(x, np.ndarray):
        x = np.array(x)  # a copy: a CPU device would share the array, and its owner may write to it later
    elif x.sharding.is_equivalent_to(jax.sharding.SingleDeviceSharding(device), x.ndim):
        return x
    return jax.device_put(x, device)


def made_of(
    arrays: Sequence[Any],
    shapes: tuple[tuple[int, ...], ...],
    turned: tuple[bool, ...],
    target_turned: bool,
    dtype: Any,
    library: Any = jnp,  # jax.numpy or numpy
) -> Any:
    """One weight of its arrays, as `Fitted` has them."""
    straight = [x.T if t else x for x, t in zip(arrays, turned, strict=True)]
    parts = [x.reshape(s).astype(dtype) for x, s in zip(straight, shapes, strict=True)]
    made = library.concatenate(parts, axis=-1)
    return made.T if target_turned else made


_made_of = jax.jit(made_of, static_argnames=("shapes", "turned", "target_turned", "dtype"))
