"""The sum of one array over the devices of a mesh's axis, inside `shard_map`.

`api` is the way in; `reference` is the spec.
"""

from kernels.all_reduce.api import all_reduce, resolve_backend

__all__ = ["all_reduce", "resolve_backend"]
