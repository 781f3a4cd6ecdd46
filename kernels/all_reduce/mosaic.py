"""The "mosaic" backend of the sum over devices: one shot over NVLink, for messages of a decode.

A device reads the parts of all others out of their memory, and adds them in one order. It sends num_devices - 1 messages where a
ring sends less than two, but waits for one exchange where a ring waits for 2 (num_devices - 1). The barrier before the kernel is
JAX's own: every device's part is there. The one behind it is the kernel's: a part is not freed while another device reads it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels import gpu
from kernels.all_reduce.in_order import in_order

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
THREADS = 128
_VECTOR_BYTES = 16  # that a thread reads at once
# Most bytes of a message, by the most devices: up to which vLLM's custom all-reduce is one-shot too on devices that NVLink joins
# all to all (csrc/custom_all_reduce.cuh; any size on two, where both ways send as much: there ours ends where blocks get many).
_MOST_BYTES = ((4, 512 * 1024), (8, 256 * 1024))


def lacks() -> str | None:
    """What the device lacks for the kernel, in words; None if it can."""
    if gpu.is_interpreted():
        return "other devices: Pallas' interpreter has no remote references"
    missing = gpu.missing_for_sm90()
    return None if missing is None else f"a device: it needs {missing}"


def fits(shape: tuple[int, ...], dtype: Any, num_devices: int) -> bool:
    """Whether a message is for the kernel: floats, in whole vectors for all threads of each block, and not too many bytes."""
    if jnp.dtype(dtype) not in DTYPES or num_devices < 2:
        return False
    size = math.prod(shape)
    most = next((most for devices, most in _MOST_BYTES if num_devices <= devices), 0)
    return size > 0 and size % block_size(dtype) == 0 and size * jnp.dtype(dtype).itemsize <= most


def block_size(dtype: Any) -> int:
    """Entries of a thread block: a vector for each thread."""
    return THREADS * _VECTOR_BYTES // jnp.dtype(dtype).itemsize


def all_reduce(x: jax.Array, *, axis: str, num_devices: int) -> jax.Array:
    """See api.all_reduce; x is one that fits."""
    columns = block_size(x.dtype)
    parts = x.reshape(-1, columns)
    layout = gpu.strided(columns, columns // THREADS)

    def one_shot_all_reduce(x_ref, y_ref, done):  # [blocks, columns] both
        block = lax.axis_index("block")
        total = in_order(
            lambda device: gpu.load(gpu.remote_ref(x_ref, jnp.int32(device)).at[block], layout=layout),
            num_devices,
        )
        y_ref[block] = total.astype(y_ref.dtype)
        # Every device's block of this number arrives at every device, and waits for all of them.
        for device in range(num_devices):
            gpu.semaphore_signal(done, device_id=jnp.int32(device))
        gpu.semaphore_wait(done, num_devices, decrement=False)

    total = gpu.kernel(
        one_shot_all_reduce,
        out_type=jax.ShapeDtypeStruct(parts.shape, x.dtype),
        grid={"block": len(parts)},
        scratch_types=[gpu.SEMAPHORE],
    )(parts)
    return total.reshape(x.shape)
