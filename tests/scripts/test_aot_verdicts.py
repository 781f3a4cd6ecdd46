"""Faults of compiled programs, each seen in a report that has it, and the memory verdict against the engine's own resolution."""

import dataclasses
from typing import cast

import pytest

from jaxserve import EngineConfig
from jaxserve.execution.resolved_config import resolve_config
from scripts.aot.compiled_report import CompiledReport, Instruction, Kernel, Thunk
from scripts.aot.compiler import Compiler, target_of
from scripts.aot.kernels import KernelCase
from scripts.aot.step import AbstractStep, check_step, read_config, split_fraction
from scripts.aot.verdicts import (
    ATTENTION,
    ATTENTION_OP,
    EXPERTS,
    FUSED_MATMUL,
    FUSED_OP,
    JOIN,
    ROTARY_OP,
    ROTARY_WRITE,
    StepDemands,
    body_faults,
    head_faults,
    kernel_faults,
    link_faults,
    update_faults,
    variant_faults,
)

KV = (100, 2, 8, 64, 128)
DEMANDS = StepDemands(num_layers=2, kv_layer_shape=KV, pool_bytes=1000, temp_bytes=50)
KERNEL = Kernel("ours", "mosaic", "sm_90a", registers=200, spill_stores=0, spill_loads=0, stack=0, smem=200_000)


def call(name: str) -> Instruction:
    return Instruction(
        "mpmd_map", "custom-call", (("bf16", (8, 16, 128)),), (), f"jit(body)/layers/{name}/mpmd_map", "mosaic_gpu_v2"
    )


def good_body() -> CompiledReport:
    thunks = [Thunk("CommandBuffer", "", False), Thunk("CustomCall", "", True), Thunk("CustomKernel", "fusion", True)]
    return CompiledReport("body", thunks=thunks, instructions=[call("decode"), call("decode")], alias_bytes=1000, temp_bytes=50)


def test_a_good_program_has_no_faults():
    assert body_faults(good_body(), DEMANDS, "decode") == []
    assert head_faults(good_body(), DEMANDS) == []
    assert kernel_faults([KERNEL], smem_limit=232_448, where="it") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instructions": [call("decode")]}, "1 Mosaic calls named 'decode', not 2, of 2 layers"),
        ({"instructions": [call("decode"), call("slow")]}, "slow"),
        ({"alias_bytes": 999}, "999 bytes are updated in place"),
        ({"temp_bytes": 51}, "temporary memory"),
        ({"thunks": [*good_body().thunks, Thunk("While", "", False)]}, "1 While outside"),
        ({"thunks": good_body().thunks * 2}, "2 command buffers"),
        (
            {"instructions": [*good_body().instructions, Instruction("copy.3", "copy", (("bf16", KV),), (), "", "")]},
            "copies of a layer's KV pages: copy.3",
        ),
    ],
)
def test_faults_of_a_body(change, message):
    [fault] = body_faults(dataclasses.replace(good_body(), **change), DEMANDS, "decode")
    assert message in fault and fault.startswith("body: ")


def test_a_body_attends_for_a_draft_model_too():
    demands = dataclasses.replace(DEMANDS, num_draft_layers=1)
    [fault] = body_faults(good_body(), demands, "decode")
    assert "2 Mosaic calls named 'decode', not 3, of 2 layers and 1 of a draft" in fault
    assert body_faults(dataclasses.replace(good_body(), instructions=[call("decode")] * 3), demands, "decode") == []


