"""The fused matmul's specification, in numpy: float64, nothing rounded."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def fused_matmul(
    x: Array,  # [T, D]
    w: Array,  # [D, F]
    scale: Array | None,  # [D]
    bias: Array | None,  # [F]
    residual: Array | None,  # [T, F]
    *,
    eps: float,
    gated: bool,
) -> Array:  # float64 [T, F], or [T, F / 2]
    """See api.fused_matmul."""
    x = x.astype(np.float64)
    if scale is not None:
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * scale.astype(np.float64)
    y = x @ w.astype(np.float64)
    y = y if bias is None else y + bias.astype(np.float64)
    y = y if residual is None else y + residual.astype(np.float64)
    if not gated:
        return y
    gate, up = np.split(y, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up
