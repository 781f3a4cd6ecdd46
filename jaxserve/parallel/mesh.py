"""The devices that share a model, as a mesh of one axis.

Owns which devices these are and the errors of who asks for what is not there. Knows nothing of models.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXIS = "tp"  # heads, columns of the MLP, experts and the vocabulary are cut along it
STAGES = "pp"  # of a user's mesh: each entry of it is a stage of a pipeline, with a mesh of its own here


def make_mesh(tensor_parallel_size: int = 1, mesh: Mesh | None = None, *, all_hosts: bool = False) -> Mesh | None:
    """A mesh of axis "tp" over the first devices, or over those of a user's mesh. None: JAX's default device alone.

    mesh: has an axis "tp", and no other of more than one device. Its devices are used in its order; of what kind its axes are
      (explicit, auto) does not matter.
    all_hosts: the devices are those of all processes of this one's group, and none of them is without one.

    Raises:
      ValueError: more devices than there are, a mesh without the axis, or one of another size than tensor_parallel_size says (1
        says nothing).
      NotImplementedError: a mesh with another axis of more than one device, or with devices of another process.
    """
    if mesh is None:
        if tensor_parallel_size == 1 and not all_hosts:
            return None
        found = _devices_of_all(tensor_parallel_size) if all_hosts else _first_devices(tensor_parallel_size)
        return Mesh(found, (AXIS,), axis_types=_AUTO)
    made = _mesh_of(mesh, tensor_parallel_size, all_hosts)
    if all_hosts:
        _check_hosts(mesh)
        return made
    return None if list(made.devices) == jax.local_devices()[:1] else made


def _mesh_of(mesh: Mesh, tensor_parallel_size: int, all_hosts: bool) -> Mesh:
    """That of a user's mesh of one stage. Errors as `make_mesh`, but that hosts may have no device of it."""
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
    made = Mesh(mesh.devices.reshape(-1), (AXIS,), axis_types=_AUTO)
    if not all_hosts and spans_hosts(made):
        raise NotImplementedError("mesh has devices of another process: join_hosts() makes the group that runs such an engine")
    return made


def spans_hosts(mesh: Mesh) -> bool:
    """Whether some of its devices belong to other processes."""
    return any(d.process_index != jax.process_index() for d in mesh.devices.flat)


def is_here(mesh: Mesh) -> bool:
    """Whether some of its devices belong to this process."""
    return any(d.process_index == jax.process_index() for d in mesh.devices.flat)


def stage_meshes(
    pipeline_parallel_size: int = 1, tensor_parallel_size: int = 1, mesh: Mesh | None = None, *, all_hosts: bool = False
) -> tuple[Mesh, ...]:
    """A mesh of axis "tp" for each stage of a pipeline. One stage is `make_mesh`'s, and () where that is None: JAX's default device
    alone. Stage s has the devices from s * tensor_parallel_size on.

    mesh: as `make_mesh`'s; its axis "pp", if it has one, says which devices are which stage's. all_hosts: as `make_mesh`'s, of all
      stages together: a stage's devices may be of one process or of several.

    Raises:
      ValueError: as `make_mesh`; a mesh whose axis "pp" is of another size than pipeline_parallel_size says (1 says nothing).
      NotImplementedError: as `make_mesh`.
    """
    names = () if mesh is None else mesh.axis_names
    num_stages = pipeline_parallel_size
    if mesh is not None:
        num_stages = dict(mesh.shape).get(STAGES, 1)
        if pipeline_parallel_size not in (1, num_stages):
            raise ValueError(
                f"{pipeline_parallel_size=} contradicts the mesh, whose axis {STAGES!r} has {num_stages}: leave one of them out"
            )
    if num_stages == 1:
        made = make_mesh(tensor_parallel_size, mesh, all_hosts=all_hosts)
        return () if made is None else (made,)
    if mesh is None:
        found_devices = (_devices_of_all if all_hosts else _first_devices)(tensor_parallel_size, num_stages)
        return tuple(Mesh(each, (AXIS,), axis_types=_AUTO) for each in found_devices.reshape(num_stages, -1))
    axis, rest = names.index(STAGES), tuple(name for name in names if name != STAGES)
    parts = [Mesh(np.take(mesh.devices, stage, axis), rest) for stage in range(num_stages)]
    found = tuple(_mesh_of(part, tensor_parallel_size, all_hosts) for part in parts)
    if all_hosts:
        _check_hosts(mesh)
    return found


_AUTO = (AxisType.Auto,)


def _devices_of_all(count: int, num_stages: int = 1) -> np.ndarray:
    """`count` devices for each stage, as many of each process, the first process's first."""
    devices, num_hosts, total = jax.devices(), jax.process_count(), count * num_stages
    here = f"{num_hosts} hosts with {len(devices)} devices"
    asked = f"tensor_parallel_size={count}"
    if num_stages > 1:
        asked = f"pipeline_parallel_size={num_stages} with {asked}, {total} devices,"
    if total % num_hosts or total > len(devices):
        raise ValueError(f"{asked} must be a multiple of the number of hosts, and there are {here}")
    of_host = [[d for d in devices if d.process_index == host_id][: total // num_hosts] for host_id in range(num_hosts)]
    found = [device for of_one in of_host for device in of_one]
    if len(found) < total:
        raise ValueError(f"{asked} takes {total // num_hosts} devices of each host; there are {here}")
    return np.array(found)


def _check_hosts(mesh: Mesh) -> None:
    idle = set(range(jax.process_count())) - {d.process_index for d in mesh.devices.flat}
    if idle:
        shown = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"the mesh, with the axes {shown}, leaves host {min(idle)} without a device: all hosts of a group take part"
        )


def _first_devices(count: int, num_stages: int = 1) -> np.ndarray:
    devices = jax.local_devices()
    if count * num_stages > len(devices):
        kinds = ", ".join(sorted({d.device_kind for d in devices}))
        stages = "" if num_stages == 1 else f"pipeline_parallel_size={num_stages} with "
        raise ValueError(
            f"{stages}tensor_parallel_size={count} needs {count * num_stages} devices, and this process has {len(devices)} "
            f"({kinds}): lower it"
        )
    return np.array(devices[: count * num_stages])