def test_a_body_of_several_devices_sums_twice_a_layer_and_may_be_several_graphs():
    sums = [Instruction(f"sum.{i}", "all-reduce-start", (), (), "", "") for i in range(5)]
    body = dataclasses.replace(good_body(), instructions=[*good_body().instructions, *sums])
    several = dataclasses.replace(DEMANDS, num_sums=5)
    assert body_faults(body, several, "decode") == []
    assert "5 sums over devices; must be 0" in body_faults(body, DEMANDS, "decode")[0]
    assert "0 sums over devices; must be 5" in body_faults(good_body(), several, "decode")[0]
    ours = [call(f"all_reduce_mosaic/one_shot_all_reduce/{i}") for i in range(2)]
    mixed = dataclasses.replace(good_body(), instructions=[*good_body().instructions, *sums[:3], *ours])
    assert body_faults(mixed, several, "decode") == [], "a kernel of ours sums too"
    gathers = [Instruction(f"gather.{i}", "all-gather", (), (), "", "") for i in range(8)]
    whole = dataclasses.replace(good_body(), instructions=[*good_body().instructions, *gathers])
    assert body_faults(whole, dataclasses.replace(DEMANDS, num_gathers=8), "decode") == []
    assert "8 gathers over devices; must be 0" in body_faults(whole, DEMANDS, "decode")[0]
    cut = dataclasses.replace(body, thunks=[*body.thunks, Thunk("AllReduce", "", False)])
    assert "must be one that holds everything" in body_faults(cut, several, "decode")[0]
    assert body_faults(cut, dataclasses.replace(several, one_graph=False), "decode") == []


def test_a_body_must_run_the_rotary_write_once_a_layer():
    body = dataclasses.replace(good_body(), instructions=[*good_body().instructions, call("rotary"), call("rotary")])
    assert body_faults(body, DEMANDS, "decode", {"rotary": 2}) == []
    assert body_faults(good_body(), DEMANDS, "decode", {"rotary": 2}) != []
    assert body_faults(body, DEMANDS, "decode", {"rotary": 4}) != []


def kernel(name: str, *uses: str) -> Kernel:
    return dataclasses.replace(KERNEL, name=name, uses=uses)


FAST = [kernel(ATTENTION, "TMA", "wgmma", "wgmma from registers"), kernel(JOIN, "TMA")]


def step_body(num_layers: int, **changes) -> CompiledReport:
    """A body whose layers call attention and the join."""
    calls = [call(f"{ATTENTION_OP.strip('/')}"), call("ragged_paged_attention_mosaic_sm90/join_partial_results")] * num_layers
    return dataclasses.replace(good_body(), instructions=calls, alias_bytes=1 << 62, temp_bytes=0, **changes)


class CompilerOf:
    """Stands in for the compiler: every body becomes this report, heads and the rest are good."""

    def __init__(self, body: CompiledReport, mosaic_kernels: list[Kernel]):
        num_layers = len(body.instructions) // 2  # of attention and join
        others = [call(ROTARY_OP.strip("/"))] * num_layers + [call(FUSED_OP.strip("/"))] * (2 * num_layers)
        self.body = dataclasses.replace(body, instructions=[*body.instructions, *others])
        self.mosaic_kernels = [*mosaic_kernels, kernel(ROTARY_WRITE), kernel(FUSED_MATMUL, "TMA", "wgmma from registers")]

    def compile(self, name, function, args, **options):
        head = dataclasses.replace(good_body(), instructions=[], thunks=[*good_body().thunks[: 1 + 2 * (name != "state update")]])
        return dataclasses.replace(self.body if name.startswith("body") else head, name=name)


@pytest.mark.parametrize(
    ("dumped", "before", "faults"),
    [
        (FAST, FAST, 0),
        ([], FAST, 0),  # an earlier program called the same kernels
        ([], [], 2),
        (FAST[:1], FAST[:1], 1),
        ([kernel(ATTENTION, "TMA", "wgmma"), FAST[1]], FAST, 1),
        ([kernel(ATTENTION, "wgmma", "wgmma from registers"), FAST[1]], FAST, 1),
        ([], [kernel(ATTENTION), *FAST], 2),
        ([dataclasses.replace(k, spill_loads=8) for k in FAST], FAST, 2),
        ([dataclasses.replace(k, smem=232_449) for k in FAST], FAST, 2),
    ],
)
def test_a_step_runs_kernels_that_are_known_to_be_the_fast_ones(dumped, before, faults):
    options = {"dtype": "bfloat16", "max_model_len": 2048, "attention_backend": "mosaic_sm90"}
    step = AbstractStep.make(read_config("tiny-qwen3"), options, "h100", memory_fraction=0.75)
    compiler = CompilerOf(step_body(step.config.pages.num_layers, kernels=dumped), before)
    found = check_step(step, cast(Compiler, compiler), step.default_buckets()[:1]).faults
    assert len(found) == 2 * faults, "both bodies have them: the bucket's, and the largest one's"
    assert all("body" in fault for fault in found)


