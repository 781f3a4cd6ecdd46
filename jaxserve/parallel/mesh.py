"""The devices that share a model, as a mesh of one axis.

Owns which devices these are and the errors of who asks for what is not there. Knows nothing of models.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXIS = "tp"  # heads, columns of the MLP, experts and the vocabulary are cut along it


def make_mesh(tensor_parallel_size: int = 1, mesh: Mesh | None = None) -> Mesh | None:
    """A mesh of axis "tp" over the first devices, or over those of a user's mesh. None: JAX's default device alone.

    mesh: has an axis "tp", and no other of more than one device. Its devices are used in its order; of what kind its axes are
      (explicit, auto) does not matter.

    Raises:
      ValueError: more devices than there are, a mesh without the axis, or one of another size than tensor_parallel_size says (1
        says nothing).
      NotImplementedError: a mesh with another axis of more than one device, or with devices of another process.
    """
    if mesh is None:
        return None if tensor_parallel_size == 1 else Mesh(_first_devices(tensor_parallel_size), (AXIS,), axis_types=_AUTO)
    shape = dict(mesh.shape)
    shown = ", ".join(f"{name}={size}" for name, size in shape.items())
    if AXIS not in shape:
        raise ValueError(f"mesh has the axes {shown or 'none'}; it needs one named {AXIS!r}, over which the model is cut")
    if tensor_parallel_size not in (1, shape[AXIS]):
        raise ValueError(
            f"{tensor_parallel_size=} contradicts the mesh, whose axis {AXIS!r} has {shape[AXIS]}: leave one of them out"
        )
    if math.prod(shape.values()) != shape[AXIS]:
        raise NotImplementedError(
            f"mesh has the axes {shown}; an engine runs on {AXIS!r} alone: give a mesh of one replica's devices"
        )
    devices = mesh.devices.reshape(-1)
    if any(d.process_index != jax.process_index() for d in devices):
        raise NotImplementedError("mesh has devices of another process; an engine runs in one process")
    return None if list(devices) == jax.devices()[:1] else Mesh(devices, (AXIS,), axis_types=_AUTO)


_AUTO = (AxisType.Auto,)


def _first_devices(count: int) -> np.ndarray:
    devices = jax.local_devices()
    if count > len(devices):
        kinds = ", ".join(sorted({d.device_kind for d in devices}))
        raise ValueError(
            f"tensor_parallel_size={count} needs {count} devices, and this process has {len(devices)} ({kinds}): lower it"
        )
    return np.array(devices[:count])
