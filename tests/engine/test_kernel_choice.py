"""Which kernels an engine takes on which GPU; none is at hand, so the GPU is assumed."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

import jaxserve
from jaxserve.engine import kernel_choice
from jaxserve.engine.kernel_choice import choose_kernels
from kernels import gpu
from kernels.cpu import library
from tests.dummy import CONFIG

HOPPER = gpu.Device(132, "NVIDIA H100 80GB HBM3", (9, 0))
AMPERE = gpu.Device(108, "NVIDIA A100-SXM4-80GB", (8, 0))
MODEL = dataclasses.replace(CONFIG, hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
SPARSE = {"sparse_layers": (0, 1), "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 128}


def choose(device, dtype="bfloat16", model=MODEL, **options: Any):
    options = {"skip_qualification": True} | options
    config = jaxserve.EngineConfig(**options)
    with gpu.assume(device):
        return choose_kernels(model, dtype, config)


@pytest.mark.parametrize(
    ("device", "dtype", "found"),
    [
        (HOPPER, "bfloat16", ("mosaic_sm90", "mosaic", "mosaic_sm90")),
        (HOPPER, "float16", ("mosaic_sm90", "mosaic", "xla")),
        (HOPPER, "float32", ("xla", "xla", "xla")),
        (AMPERE, "bfloat16", ("mosaic_portable", "mosaic", "xla")),
    ],
)
def test_auto(device, dtype, found):
    chosen = choose(device, dtype)
    assert (chosen.attention, chosen.layer.rotary, chosen.layer.matmul) == found
    assert chosen.layer.moe == "auto" and not chosen.layer.fuse_residuals


def test_a_card_is_asked_about_a_draft_that_attends_otherwise():
    def asked(draft) -> Any:
        plan = kernel_choice.kernel_plan(MODEL, "bfloat16", jaxserve.EngineConfig(), "gpu", draft)
        return (plan.asks["attention"].shapes or {}).get("draft")

    heads = {"num_query_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    others = dataclasses.replace(MODEL, num_heads=8)
    assert asked(others) == heads | {"sliding_windows": list(dict.fromkeys(MODEL.sliding_windows))}
    assert asked(dataclasses.replace(MODEL, num_layers=1, sliding_windows=(77,)))["sliding_windows"] == [77]
    assert asked(None) is None and asked(dataclasses.replace(MODEL, vocab_size=9)) is None


def test_a_backend_that_is_named():
    assert choose(HOPPER, matmul_backend="xla").layer.matmul == "xla"
    assert choose(HOPPER, attention_backend="xla").layer.rotary == "xla"
    with pytest.raises(NotImplementedError, match="mosaic_sm90 can't do a device: it needs compute capability 9.0, found 8.0"):
        choose(AMPERE, matmul_backend="mosaic_sm90")
    with pytest.raises(NotImplementedError, match="mosaic_sm90 can't do float16: it has bfloat16; use backend='xla'"):
        choose(HOPPER, "float16", matmul_backend="mosaic_sm90")
    odd = dataclasses.replace(MODEL, intermediate_size=200)
    assert choose(HOPPER, model=odd).layer.matmul == "xla"


@pytest.mark.skipif(library.load() is None, reason="needs the library that kernels/cpu/build.py makes")
def test_several_devices_of_a_cpu_take_its_kernels_where_bits_must_be_one_devices():
    def chosen(deterministic: str) -> tuple[str, str, str]:
        found = choose_kernels(CONFIG, "float32", jaxserve.EngineConfig(tensor_parallel_size=2, deterministic=deterministic))
        return found.attention, found.layer.rotary, found.layer.matmul

    assert chosen("always") == ("cpu", "cpu", "cpu") and chosen("bucket") == ("xla", "xla", "xla")


def test_a_mixture_of_experts():
    sparse = dataclasses.replace(MODEL, **SPARSE)
    assert choose(HOPPER, model=sparse).layer.moe == "mosaic_sm90"
    assert choose(AMPERE, model=sparse).layer.moe == "mosaic_portable"
    # Its dense matrices are the attention's: those of an MLP that no layer has do not count.
    assert choose(HOPPER, model=dataclasses.replace(sparse, intermediate_size=200)).layer.matmul == "mosaic_sm90"


def test_always_adds_to_the_residual_stream_in_the_kernel_and_needs_those_matrices_too():
    assert choose(HOPPER, deterministic="always").layer.fuse_residuals
    odd = dataclasses.replace(MODEL, num_heads=3, num_kv_heads=3, head_dim=96, hidden_size=192)  # o_proj [288, 192]
    assert choose(HOPPER, model=odd).layer.matmul == "mosaic_sm90"
    assert choose(HOPPER, model=odd, deterministic="always").layer.matmul == "xla"


def test_always_on_several_gpus_needs_the_kernel():
    """And columns of o_proj and down_proj that it can do: 128 of 32 devices are 4 each."""
    several: dict[str, Any] = {"deterministic": "always", "tensor_parallel_size": 2}
    assert choose(HOPPER, **several).layer.fuse_residuals
    lacking: tuple[dict[str, Any], ...] = ({"dtype": "float16"}, {"matmul_backend": "xla"}, {"tensor_parallel_size": 32})
    for lacks in lacking:
        with pytest.raises(NotImplementedError, match="needs matmul_backend='mosaic_sm90' on GPUs"):
            choose(HOPPER, **(several | lacks))
    assert choose(HOPPER, "float16", tensor_parallel_size=2).layer.matmul == "xla"


def test_what_the_qualification_leaves_out_is_passed_over(monkeypatch):
    left_out = {"attention": {}, "rotary_write": {"mosaic": "hung"}, "fused_matmul": {"mosaic_sm90": "bits differ"}}
    found = SimpleNamespace(left_out=lambda kernel: left_out.get(kernel, {}))
    monkeypatch.setattr(kernel_choice, "qualify_kernels", lambda *_, **__: found)
    chosen = choose(HOPPER)
    assert (chosen.attention, chosen.layer.rotary, chosen.layer.matmul) == ("mosaic_sm90", "xla", "xla")
    left_out["attention"] = {"mosaic_sm90": "wrong values"}
    assert choose(HOPPER).attention == "mosaic_portable"
