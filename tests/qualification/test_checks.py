"""What is tried and how it is judged: batches on the backends of this machine, and each kind of fault that one may have."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import backends, gpu
from kernels.backends import ATTENTION, Backend
from kernels.qualification import attention, grouped_matmul, rotary_write
from kernels.qualification.checks import CHECKS, num_differing, run_check, run_unit
from kernels.qualification.plan import (
    DIFFERS,
    ERROR,
    NO_MEMORY,
    NOT_MEANT,
    NOT_TRIED,
    PASSED,
    TABLES,
    UNCOMPILED,
    WRONG,
    Ask,
    Plan,
    Unit,
    Verdict,
)
from tests.selection import slow_unless

MODEL = {
    "num_query_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 32,
    "dtype": "bfloat16",
    "sliding_windows": [None, 20],
    "num_drafts": 2,
}
EXPERTS = {"num_experts": 12, "num_choices": 2, "products": [[64, 256, True], [128, 64, False]], "dtype": "float16"}
SMALL = Plan({"attention": Ask(), "grouped_matmul": Ask()}, platform="cpu", small=True)


@pytest.mark.parametrize("shapes", slow_unless(lambda shapes: shapes is None, [None, MODEL]), ids=["every card's", "a model's"])
def test_attention_of_this_machine_passes(shapes):
    names: list[str] = []
    verdict = run_unit(SMALL, Unit("attention", "xla", shapes), names.append)
    assert (verdict.result, verdict.reason) == (PASSED, "")
    wanted = [f"{what} of the model{window}" for window in ("", ", window 20") for what in ("decodes", "mixed", "drafts")]
    assert names == (wanted if shapes else ["gpu-decodes-smollm2", "gpu-drafts"])


def test_a_draft_is_asked_about_in_its_own_heads_and_windows():
    draft = {"num_query_heads": 4, "num_kv_heads": 4, "head_dim": 80, "sliding_windows": [None]}
    checks = attention.checks(MODEL | {"draft": draft}, few=True)
    of_draft = [check for check in checks if check.case.name.endswith("of the draft")]
    assert [check.case.name.split()[0] for check in of_draft] == ["decodes", "mixed", "drafts"]
    assert {(check.case.heads, check.case.page_size, check.case.sliding_window) for check in of_draft} == {((4, 4, 80), 32, None)}
    assert [check.case.name for check in checks if check not in of_draft] == [
        c.case.name for c in attention.checks(MODEL, few=True)
    ]
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"):  # the target's batches are tried, whatever the draft's lack
        lacking = [check.lacks(ATTENTION["mosaic_sm90"]) for check in checks]
    assert [lacks is None for lacks in lacking] == [check not in of_draft for check in checks]


@pytest.mark.parametrize("shapes", slow_unless(lambda shapes: shapes is None, [None, EXPERTS]), ids=["every card's", "a model's"])
def test_grouped_matmul_of_this_machine_passes(shapes):
    verdict = run_unit(SMALL, Unit("grouped_matmul", "xla", shapes))
    assert (verdict.result, verdict.reason) == (PASSED, "")


@pytest.mark.parametrize("kernel", slow_unless(lambda kernel: kernel == "rotary_write", TABLES))
def test_a_cards_batches_pass_here(kernel):
    """The ones that are too large for an interpreter: they and their tolerances are right."""
    verdict = run_unit(dataclasses.replace(SMALL, small=False), Unit(kernel, "xla"))
    assert (verdict.result, verdict.reason) == (PASSED, "")


@pytest.mark.parametrize("part", ["query", "key", "value", "slot that no token owns"])
def test_a_rotary_write_that_is_bent_is_seen(part):
    """In one value of each part, by 5% of a step of the pool's numbers or less than that of V."""
    (check,) = (check for check in rotary_write.checks(None, False) if check.case.name == "head_64_norm")
    case, batch = check.case, check.make()
    want = check.reference(batch)
    pages = want[case.T * case.N * case.H :].reshape(case.num_pages, 2, case.K, case.page_size, case.H)
    owned = batch.slot_mapping[batch.slot_mapping < batch.num_slots]
    free = next(slot for slot in range(batch.num_slots) if slot not in owned)
    page, offset = divmod(int(free if part.startswith("slot") else owned[1]), case.page_size)
    bent = want.copy()
    if part == "query":
        bent[0] += 0.2
    else:
        at = np.ravel_multi_index((page, int(part == "value"), 0, offset, 3), pages.shape) + case.T * case.N * case.H
        bent[at] += 0.2 if part != "value" else 2**-6 * max(1.0, abs(want[at]))
    assert check.error(want, want) == 0 and check.error(bent, want) > check.tolerances[case.dtype]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_our_kernels_pass_interpreted():
    """Those that Pallas can interpret: of the others it is said what is missing."""
    plan = dataclasses.replace(SMALL, platform="gpu", interpreted=True)
    for kernel in plan.asks:
        assert run_unit(plan, Unit(kernel, "mosaic_sm90")).result == PASSED
        for row in plan.rows(kernel):
            verdict = run_unit(plan, Unit(kernel, row.name)) if row.name != "mosaic_sm90" else None
            assert verdict is None or verdict.result == NOT_MEANT and "no interpreter" in verdict.reason


