"""The entry to the sum over devices: it looks up the backend, and takes XLA's where a message is not for a kernel.

Owns the contract and its errors. The backends are the rows of `kernels.backends.ALL_REDUCE`.
"""

from __future__ import annotations

import jax

from kernels.backends import ALL_REDUCE


def all_reduce(x: jax.Array, *, axis: str, num_devices: int, backend: str = "auto") -> jax.Array:
    """The sum of every device's x, on every device; called inside `shard_map` over a mesh of the one axis.

    "xla" is `lax.psum`. On GPUs NCCL adds, in an order that follows the message's size and the topology. On CPU devices of one
    process XLA adds as "in_order" does; over processes gloo adds, around a ring.
    "in_order" gathers all parts, on CPUs, and "mosaic" reads them, on Hopper. Both add in float32 from the first device to the
    last, rounding once: an order that depends on nothing. A message that they are not for (`fits`: its size, its dtype, the
    devices) is summed by "xla"; shapes decide that, when a program is traced.

    Args:
        x: any shape and dtype, the same on all devices.
        axis, num_devices: the mesh's axis, and its size.
        backend: one of `kernels.backends.ALL_REDUCE.names`; "auto" is "xla".

    Raises: as `resolve_backend`.
    """
    row = ALL_REDUCE[resolve_backend(backend)]
    if not row.functions.fits(x.shape, x.dtype, num_devices):
        row = ALL_REDUCE["xla"]
    with jax.named_scope(f"all_reduce_{row.name}"):
        return row.functions.all_reduce(x, axis=axis, num_devices=num_devices)


def resolve_backend(backend: str) -> str:
    """The backend that runs.

    Raises:
        ValueError: no such backend.
        NotImplementedError: the device can't; the message says what it lacks.
    """
    return ALL_REDUCE.resolve(backend, lambda row: row.functions.lacks())
