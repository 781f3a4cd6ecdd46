"""Messages that every backend of the sum over devices must add, as data, and the arrays built from them."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax import numpy as jnp


@dataclasses.dataclass(frozen=True)
class Case:
    """num_devices parts of a shape. kernel: whether the message is for the kernel, or XLA's whatever the backend."""

    name: str
    num_devices: int
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    kernel: bool = True


CASES = (
    Case("one_token", 8, (1, 1024)),
    Case("decode", 8, (8, 4096)),
    Case("largest_of_eight", 8, (128, 1024)),
    Case("too_large_for_eight", 8, (129, 1024), kernel=False),
    Case("largest_of_four", 4, (128, 2048)),
    Case("too_large_for_four", 4, (257, 1024), kernel=False),
    Case("two", 2, (3, 5120)),
    Case("six", 6, (2, 2, 512), dtype="float16"),
    Case("float32", 4, (8, 512), dtype="float32"),
    Case("not_whole_blocks", 4, (3, 576), kernel=False),
    Case("nothing", 4, (0, 1024), kernel=False),
    Case("integers", 4, (8, 1024), dtype="int32", kernel=False),
    Case("many_devices", 16, (8, 1024), kernel=False),
)


def build(case: Case, seed: int = 0) -> np.ndarray:
    """[num_devices, *shape]: parts whose sum depends on its order: the first and a middle one cancel, and are so large that float32
    rounds what is added between them, and nothing after."""
    rng = np.random.default_rng(seed)
    parts = rng.standard_normal((case.num_devices, *case.shape)) * 2.0 ** rng.integers(-10, 1, (case.num_devices, *case.shape))
    if case.num_devices > 2 and jnp.issubdtype(jnp.dtype(case.dtype), jnp.floating):
        parts[0] = (1 + rng.random(case.shape)) * 2.0 ** (14 if case.dtype == "float16" else 20)
        parts[case.num_devices // 2] = -parts[0]
    return parts.astype(jnp.dtype(case.dtype))