def test_the_batches_have_what_breaks_kernels():
    """Each kind of thing that a batch may have is in at least one."""
    checks = attention.checks(None, False)
    cases = [check.case for check in checks]
    assert {case.page_size for case in cases} >= {16, 64, 128} and {case.heads.H for case in cases} >= {64, 128}
    assert {case.dtype for case in cases} == {"bfloat16", "float16"}
    assert any(case.sliding_window for case in cases) and any(case.soft_cap for case in cases)
    assert any((0, 0) in case.seqs for case in cases) and any(not any(q for q, _ in case.seqs) for case in cases)
    assert max(len(case.seqs) for case in cases) >= 32 and max(kv for case in cases for _, kv in case.seqs) >= 2000
    assert any(check.split_q_len > 1 for check in checks)
    grouped = [check.case for check in grouped_matmul.checks(None, False)]
    assert {case.dtype for case in grouped} == {"bfloat16", "float16"} and any(case.num_tokens == 0 for case in grouped)
    assert any(case.skewed for case in grouped) and any(case.active for case in grouped)  # empty groups
    assert max(case.D for case in grouped) >= 768  # every slot of the ring three times
    assert {"bfloat16_sizes", "bfloat16_deep"} <= {case.name for case in grouped}


class Numbers(NamedTuple):
    name: str = "numbers"
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Faulty:
    """A batch of 8 numbers, and a program of it."""

    tolerances: ClassVar[Mapping[str, float]] = {"float32": 1e-3}
    function: Callable[..., Any]
    case: Numbers = Numbers()

    def lacks(self, row):
        return row.functions

    def make(self):
        return jnp.arange(8.0)

    def program(self, row, batch):
        return self.function, (batch,)

    def owned(self, values):
        return values

    def reference(self, batch):
        return np.asarray(batch)

    def error(self, got, want):
        return float(np.abs(got - want).max())


