"""The interpreter's readers: PTX text, and how Mosaic's host code launches a kernel."""

import pytest

from scripts.ptx.launch import Launch, Tensor, parse_launch
from scripts.ptx.program import NOP, Address, Group, Literal, PtxError, Register, parse

PTX = """
.version 9.0
.target sm_90a
.visible .entry k(
	.param .u64 .ptr .align 256 k_param_0,
	.param .align 64 .b8 k_param_1[128]
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
	.loc	1 43 4
	@!%p1 bra 	$L__BB0_2;  // a comment; with a semicolon
	{
	.reg .pred P1;
	AGAIN:
	mbarrier.try_wait.parity.shared.b64 P1, [%r2], %r3, 1000;
	@P1 bra.uni DONE;
	bra.uni AGAIN;
	DONE:
	}
	{ .reg .pred P1; setp.ne.b32 P1, %r1, 0; }
$L__BB0_2:
	.loc	2 7 1, function_name $L__info, inlined_at 1 43 4
	cp.async.bulk.tensor.2d.x [%r2], [%rd1, {%r1, %r3} ], [%rd2+-8];
	elect.sync 	%r4|%p2, -1;
	ret;
}
	.file	1 "/somewhere/consumer.py"
	.file	2 "/somewhere/producer.py"
"""


def test_a_kernel_is_read():
    program = parse(PTX)
    assert (program.name, program.params, program.threads) == ("k", ("k_param_0", "k_param_1"), 256)
    branch, wait, done, again, compare, copy, elect, _ = program.instructions
    assert branch.guard == (Register("%p1", "pred"), True) and branch.source == "consumer.py:43"
    assert program.labels == {"AGAIN#1": 1, "DONE#1": 4, "$L__BB0_2": 5}
    assert done.operands == (Literal("DONE#1"),) and again.operands == (Literal("AGAIN#1"),)
    inner = wait.operands[0]
    assert done.guard is not None
    assert inner == done.guard[0] == Register("P1#1", "pred") and compare.operands[0] == Register("P1#2", "pred")
    assert copy.operands[1] == Address(Register("%rd1", "b64"), 0, (Register("%r1", "b32"), Register("%r3", "b32")))
    assert copy.operands[2] == Address(Register("%rd2", "b64"), -8) and copy.source == "producer.py:7"
    assert elect.operands == (Group((Register("%r4", "b32"), Register("%p2", "pred"))), Literal("-1"))


def test_an_instruction_can_be_taken_out():
    program = parse(PTX)
    less = program.without(1)
    assert less.instructions[1].opcode == NOP and less.labels == program.labels
    assert [a is b for a, b in zip(program.instructions, less.instructions, strict=True)].count(False) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((".visible .entry", ".func"), "no .visible .entry"),
        ((".maxntid 256, 1, 1", ""), "has no .maxntid"),
        ((".reg .b32", ".reg .b128"), "registers of type .b128"),
        (("ret;", ".branchtargets A;"), "line 28: not an instruction that is known: '.branchtargets A'"),
    ],
)
def test_other_texts_are_refused(change, message):
    with pytest.raises(PtxError, match=message):
        parse(PTX.replace(*change))


DUMP = """
// -----// IR Dump Before GpuLaunchLoweringPass: gpu-launch-lowering //----- //
module @k {
  func.func @k_mosaic_gpu(%arg0: !llvm.ptr, %arg1: !llvm.ptr) {
    %0 = llvm.mlir.constant(1 : i64) : i64
    %1 = llvm.mlir.constant(128 : i64) : i64
    %2 = llvm.mlir.constant(8 : i64) : i64
    %3 = llvm.mlir.constant(64 : i64) : i64
    %4 = llvm.mlir.constant(2 : i64) : i64
    %5 = llvm.mlir.constant(4096 : i32) : i32
    %6 = llvm.load %arg1 : !llvm.ptr -> !llvm.ptr
    %7 = llvm.getelementptr %arg1[3] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %8 = llvm.load %7 : !llvm.ptr -> !llvm.ptr
    %9 = builtin.unrealized_conversion_cast %8 : !llvm.ptr to memref<8x64xbf16> {mosaic_gpu.from_kernel_arg_idx = 3 : i32}
    %transpose = memref.transpose %9 (d0, d1) -> (d0, d1) : memref<8x64xbf16> to memref<8x64xbf16, strided<[64, 1]>>
    %descs = llvm.alloca %0 x !llvm.array<256 x i8> : (i64) -> !llvm.ptr
    %10 = llvm.getelementptr %descs[128] : (!llvm.ptr) -> !llvm.ptr, i8
    %11 = llvm.alloca %0 x !llvm.array<2 x i64> : (i32) -> !llvm.ptr
    llvm.store %2, %11 : i64, !llvm.ptr
    %12 = llvm.getelementptr %11[1] : (!llvm.ptr) -> !llvm.ptr, i64
    llvm.store %3, %12 : i64, !llvm.ptr
    %13 = llvm.alloca %0 x !llvm.array<2 x i64> : (i32) -> !llvm.ptr
    llvm.store %3, %13 : i64, !llvm.ptr
    %14 = llvm.getelementptr %13[1] : (!llvm.ptr) -> !llvm.ptr, i64
    llvm.store %0, %14 : i64, !llvm.ptr
    call @mosaic_gpu_init_tma_desc(%10, %transpose, %2, %4, %11, %13, %1, %11) : (!llvm.ptr) -> ()
    %15 = llvm.load %descs : !llvm.ptr -> !llvm.array<256 x i8>
    gpu.launch_func @k::@k blocks in (%4, %0, %0) threads in (%1, %0, %0) : i64 dynamic_shared_memory_size %5 args(%8 : !llvm.ptr, %6 : !llvm.ptr, %15 : !llvm.array<256 x i8>)
  }
  gpu.binary @k
"""  # noqa: E501


def test_a_launch_is_read():
    launch = parse_launch("an older dump\n" + DUMP)
    assert launch == Launch((2, 1, 1), 128, 4096, (3, 0, None), (Tensor(128, 3, (8, 64), (64, 1), (8, 64), 128),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("GpuLaunchLoweringPass", "AnotherPass"), "Mosaic's passes have changed"),
        (("%13, %1, %11)", "%13, %0, %11)"), "swizzle 1 is not known"),
        (("memref.transpose %9", "memref.reinterpret_cast %9 to offset: [64]"), "the middle of an array"),
    ],
)
def test_other_dumps_are_refused(change, message):
    with pytest.raises(PtxError, match=message):
        parse_launch(DUMP.replace(*change))
