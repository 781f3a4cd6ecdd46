"""What stands between the projection of a layer and its attention: norms of heads, rotary embedding, keys and values into pages.

`api` is the way in; `reference` is the spec.
"""

from kernels.rotary_write.api import resolve_backend, rotary_write

__all__ = ["resolve_backend", "rotary_write"]