def unstable(x):
    """Differs in its last bits from call to call."""
    calls = iter(range(100))
    return jax.pure_callback(lambda x: x + np.float32(1e-6) * next(calls), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def fails(error: Exception, x):
    def callback(x):
        raise error

    return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def refuses(error: Exception, x):
    raise error


@pytest.mark.parametrize(
    ("function", "result", "reason"),
    [
        (lambda x: x, PASSED, ""),
        (lambda x: x + 1e-4, PASSED, ""),
        (lambda x: x.at[3].add(0.5), WRONG, "numbers: off by 0.5, at most 0.001 is right"),
        (lambda x: x.at[3].set(jnp.nan), WRONG, "numbers: 1 of 8 values are not finite"),
        (lambda x: x.at[3].set(jnp.inf), WRONG, "numbers: 1 of 8 values are not finite"),
        (unstable, DIFFERS, "values differ between two runs"),
        (
            functools.partial(refuses, RuntimeError("no such instruction\nand more")),
            UNCOMPILED,
            "RuntimeError: no such instruction",
        ),
        (functools.partial(refuses, NotImplementedError("registers")), UNCOMPILED, "numbers: NotImplementedError: registers"),
        (functools.partial(refuses, RuntimeError("RESOURCE_EXHAUSTED: 3 GiB")), NO_MEMORY, "3 GiB"),
        (functools.partial(fails, RuntimeError("illegal address")), ERROR, "illegal address"),
        (functools.partial(fails, MemoryError("RESOURCE_EXHAUSTED")), NO_MEMORY, ""),
    ],
)
def test_each_kind_of_fault_is_told_from_the_others(function, result, reason):
    got, why = run_check(Faulty(function), Backend("any", None))
    assert got == result and (reason in why if reason else got != PASSED or not why)


@pytest.mark.parametrize("method", ["make", "reference"])
def test_a_reference_that_can_not_be_made_says_nothing_of_the_kernel(method, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("INTERNAL: CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(Faulty, method, no_memory)
    assert run_check(Faulty(lambda x: x), Backend("any", None))[0] == NO_MEMORY
    monkeypatch.setattr(Faulty, method, lambda *_: 1 / 0)
    result, why = run_check(Faulty(lambda x: x), Backend("any", None))
    assert result == NOT_TRIED and "numbers: no reference: ZeroDivisionError" in why


def test_bits_are_compared_and_not_values():
    x = np.array([0.0, 1.0, 2.0], np.float32)
    assert num_differing(x, x.copy()) == 0 and num_differing(x, np.array([-0.0, 1.0, 2.0], np.float32)) == 1
    assert num_differing(jnp.asarray(x, jnp.bfloat16).__array__(), jnp.asarray(x + 1, jnp.bfloat16).__array__()) == 3
    assert num_differing(np.zeros((2, 0)), np.zeros((2, 0))) == 0


def test_what_a_backend_lacks_is_said():
    verdict = run_unit(dataclasses.replace(SMALL, platform="gpu"), Unit("attention", "mosaic_sm90"))
    assert verdict.result == NOT_MEANT and "compute capability 9.0, found cpu" in verdict.reason


def test_every_kernel_of_ours_is_asked_about():
    """A row that is added to a table is tried without another word, and so is a table that "auto" may take a row of ours from."""
    tables = {name.lower(): table for name, table in vars(backends).items() if isinstance(table, backends.Backends)}
    assert tables.keys() > TABLES.keys()
    plan = Plan({kernel: Ask() for kernel in TABLES}, every=True)
    for kernel, table in tables.items():
        ours = [row.name for row in table.automatic("gpu") if row.name not in ("xla", "reference", "right", "bent", "twin")]
        assert (kernel in TABLES) == bool(ours), f"{kernel}: {ours}"
        if ours:
            assert TABLES[kernel] is table and CHECKS[kernel].checks(None, False)
            assert [row.name for row in plan.rows(kernel)] == ours


def test_a_named_backend_is_asked_about_and_plain_xla_never():
    assert [row.name for row in Plan({"attention": Ask("mosaic_sm90")}).rows("attention")] == ["mosaic_sm90"]
    assert not list(Plan({"attention": Ask("xla")}).rows("attention"))
    assert Plan({"attention": Ask("xla")}).next_unit({}) is None


def test_a_plan_survives_its_journey():
    plan = Plan({"attention": Ask("auto", MODEL), "grouped_matmul": Ask("xla")}, platform="gpu", every=True, interpreted=True)
    known = {"attention mosaic_sm90": Verdict("attention", "mosaic_sm90", PASSED, "", 1.5)}
    again, verdicts = Plan.from_json(plan.to_json(known))
    assert verdicts == known and again == plan
    first, second = plan.units("attention", ATTENTION["mosaic_sm90"])
    assert first.name == "attention mosaic_sm90"
    assert second.name == (
        "attention mosaic_sm90 dtype=bfloat16 head_dim=64 num_drafts=2 num_kv_heads=2 num_query_heads=6 page_size=32 "
        "sliding_windows=[null,20]"
    )
