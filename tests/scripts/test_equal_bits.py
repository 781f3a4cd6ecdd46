"""scripts.aot.equal_bits: faults of programs that must sum in one order, from samples of what XLA prints."""

import pytest

from scripts.aot.equal_bits import order_faults, read_program

TILE = (
    '"fusion_backend_config":{"block_level_fusion_config":{"num_ctas":1,"num_stages":4,"num_warps":"4",'
    '"output_tiles":[{"sizes":["64","64"]}],"waves_per_eu":0},"kind":"__triton_nested_gemm_fusion"}'
)
HLO = f"""HloModule jit_body
%gemm_computation (parameter_0: bf16[8,1024], parameter_1: bf16[1024,4096]) -> bf16[8,4096] {{
  %parameter_0 = bf16[8,1024]{{1,0}} parameter(0)
  %parameter_1 = bf16[1024,4096]{{1,0}} parameter(1)
  ROOT %dot = bf16[8,4096]{{1,0}} dot(%parameter_0, %parameter_1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="jit(body)/qkv/dot_general"}}, backend_config={{"sizes":["64"]}}
}}
%fused_reduce (param_0: bf16[8,1024]) -> f32[8] {{
  %param_0 = bf16[8,1024]{{1,0}} parameter(0)
  %square = f32[8,1024]{{1,0}} multiply(%param_0, %param_0)
  %zero = f32[] constant(0)
  ROOT %sum = f32[8]{{0}} reduce(%square, %zero), dimensions={{1}}, to_apply=%add, metadata={{op_name="jit(body)/norm/reduce_sum"}}
}}
ENTRY %main (x: bf16[8,1024], w: bf16[1024,4096]) -> bf16[8,4096] {{
  %gemm.1 = bf16[8,4096]{{1,0}} fusion(%x, %w), kind=kCustom, calls=%gemm_computation, backend_config={{{TILE}}}
  %sum.2 = f32[8]{{0}} fusion(%x), kind=kInput, calls=%fused_reduce, metadata={{deduplicated_name="sum.1"}}, backend_config={{}}
}}
"""
PTX = """.visible .entry sum_1(
  .param .u64 x
)
{
  mul.rn.f32 %r1, %r2, %r2;
  @%p1 add.rn.f32 %r3, %r1, %r4;
  add.rn.bf16 %h1, %h2, %h3;
  shfl.sync.down.b32 %r5|%p2, %r3, 16, 31, -1;
}
"""


def faults(hlo=HLO, ptx=PTX):
    """Of this program beside the sample's other bucket."""
    other = read_program(HLO.replace("[8,", "[2048,"), [PTX])
    return order_faults({"a": other, "b": read_program(hlo, [ptx])})


def test_reads_matmuls_and_sums():
    program = read_program(HLO, [PTX])
    ((op, length, config),) = [(g.op, g.length, g.config) for g in program.gemms]
    assert (op, length) == ("qkv/dot_general", 1024) and "output_tiles:[{sizes:[64,64]}]" in config and "K [64]" in config
    assert [(s.op, s.length, s.kernel) for s in program.sums] == [("norm/reduce_sum", 1024, "sum_1")]
    counts = {"add.rn.f32": 1, "mul.rn.f32": 1, "shfl.sync.down.b32": 1}
    assert [dict(way) for way in program.operations["sum_1"]] == [counts]
    assert faults() == []


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"sizes":["64","64"]', '"sizes":["32","64"]', "matmuls in 2 configurations"),
        ('"num_stages":4', '"num_stages":3', "matmuls in 2 configurations"),
        ('{"sizes":["64"]}', '{"sizes":["32"]}', "matmuls in 2 configurations"),
        ("lhs_contracting_dims={1}", "lhs_contracting_dims={0}", "matmuls in 2 configurations"),
        ("lhs_contracting_dims={1}", "lhs_batch_dims={0}, lhs_contracting_dims={1}", "matmuls in 2 configurations"),
        ("__triton_nested_gemm_fusion", "__triton_gemm", "multiplies in a fusion of kind __triton_gemm"),
        ("kind=kInput, calls=%fused_reduce,", 'kind=kCustom, calls=%fused_reduce, a="kind":"__triton",', "sums in a Triton fusion"),
        ("ENTRY", '%y = f32[8] custom-call(%x), custom_call_target="__cublas$lt$matmul"\nENTRY', "calls __cublas"),
        ("calls=%gemm_computation", "calls=%other", "a matmul outside a fusion"),
        ('deduplicated_name="sum.1"', 'deduplicated_name="sum.9"', "nothing is known of sum_9"),
    ],
)
def test_faults_of_hlo(old, new, message):
    assert old in HLO
    found = faults(hlo=HLO.replace(old, new))
    assert any(message in fault for fault in found), found


@pytest.mark.parametrize("old, new", [("shfl.sync.down.b32", "mov.b32"), ("mul.rn.f32", "fma.rn.f32")])
def test_a_sum_by_other_operations(old, new):
    (fault,) = faults(ptx=PTX.replace(old, new))
    assert "sums of 1024 in norm/reduce_sum differ between programs" in fault


def test_residuals_in_bfloat16_do_not_count():
    assert faults(ptx=PTX.replace("add.rn.bf16", "mov.b16")) == []


def test_programs_without_any_matmul_prove_nothing():
    nothing = read_program("HloModule empty", [])
    assert order_faults({"a": nothing, "b": nothing}) == ["no matmul was found: the text of HLO has changed"]
    assert order_faults({"a": nothing, "b": nothing}, ours=True) == []


def test_a_matmul_of_xlas_beside_ours_is_a_fault():
    both = read_program(HLO, [PTX])
    assert order_faults({"a": both}) == [] and order_faults({"a": both}, ours=True) == ["XLA multiplies beside our kernels"]