def test_faults_of_a_variant():
    body = step_body(2, kernels=[])
    assert variant_faults(body, FAST) == [] and variant_faults(good_body(), FAST)[0].endswith("Mosaic dumped no such kernel")
    [fault] = variant_faults(body, [kernel(ATTENTION, "wgmma from registers"), FAST[1]])
    assert fault == f"body: {ATTENTION} has no TMA: this is not the fast variant"
    assert variant_faults(dataclasses.replace(body, kernels=FAST), [kernel(ATTENTION)]) == [], "what it was compiled with counts"


def test_a_case_calls_its_kernels_once_each():
    case = KernelCase("it", print, (), (ATTENTION, JOIN))
    assert case.faults(step_body(1)) == []
    assert "expected" in case.faults(step_body(2))[0] and "no Mosaic kernel" in case.faults(step_body(0))[0]
    [fault] = dataclasses.replace(case, kernels=(ATTENTION, EXPERTS)).faults(step_body(1))
    assert fault.startswith(f"it: calls {JOIN}, {ATTENTION}, expected")


def test_an_update_may_be_kernels_without_a_graph_and_nothing_else():
    update = CompiledReport("update", thunks=[Thunk("CustomKernel", "scatter", False)], temp_bytes=50)
    assert update_faults(update, DEMANDS) == []
    assert "1 While" in update_faults(dataclasses.replace(update, thunks=[Thunk("While", "", False)]), DEMANDS)[0]
    assert "temporary memory" in update_faults(dataclasses.replace(update, temp_bytes=51), DEMANDS)[0]


def test_a_link_of_two_stages_is_one_collective_permute():
    link = CompiledReport("rows", thunks=[Thunk("CollectivePermute", "", False)])
    assert link_faults(link) == []
    for thunks in ([], [*link.thunks, Thunk("Kernel", "copy", False)], link.thunks * 2, [Thunk("CommandBuffer", "", False)]):
        assert "must be 1 CollectivePermute" in link_faults(dataclasses.replace(link, thunks=thunks))[0]


def test_auto_is_the_backend_of_the_target():
    for dtype, backend in (("bfloat16", "mosaic_sm90"), ("float32", "xla")):
        step = AbstractStep.make(read_config("qwen3-0.6b"), {"dtype": dtype, "max_model_len": 2048}, "h100", memory_fraction=0.75)
        assert step.config.attention_backend == backend
    assert target_of("NVIDIA H200") == "h200"
    with pytest.raises(ValueError, match="Abacus"):
        target_of("Abacus")


def test_xla_attention_may_leave_the_graph_but_not_copy_pages():
    loop = dataclasses.replace(good_body(), thunks=[Thunk("While", "", False)], instructions=[])
    assert body_faults(loop, DEMANDS, None) == []
    assert len(body_faults(dataclasses.replace(loop, alias_bytes=0), DEMANDS, None)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spill_loads": 8}, "spills"),
        ({"smem": 232_449}, "shared memory"),
        ({"arch": "sm_90"}, "sm_90a"),
        ({"registers": 168, "warpgroups": 3, "asked_registers": (240, 32)}, "8 too many"),
    ],
)
def test_faults_of_a_kernel(change, message):
    [fault] = kernel_faults([dataclasses.replace(KERNEL, **change)], smem_limit=232_448, where="case")
    assert message in fault


@pytest.mark.parametrize("model", ["tiny-qwen3", "qwen3-0.6b", "qwen3-8b"])
def test_pages_are_those_that_the_engine_would_take(model):
    config, reserve = read_config(model), 123 << 20
    step = AbstractStep.make(config, {"max_model_len": 2048}, "h100", memory_fraction=0.75)
    fit = step.fit(reserve)
    wanted = resolve_config(
        EngineConfig(max_model_len=2048),
        config,
        kv_dtype=step.programs.functions.dtype,
        platform="gpu",
        device_limit=int(0.75 * 84_942_979_072),
        weight_bytes=fit.weights,
        temp_bytes=reserve,
    )
    assert fit.num_pages == wanted.cache.num_pages and fit.faults == []
    sizes = {"tiny-qwen3": 4_197_120 * 4, "qwen3-0.6b": 596_049_920 * 2, "qwen3-8b": 8_190_735_360 * 2}  # parameters x bytes
    assert fit.weights == sizes[model]


