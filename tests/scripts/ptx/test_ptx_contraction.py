"""Which products and sums ptxas may make one: those without a rounding modifier, of which the sum takes the product."""

import numpy as np
import pytest

from scripts.ptx.agreement import Agreement, Output
from scripts.ptx.compiled import Kernel
from scripts.ptx.contraction import contractable
from scripts.ptx.program import PtxError, parse
from tests.scripts.ptx.snippets import RECORDED, launch, program

PRODUCT = "mul.f32 %f1, %f2, %f3;"


@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        (f"{PRODUCT} add.f32 %f4, %f1, %f5;", ["add.f32 %f4, %f1, %f5"]),
        (f"{PRODUCT} sub.f32 %f4, %f5, %f1;", ["sub.f32 %f4, %f5, %f1"]),
        ("mul.ftz.f32 %f1, %f2, %f3; add.ftz.f32 %f4, %f5, %f1;", ["add.ftz.f32 %f4, %f5, %f1"]),
        ("mul.bf16x2 %r1, %r2, %r3; sub.bf16x2 %r4, %r1, %r5;", ["sub.bf16x2 %r4, %r1, %r5"]),
        (f"{PRODUCT} add.f32 %f4, %f1, %f1;", ["add.f32 %f4, %f1, %f1"] * 2),
        (f"{PRODUCT} neg.f32 %f6, %f1; mov.b32 %f7, %f6; add.f32 %f4, %f7, %f5;", ["add.f32 %f4, %f7, %f5"]),
        (f"{PRODUCT} mov.b64 %rd9, {{%f1, %f2}}; mov.b64 {{%f6, %f7}}, %rd9; add.f32 %f4, %f7, %f5;", ["add.f32 %f4, %f7, %f5"]),
        (f"bra $S;\n$T:\nadd.f32 %f4, %f1, %f5; bra $E;\n$S:\n{PRODUCT} bra $T;\n$E:\n", ["add.f32 %f4, %f1, %f5"]),
        (f"$S:\nadd.f32 %f4, %f1, %f5; {PRODUCT} @%p1 bra $S;", ["add.f32 %f4, %f1, %f5"]),
        (f"@%p1 bra $S;\n{PRODUCT}\n$S:\nadd.f32 %f4, %f1, %f5;", ["add.f32 %f4, %f1, %f5"]),
        (f"{PRODUCT} @%p1 mov.f32 %f1, %f6; add.f32 %f4, %f1, %f5;", ["add.f32 %f4, %f1, %f5"]),
        (f"{PRODUCT} mov.f32 %f1, %f6; add.f32 %f4, %f1, %f5;", []),
        (f"mov.f32 %f7, %f1; {PRODUCT} add.f32 %f4, %f7, %f5;", []),  # what %f1 was before the product
        ("mul.rn.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;", []),
        (f"{PRODUCT} add.rn.f32 %f4, %f1, %f5;", []),
        (f"{PRODUCT} fma.rn.f32 %f4, %f1, %f5, %f6;", []),
        (f"{PRODUCT} mul.f32 %f4, %f1, %f5; max.f32 %f6, %f4, %f1; add.f32 %f7, %f6, %f5;", []),
        ("mul.lo.s32 %r1, %r2, %r3; add.s32 %r4, %r1, %r5;", []),
    ],
)
def test_pairs(body, pairs):
    assert [taken.text for _, taken in contractable(program(body))] == pairs


@pytest.mark.parametrize("branch", ["bra %r1;", "@%p1 bra %r1;", "brx.idx %r1, $S;", "bra $nowhere;"])
def test_a_branch_to_what_is_not_known_is_refused(branch):
    with pytest.raises(PtxError, match=r"where it goes is not known: .*br"):
        contractable(program(f"$S:\n{PRODUCT} {branch} add.f32 %f4, %f1, %f5;"))


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.ptx*")), ids=lambda path: path.name)
def test_kernels_of_ours_have_none(path):
    assert contractable(parse(path.read_text())) == []


def test_an_agreement_needs_equal_data_right_values_and_no_contraction():
    def output(name: str, data: float, body: str = "") -> Output:
        kernel = program(body)
        return Output.of(name, np.array([data], np.float32), {"k": Kernel("k", kernel, launch(kernel))})

    one, two = output("one", 1.0), output("two", 2.0, f"{PRODUCT} add.f32 %f4, %f1, %f5;")
    assert Agreement("rows", (one, output("same", 1.0))).faults == []
    assert Agreement("rows", (one,), ("one: 3 values are wrong",)).faults == ["rows: one: 3 values are wrong"]
    differs, contracted = Agreement("rows", (one, two)).faults
    assert differs == "rows: two differs from one"
    assert contracted.startswith("rows: of two ptxas may contract 1 products with sums, such as k: line ")
    assert "mul.f32 %f1" in contracted and "add.f32 %f4" in contracted
    assert one.ptx != two.ptx
