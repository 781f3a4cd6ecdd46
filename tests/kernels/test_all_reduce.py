"""Which backend sums a message, what is refused, and that the kernel and the specification add in one order. Its compilation is
aot_check's; sums on devices are tests/parallel's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxserve.parallel.shard import ALONE, Shard
from kernels import gpu
from kernels.all_reduce import all_reduce, mosaic, reference, resolve_backend
from kernels.all_reduce.cases import CASES, build

H100 = "NVIDIA H100 80GB HBM3"


def traced(case, backend: str) -> str:
    """The program of one device."""
    mesh = AbstractMesh((case.num_devices,), ("tp",), axis_types=(AxisType.Auto,))
    shard = Shard("tp", case.num_devices, backend)
    function = jax.shard_map(shard.sum, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return str(jax.make_jaxpr(function)(jax.ShapeDtypeStruct(case.shape, case.dtype)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_messages_that_are_not_for_the_kernel_are_xlas(case):
    with gpu.assume_sm90(132, H100):
        ours, xlas = traced(case, "mosaic"), traced(case, "xla")
    assert ("one_shot_all_reduce" in ours, "psum" in ours) == (case.kernel, not case.kernel)
    assert "one_shot_all_reduce" not in xlas and "psum" in xlas


def test_auto_is_xla_everywhere_and_a_device_that_can_not_is_told_what_it_lacks():
    assert resolve_backend("auto") == "xla" and resolve_backend("in_order") == "in_order"
    with gpu.assume_sm90(132, H100):
        assert resolve_backend("auto") == "xla" and resolve_backend("mosaic") == "mosaic"
        with pytest.raises(NotImplementedError, match="in_order can't do a device: it needs a CPU, found gpu"):
            resolve_backend("in_order")
    with pytest.raises(NotImplementedError, match="mosaic can't do a device: it needs a GPU of compute capability 9.0, found cpu"):
        resolve_backend("mosaic")
    with gpu.interpreted(), pytest.raises(NotImplementedError, match="interpreter has no remote references"):
        resolve_backend("mosaic")
    with pytest.raises(ValueError, match="backend='nccl' must be one of auto, xla, in_order, mosaic"):
        all_reduce(jnp.zeros(4), axis="tp", num_devices=2, backend="nccl")
    assert ALONE.sum(jnp.ones(1)) == 1


@pytest.mark.parametrize("case", [case for case in CASES if case.kernel], ids=lambda case: case.name)
def test_the_kernel_adds_as_the_specification_does(case):
    """Bit for bit, and each part once: only a card can say that they are the other devices'."""
    parts, read = build(case), []

    def part(device: int) -> jax.Array:
        read.append(device)
        return jnp.asarray(parts[device])

    found = np.asarray(mosaic.in_order(part, case.num_devices).astype(parts.dtype))
    assert (found == reference.all_reduce(parts)).all() and read == list(range(case.num_devices))


def test_the_specification_adds_from_the_first_device_to_the_last():
    """Written out: the small part is lost beside the first one, and another order would keep it."""
    parts = np.array([[2.0**25], [1.0], [-(2.0**25)]], np.float32)
    assert reference.all_reduce(parts) == [0.0] and reference.all_reduce(parts[[0, 2, 1]]) == [1.0]
    ordered = [case for case in CASES if case.kernel and case.num_devices > 2]
    for case in ordered:
        parts = build(case)
        assert (reference.all_reduce(parts) != reference.all_reduce(parts[::-1])).any(), "an order shows"
