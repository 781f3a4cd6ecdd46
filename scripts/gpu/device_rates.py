"""What the card at hand does at its best: bytes a second of a large copy, floating-point operations a second of a large matmul.

Every percentage in a check is of these two, measured in the same process: a data sheet's figures are never reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.gpu.figures import Figures

_ELEMENTS, _SIDE = 1 << 29, 8192  # 1 GiB of bf16; 8192^3
_DRY_ELEMENTS, _DRY_SIDE = 1 << 14, 128


@dataclass(frozen=True)
class Rates:
    """copy: bytes read plus bytes written a second. matmul: operations a second, bf16 in, float32 sums."""

    copy: float
    matmul: float


def measure(figures: Figures) -> Rates:
    """Measures and records both."""
    import jax
    import jax.numpy as jnp

    n, side = (_DRY_ELEMENTS, _DRY_SIDE) if figures.dry_run else (_ELEMENTS, _SIDE)
    normal = jax.jit(lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), static_argnums=1)
    x = normal(0, (n,))
    add = jax.jit(lambda x: x + jnp.bfloat16(1))
    copy = 2 * x.nbytes / figures.seconds_per_call(lambda i: add(x), jax.block_until_ready, calls=10)
    figures.record("copy bandwidth", copy / 1e9, "GB/s", what="x + 1, bytes read and written", mib=x.nbytes / 2**20)
    a, b = normal(1, (side, side)), normal(2, (side, side))
    matmul = jax.jit(lambda a, b: a @ b)
    rate = 2 * side**3 / figures.seconds_per_call(lambda i: matmul(a, b), jax.block_until_ready, calls=10)
    figures.record("matmul rate", rate / 1e12, "TFLOP/s", what=f"bf16 {side}^3")
    return Rates(copy, rate)
