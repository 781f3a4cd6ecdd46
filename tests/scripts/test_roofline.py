"""Machine code read from Mosaic's dump, its loops, and the model of their cycles. What is right is counted by hand here."""

import dataclasses

import pytest

from scripts.aot.machine_code import parse_sass
from scripts.aot.roofline import LATENCY, READ_LATENCY, WGMMA_SEEN, WGMMA_START, Roofline, Way, cycles, main_loop, roofline
from scripts.aot.verdicts import bits_faults, loop_faults

HEADER = '\t.target\tsm_90a\n//---- .text.kernel ----\n\t.section\t.text.kernel,"ax",@progbits\n.text.kernel:\n'


def code(*lines: str) -> str:
    """Lines as Mosaic dumps them: an instruction is given as "codes | text", a label as it stands."""
    out, address = [HEADER], 0
    for line in lines:
        if line.startswith("."):
            out.append(f"{line}\n")
            continue
        codes, text = line.split(" | ")
        out.append(f"   {codes}        /*{address:04x}*/                   {text} \n")
        address += 16
    return "".join(out)


def test_an_instruction_and_its_control_codes():
    (block,) = parse_sass(code("2&1:-:3:Y:05 | @!P2 FFMA.FTZ R4, R5, R6, R7 ", "0x0e:1:-:-:12 | EXIT ")).blocks
    first, last = block.instructions
    assert (first.guard, first.opcode, first.base, first.operands) == ("@!P2", "FFMA.FTZ", "FFMA", "R4, R5, R6, R7")
    assert (sorted(first.waits), first.read, first.write, first.stall, first.address) == ([1, 2], None, 3, 5, 0)
    assert (last.waits, last.read, last.write, last.stall, last.address) == ((1, 2, 3), 1, None, 12, 16)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no instruction"),
        (HEADER + "   1:2:Y:05        /*0000*/   EXIT \n", "not a line of machine code"),
        (code("-:-:-:Y:05 | CALL.REL.NOINC `(.L_x_1) "), "control flow that is not known"),
        (code("-:-:-:Y:05 | BRA P2, `(.L_x_1) "), "control flow that is not known"),
        (code("-:-:-:Y:05 | BRA.DIV UR4, `(.L_x_1) "), "control flow that is not known"),
    ],
)
def test_a_dump_in_another_form_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        parse_sass(text)


@pytest.mark.parametrize(
    ("branch", "following"),
    [
        ("@P0 BRA `(.L_x_1) ", (1, 2)),
        ("BRA.U UP0, `(.L_x_1) ", (1, 2)),  # sm_100
        ("BRA.U !UP0, `(.L_x_1) ", (1, 2)),
        ("@P1 CALL.REL.NOINC `(.L_x_1) ", (1, 2)),  # sm_80: no RET goes back
        ("@P1 BREAK B1 ", (1,)),  # sm_80: jumps nowhere
        ("CALL.REL.NOINC `(.L_x_1) ", (2,)),
        ("BRA `(.L_x_1) ", (2,)),
    ],
)
def test_where_a_branch_goes(branch, following):
    first = f"-:-:-:Y:05 | {branch}"
    blocks = parse_sass(
        code(first, "-:-:-:Y:01 | MOV R1, R2 ", ".L_x_1:", "-:-:-:Y:05 | @P9 BRA `(.L_x_1) ", "-:-:-:Y:05 | EXIT ")
    ).blocks
    if "BREAK" in branch:  # no end of a block
        assert [i.base for i in blocks[0].instructions] == ["BREAK", "MOV"]
    assert blocks[0].following == following


NESTED = code(
    "-:-:-:Y:01 | MOV R1, R2 ",
    ".L_x_0:",
    "-:-:-:Y:01 | FADD R1, R1, R2 ",
    ".L_x_1:",
    "-:-:1:Y:02 | SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ",
    "1:-:-:Y:05 | @!P1 BRA `(.L_x_3) ",
    ".L_x_2:",
    "-:-:-:Y:01 | FMUL R1, R1, R2 ",
    "-:-:-:Y:05 | @P0 BRA `(.L_x_4) ",
    "-:-:-:Y:01 | FFMA R1, R1, R2, R3 ",
    ".L_x_4:",
    "-:-:-:Y:05 | @P2 BRA `(.L_x_1) ",
    "-:-:-:Y:05 | @P3 BRA `(.L_x_0) ",
    "-:-:-:Y:05 | EXIT ",
    ".L_x_3:",
    "-:-:1:Y:03 | SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+URZ], R3 ",
    "1:-:-:Y:05 | @!P1 BRA `(.L_x_3) ",
    "-:-:-:Y:05 | BRA `(.L_x_2) ",
)


