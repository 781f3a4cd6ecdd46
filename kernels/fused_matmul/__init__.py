"""A layer's matmuls with what stands around them: the norm of the rows before, bias, gate or residual after.

`api` is the way in; `reference` is the spec.
"""

from kernels.fused_matmul.api import fused_matmul, resolve_backend

__all__ = ["fused_matmul", "resolve_backend"]