def test_a_length_that_was_not_asked_for_is_what_the_pool_holds_beside_the_programs():
    model, options = read_config("qwen3-0.6b"), {"dtype": "bfloat16", "attention_backend": "mosaic_sm90"}
    step = AbstractStep.make(model, options, "h100", memory_fraction=0.03)
    compiler = CompilerOf(step_body(step.config.pages.num_layers, kernels=FAST), FAST)
    result = check_step(step, cast(Compiler, compiler), step.default_buckets()[:1])
    assert result.faults == [] and result.fit is not None
    resolved = resolve_config(
        EngineConfig(),
        model,
        kv_dtype=step.programs.functions.dtype,
        platform="gpu",
        device_limit=int(0.03 * 84_942_979_072),
        weight_bytes=596_049_920 * 2,
        temp_bytes=50 + (32 << 20),  # the heads' and scoring's above, and a GEMM's workspace
    )
    assert result.fit.num_pages == resolved.cache.num_pages
    assert result.fit.max_model_len == resolved.scheduler.max_model_len < step.config.scheduler.max_model_len < 40_960
    assert "no more would ever be used" not in str(result.fit)


def test_a_length_that_no_longer_fits_beside_the_programs_is_the_engines_refusal():
    first = AbstractStep.make(read_config("qwen3-0.6b"), {"dtype": "bfloat16"}, "h100", memory_fraction=0.03)
    longest = first.config.scheduler.max_model_len  # with nothing set aside for programs
    options = {"dtype": "bfloat16", "attention_backend": "mosaic_sm90", "max_model_len": longest}
    step = AbstractStep.make(read_config("qwen3-0.6b"), options, "h100", memory_fraction=0.03)
    compiler = CompilerOf(step_body(step.config.pages.num_layers, kernels=FAST), FAST)
    result = check_step(step, cast(Compiler, compiler), step.default_buckets()[:1])
    assert result.fit is None and len(result.faults) == 1
    assert result.faults[0].startswith(f"max_model_len={longest} needs ")


def test_the_pool_leaves_room_for_what_drafts_take():
    options = {"max_model_len": 2048, "speculative_config": {"num_speculative_tokens": 4}}
    step = AbstractStep.make(read_config("qwen3-0.6b"), options, "h100", memory_fraction=0.75)
    drafts = 128 * 4 * 4  # sequences, drafts each, bytes of an id
    assert step.fit(1 << 20).reserve == (1 << 20) + drafts


def test_a_model_may_name_its_own_share_of_the_memory():
    assert split_fraction("qwen3-8b", 0.75) == ("qwen3-8b", 0.75)
    assert split_fraction("a@b/qwen3@0.92", 0.75) == ("a@b/qwen3", 0.92)
    for wrong in ("qwen3@1.5", "qwen3@0", "qwen3@much"):
        with pytest.raises(ValueError, match="memory_fraction=|could not convert"):
            split_fraction(wrong, 0.75)


def test_what_does_not_fit_is_said():
    step = AbstractStep.make(read_config("qwen3-8b"), {"num_pages": 8, "max_model_len": 512}, "h100", memory_fraction=0.25)
    assert step.fit(0).faults == []
    assert "larger than" in dataclasses.replace(step.fit(0), num_pages=5000).faults[0]
    with pytest.raises(ValueError, match="no KV page fits"):
        AbstractStep.make(read_config("qwen3-8b"), {"max_model_len": 512}, "h100", memory_fraction=0.25).fit(5 << 30)
    with pytest.raises(ValueError, match="no KV page fits"):
        AbstractStep.make(read_config("qwen3-8b"), {}, "h100", memory_fraction=0.2)


def test_buckets_by_name():
    step = AbstractStep.make(read_config("tiny-qwen3"), {"max_num_seqs": 16}, "h200", memory_fraction=0.75)
    assert [str(b) for b in step.select(["8", "32x16"])] == ["decode(8,8)", "mixed(32,16)"]
    assert step.select(["all"]) == list(step.config.plan.buckets)
    assert [b.tokens for b in step.default_buckets()] == [8, 2048]
    with pytest.raises(ValueError, match="7x7"):
        step.select(["8", "7x7"])