def test_loops_and_the_ways_round_them():
    """Two loops, one in the other; the loop of a wait that has timed out is none, and no way goes there."""
    machine_code = parse_sass(NESTED)
    outer, inner = machine_code.loops
    assert (outer.depth, inner.depth) == (1, 2)
    assert not outer.innermost and inner.innermost
    assert [i.base for i in machine_code.instructions(outer.own - machine_code.waiting)] == ["FADD", "BRA"]
    ways = [[i.base for i in way] for way in machine_code.ways(inner)]
    assert sorted(ways) == [["SYNCS", "BRA", "FMUL", "BRA", "BRA"], ["SYNCS", "BRA", "FMUL", "BRA", "FFMA", "BRA"]]
    with pytest.raises(ValueError, match="has another within it"):
        machine_code.ways(outer)


def test_a_wait_that_is_its_own_retry_lies_on_the_way():
    """Where ptxas writes a wait once, as a loop to itself, every way round passes it once."""
    machine_code = parse_sass(
        code(
            "-:-:-:Y:01 | MOV R1, R2 ",
            ".L_x_0:",
            "-:-:-:Y:01 | FADD R1, R1, R2 ",
            ".L_x_1:",
            "-:-:1:Y:02 | SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ",
            "1:-:-:Y:05 | @!P1 BRA `(.L_x_1) ",
            "-:-:-:Y:01 | FMUL R1, R1, R2 ",
            "-:-:-:Y:05 | @P0 BRA `(.L_x_0) ",
            "-:-:-:Y:05 | EXIT ",
        )
    )
    (loop,) = machine_code.loops
    assert loop.innermost
    assert [[i.base for i in way] for way in machine_code.ways(loop)] == [["FADD", "SYNCS", "BRA", "FMUL", "BRA"]]


def way(*lines: str):
    (block,) = parse_sass(code(*lines)).blocks
    return list(block.instructions)


def test_cycles_of_what_only_issues():
    """The control codes' stalls, as long as no unit is taken: of one warp, then of three that fill each other's gaps."""
    one = way("-:-:-:Y:04 | FADD R1, R1, R2 ", "-:-:-:Y:02 | FADD R3, R3, R4 ")
    assert cycles(one, 1) == 6
    assert cycles(one, 2) == 6  # four issues in six cycles
    assert cycles(one, 4) == 8  # eight: the port is the limit


def test_cycles_of_a_unit_with_fewer_lanes():
    """MUFU takes a warp in 8 cycles."""
    one = way("-:-:-:Y:01 | MUFU.EX2 R1, R1 ", "-:-:-:Y:01 | MUFU.EX2 R2, R2 ")
    assert cycles(one, 1) == 16
    assert cycles(one, 2) == 32


def test_cycles_until_a_result_is_there():
    one = way("-:-:0:Y:01 | MUFU.EX2 R1, R1 ", "0:-:-:Y:01 | FADD R2, R1, R2 ")
    assert cycles(one, 1) == LATENCY["MUFU"] + 1
    read = way("-:2:-:Y:01 | STS [R1], R2 ", "0x04:-:-:Y:01 | MOV R2, R3 ")
    assert cycles(read, 1) == READ_LATENCY + 1


WGMMA = ("-:-:-:Y:01 | HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0 ", "-:-:-:Y:02 | WARPGROUP.DEPBAR.LE gsb0, 0x0 ")


def test_cycles_of_wgmma():
    """64 x 128 x 16: 64 cycles of the tensor cores, which two warpgroups share; one waits until it sees its result."""
    assert cycles(way(*WGMMA), 1) == WGMMA_START + 64 + WGMMA_SEEN + 2
    assert cycles(way(*WGMMA), 2) == 128
    left = way(WGMMA[0], WGMMA[1].replace("0x0", "0x1"))  # the one before is done: the tensor cores never wait
    assert cycles(left, 1) == 64


def test_wgmma_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="shape that is not known"):
        cycles(way("-:-:-:Y:01 | HGMMA.64x64x8.F32.TF32 R24, R4, gdesc[UR4], R24, gsb0 "), 1)


