"""What every backend of the fused matmul must get right, as data, with tolerances and the arrays built from it."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from jax import numpy as jnp

from kernels.fused_matmul import reference

# Of the largest wanted value, against float64 on the same rounded inputs: the result's rounding, and of what is multiplied.
TOLERANCE = {"float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """T rows times [D, F]. norm, bias, residual: whether they are there."""

    name: str
    T: int
    D: int
    F: int
    norm: bool = False
    bias: bool = False
    residual: bool = False
    gated: bool = False
    dtype: str = "bfloat16"


# 64 of D are a stage. Deep ones fill every slot of a ring of eight stages twice.
CASES = (
    Case("plain", 8, 128, 64),
    Case("one_row", 1, 64, 32, norm=True),
    Case("qkv", 8, 256, 96, norm=True),
    Case("qkv_bias", 24, 192, 128, norm=True, bias=True),
    Case("gate_up", 16, 256, 192, norm=True, gated=True),
    Case("gate_up_bias", 40, 128, 128, norm=True, bias=True, gated=True),
    Case("gate_up_plain", 8, 128, 64, gated=True),
    Case("down", 8, 320, 64, residual=True),
    Case("o_bias", 72, 128, 160, bias=True, residual=True),
    Case("deep", 8, 1088, 64, norm=True),
    Case("deep_down", 16, 1152, 32, residual=True),
    Case("deep_gate_up", 8, 1088, 128, norm=True, gated=True),
    Case("prefill_qkv", 200, 256, 384, norm=True),
    Case("prefill_gate_up", 328, 320, 512, norm=True, gated=True),
    Case("prefill_down", 136, 448, 256, residual=True),
    Case("float16", 8, 128, 64, norm=True, gated=True, dtype="float16"),
    Case("float32", 9, 128, 64, norm=True, bias=True, residual=True, dtype="float32"),
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """numpy arrays; see api.fused_matmul."""

    x: np.ndarray
    w: np.ndarray
    scale: np.ndarray | None
    bias: np.ndarray | None
    residual: np.ndarray | None

    @property
    def options(self) -> dict[str, np.ndarray]:
        """What is there beside x and w."""
        named = {"scale": self.scale, "bias": self.bias, "residual": self.residual}
        return {name: array for name, array in named.items() if array is not None}


def build(case: Case, seed: int = 0) -> Batch:
    """Random data. Rows differ in size, as hidden states do; where they are normed, one is large."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    x = rng.standard_normal((case.T, case.D)) * rng.uniform(0.2, 3, (case.T, 1))
    if case.norm:
        x[-1] *= 200
    w = _matrix(case.D, case.F, dtype, seed)
    scale = (1 + 0.3 * rng.standard_normal(case.D)).astype(dtype) if case.norm else None
    bias = rng.standard_normal(case.F).astype(dtype) if case.bias else None
    residual = (rng.standard_normal((case.T, case.F)) * 2).astype(dtype) if case.residual else None
    return Batch(x.astype(dtype), w, scale, bias, residual)


@functools.lru_cache(maxsize=1)  # a model's are large, and the same for several numbers of rows
def _matrix(D: int, F: int, dtype: np.dtype, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed + 1).standard_normal((D, F), np.float32) / np.sqrt(np.float32(D))).astype(dtype)


def expected(case: Case, batch: Batch) -> np.ndarray:
    """float64."""
    return reference.fused_matmul(batch.x, batch.w, batch.scale, batch.bias, batch.residual, eps=EPS, gated=case.gated)


def faults(case: Case, batch: Batch, out: np.ndarray) -> list[str]:
    """What is wrong with a result."""
    want = expected(case, batch)
    error = np.abs(out.astype(np.float64) - want)
    wrong = ~(error <= TOLERANCE[case.dtype] * np.abs(want).max())
    return [f"{wrong.sum()} of {wrong.size} values are wrong, the worst by {error[wrong].max():.3g}"] if wrong.any() else []
