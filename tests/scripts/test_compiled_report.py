"""The parsers of what XLA, Mosaic and ptxas print, on samples of theirs (jax 0.11.2, nvidia-cuda-nvcc 13.5), shortened."""

import pytest

from scripts.aot.compiled_report import (
    CompiledReport,
    asked_registers,
    parse_hlo,
    parse_mosaic_smem,
    parse_ptxas,
    parse_thunks,
    warpgroups,
)

PTXAS_XLA = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fusion_2745' for 'sm_90a'
ptxas info    : Function properties for fusion_2745
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compile time = 12.449 ms
ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_add_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""
PTXAS_MOSAIC = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'body_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for body_mosaic_gpu_kernel
    64 bytes stack frame, 72 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 102.879 ms
"""
PTX = """.visible .entry ragged_paged_attention_mosaic_gpu_kernel(
)
.maxntid 384, 1, 1
.minnctapersm 1
{
	setmaxnreg.dec.sync.aligned.u32 PRODUCER;
	setmaxnreg.inc.sync.aligned.u32 CONSUMER;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
}
"""
RESOURCES = """Resources(smem_scratch_bytes=174080, tmem_scratch_cols=0, barrier_counts=Counter({Barrier(arrival_count=1,
num_barriers=1, orders_tensor_core=False): 1}), scoped_gmem_semaphores={})"""

ONE_GRAPH = """000: kCommandBuffer [source | sink]
    001: kCopy           [source        | next=012 (4) ] kCopy
    002: kCustomKernel   [prev=007 (2)  | next=010 (1) ] fusion_7 grid: [1, 1, 1] threads: [8, 1, 1]  shared_memory: 256 bytes
    003: kCublasLtMatmul [prev=015 (1)  | next=017 (1) ] kCublasLtMatmul
    004: kConditional    [prev=003 (1)  | sink         ]
    branch_0_computation:
      005: kCustomKernel [source | sink] sort_9_1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 32768 bytes
    006: kCustomKernel   [prev=002 (1)  | next=010 (1) ] fusion_7 grid: [1, 1, 1] threads: [8, 1, 1]  shared_memory: 256 bytes
"""
LOOP_BETWEEN_GRAPHS = """000: kCommandBuffer [source       | next=029 (1)]
    001: kCopy           [source        | sink         ] kCopy
029: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    030: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source | sink]
        031: kCustomKernel   [source       | next=032 (1)] loop_fusion grid: [2, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
000: kCommandBuffer [prev=029 (1) | next=053 (1)]
    040: kCustomKernel   [source        | next=041 (1)] select_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
"""
HLO = """HloModule jit_body, is_scheduled=true, entry_computation_layout={(bf16[8,1024]{1,0})->bf16[8,1024]{1,0}}
%fused_add (param_0: bf16[8,1024]) -> bf16[8,1024] {
  %copy.1 = bf16[8,1024]{1,0} copy(%param_0)
}
ENTRY %main {
  %copy.9 = bf16[7649,2,8,64,128]{4,3,2,1,0} copy(%kv.1), metadata={op_name="jit(body)/layers" stack_frame_id=2}
  %copy-start.1 = (bf16[7649,2,8,64,128]{4,3,2,1,0}, bf16[7649,2,8,64,128]{4,3,2,1,0}, u32[]) copy-start(%kv.2)
  %input_scatter_fusion.3 = bf16[7649,2,8,64,128]{4,3,2,1,0} fusion(%kv.3, %slots), kind=kInput, calls=%f
  %mpmd_map.4 = bf16[8,16,128]{2,1,0} custom-call(%q, %kv.3), custom_call_target="mosaic_gpu_v2", metadata={op_name="a/mpmd_map"}
  ROOT %cublas.1 = (bf16[8,4096]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"
}
"""


def test_ptxas_logs():
    first, second = parse_ptxas(PTXAS_XLA, "xla")
    assert (first.name, first.registers, first.smem, first.spills) == ("fusion_2745", 31, 2048, False)
    assert (second.name, second.registers, second.smem, second.arch) == ("loop_add_fusion", 10, 0, "sm_90a")
    [kernel] = parse_ptxas(PTXAS_MOSAIC, "mosaic", parse_mosaic_smem(RESOURCES))
    assert (kernel.spill_stores, kernel.spill_loads, kernel.stack, kernel.spills) == (72, 48, 64, True)
    assert (kernel.registers, kernel.smem) == (255, 174081)


def test_a_ptxas_log_in_another_format_is_refused():
    with pytest.raises(ValueError, match="format has changed"):
        parse_ptxas(PTXAS_XLA.replace("Used 10 registers", "Uses ten registers"), "xla")
    with pytest.raises(ValueError, match="smem_scratch_bytes"):
        parse_mosaic_smem("Resources()")


@pytest.mark.parametrize(("consumer", "producer", "missing"), [(232, 40, 0), (240, 24, 0), (240, 32, 8)])
def test_registers_that_warpgroups_trade(consumer, producer, missing):
    ptx = PTX.replace("CONSUMER", str(consumer)).replace("PRODUCER", str(producer))
    [kernel] = parse_ptxas(PTXAS_MOSAIC.replace("Used 255", "Used 168"), "mosaic", ptx=ptx)
    assert (kernel.warpgroups, kernel.asked_registers, kernel.uses) == (3, (consumer, producer), ("wgmma", "setmaxnreg"))
    assert kernel.missing_registers == missing
    assert parse_ptxas(PTXAS_MOSAIC, "mosaic")[0].missing_registers == 0


def test_ptx_in_another_form_is_refused():
    with pytest.raises(ValueError, match="setmaxnreg in a form"):
        asked_registers("setmaxnreg.inc.sync.aligned.u32 %r1;")
    with pytest.raises(ValueError, match="maxntid"):
        warpgroups(".minnctapersm 1")


def report(thunks: str) -> CompiledReport:
    return CompiledReport("it", thunks=parse_thunks(thunks), kernels=parse_ptxas(PTXAS_XLA, "xla"))


def test_what_lies_in_one_graph():
    it = report(ONE_GRAPH)
    assert it.num_graphs == 1 and not it.outside
    kinds = [t.kind for t in it.graph_commands]
    assert kinds == ["Copy", "CustomKernel", "CublasLtMatmul", "Conditional", "CustomKernel", "CustomKernel"]
    assert it.thunks[2].name == "fusion_7" and it.thunks[2].smem == 256 and it.thunks[3].name == ""
    assert it.launches()[0][:2] == (2, "fusion_7")


def test_what_lies_outside_graphs():
    it = report(LOOP_BETWEEN_GRAPHS)
    assert it.num_graphs == 3, "one of them inside the loop"
    assert it.outside == {"While": 1, "CustomKernel": 1}
    assert [t.name for t in it.graph_commands] == ["", "loop_fusion", "select_fusion"]


def test_a_dump_without_thunks_is_refused():
    with pytest.raises(ValueError, match="no thunks"):
        parse_thunks("nothing here")


def test_hlo_copies_and_custom_calls():
    it = CompiledReport("it", instructions=parse_hlo(HLO))
    assert [i.name for i in it.copies_of((7649, 2, 8, 64, 128))] == ["copy.9", "copy-start.1"]
    assert it.copies_of((8, 16, 128)) == []
    [call] = it.mosaic_calls
    assert call.op_name == "a/mpmd_map" and call.operands == ("q", "kv.3")
    assert call.results == (("bf16", (8, 16, 128)),)
    gemm = it.instructions[-1]
    assert gemm.target == "__cublas$lt$matmul" and gemm.results == (("bf16", (8, 4096)), ("s8", (4194304,)))