def test_the_ways_that_wait_for_a_load_count():
    """The last time round a loop there is nothing to wait for: that way is quicker, and says nothing of the others."""
    text = code(
        ".L_x_0:",
        *WGMMA,
        "-:-:-:Y:05 | @P0 BRA `(.L_x_1) ",
        "-:-:1:Y:20 | SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ",
        ".L_x_1:",
        "-:-:-:Y:05 | @P2 BRA `(.L_x_0) ",
        "-:-:-:Y:05 | EXIT ",
    )
    machine_code = parse_sass(text)
    (loop,) = machine_code.loops
    without, waits = sorted(cycles(way, 1) for way in machine_code.ways(loop))
    main = roofline("kernel", machine_code, 1).main
    assert waits == without + 20
    assert main and main.quickest and main.slowest and main.quickest.cycles == main.slowest.cycles == waits


def test_a_kernels_loops_are_counted_and_timed():
    text = code(
        "-:-:-:Y:01 | MOV R1, R2 ",
        ".L_x_0:",
        "-:-:-:Y:01 | CCTL.IVALL ",
        ".L_x_1:",
        *WGMMA,
        "-:-:-:Y:05 | @P0 BRA `(.L_x_2) ",
        *(["-:-:-:Y:10 | FMUL R1, R1, R2 "] * 10),
        ".L_x_2:",
        "-:-:-:Y:05 | @P1 BRA `(.L_x_1) ",
        "-:-:-:Y:01 | LDL R1, [R2] ",
        "-:-:-:Y:05 | @P2 BRA `(.L_x_0) ",
        "-:-:-:Y:05 | EXIT ",
    )
    found = roofline("kernel", parse_sass(text), 1)
    outer, inner = found.loops
    assert (outer.depth, outer.instructions, outer.quickest) == (1, 3, None)
    assert inner.counts == {"HGMMA": 1, "FMUL": 10} and found.main == inner
    assert inner.quickest and inner.slowest
    assert inner.quickest.counts == {"HGMMA": 1} and inner.slowest.counts == {"HGMMA": 1, "FMUL": 10}
    assert inner.quickest.tensor == 64 and inner.quickest.tensor_share == 64 / inner.quickest.cycles
    assert inner.slowest.cycles - inner.quickest.cycles == 100
    said = loop_faults([found], "case")
    assert [fault.partition("/*")[0] for fault in said] == [
        "case: kernel: in the loop at 0x10: empties the L1 cache: ",
        "case: kernel: in the loop at 0x10: local memory: ",
    ]


def test_a_result_has_the_counts_of_every_loop_and_cycles_where_there_are_some():
    found = roofline("portable", parse_sass(NESTED), 1)
    outer, inner = found.as_json()["loops"]
    assert outer == {"address": 16, "depth": 1, "instructions": 2, "counts": {"FADD": 1}}
    assert inner["counts"] == {"FMUL": 1, "SYNCS": 1, "FFMA": 1} and "quickest" not in inner
    assert "no loop runs wgmma; the longest of 2: 6 instructions: 1 SYNCS, 1 FFMA, 1 FMUL" in main_loop(found)
    timed = Roofline("k", 1, (dataclasses.replace(found.loops[1], quickest=(one := Way(10, {}, 100, 90, 50)), slowest=one),))
    (loop,) = timed.as_json()["loops"]
    assert loop["quickest"] == loop["slowest"] == dataclasses.asdict(one)
    assert "no loop" in main_loop(Roofline("k", 1, ()))


def test_kernels_of_equal_bits_do_the_same_float_operations():
    def kernel(**counts: int) -> Roofline:
        one = Way(10, {"HGMMA": 12, "FFMA": 32, "FADD": 4, "MUFU": 34} | counts, 100, 100, 50)
        loops = roofline("k", parse_sass(NESTED), 1).loops
        return Roofline("k", 1, (dataclasses.replace(loops[1], quickest=one, slowest=one),))

    assert not bits_faults({"decode": kernel(), "mixed": kernel(SHFL=3, SYNCS=9)})
    said = bits_faults({"decode": kernel(), "mixed": kernel(FFMA=0, FMUL=32, FADD=36)})
    assert bits_faults({"join": roofline("k", parse_sass(NESTED), 1)}) == ["join: no loop of it runs wgmma"]
    assert len(said) == 2 and said[0].startswith("mixed: the quickest way round its main loop has {'FFMA': 0, 'FMUL': 32")
