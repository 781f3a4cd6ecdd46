"""What follows for an engine: which kernels it takes, what it says of them, and that it answers. The card is a CPU."""

import dataclasses
import functools
import logging
import sys

import pytest

import jaxserve
from jaxserve.engine import kernel_choice
from jaxserve.qualification import qualify as qualify_module
from kernels import gpu
from kernels.qualification.plan import PASSED, WRONG
from tests.dummy import CONFIG, SETTINGS, dummy_model
from tests.qualification.conftest import CARD, HERE, LIMITS

SMALL_PLAN = jaxserve.BucketPlan(mixed=((16, 2),), head_rows=(2,))
REAL = [sys.executable, str(HERE / "real_child.py")]


@pytest.fixture
def card(monkeypatch, tmp_path):
    """Of a command, a machine whose GPU is CARD and is tried by it. Returns the folder of its records."""

    def install(command, card=CARD, limits=LIMITS):
        folder = tmp_path / "cache"
        monkeypatch.setenv("JAXSERVE_CACHE", str(folder))
        monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
        monkeypatch.setattr(kernel_choice, "find_card", lambda *, ask_jax: card)
        monkeypatch.setattr(kernel_choice, "qualify", functools.partial(qualify_module.qualify, command=command, limits=limits))
        monkeypatch.setattr(qualify_module, "_found", {})
        return folder / "qualification"

    return install


def make(**settings) -> jaxserve.LLM:
    settings = SETTINGS | {"max_num_seqs": 2, "max_num_batched_tokens": 16, "bucket_plan": SMALL_PLAN} | settings
    return jaxserve.LLM.from_params(dummy_model("bfloat16"), **settings)


def answer(llm) -> list[int]:
    (output,) = llm.generate([[5, 9, 3, 7]], jaxserve.SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return output.outputs[0].token_ids


def test_a_bent_kernel_is_found_by_running_it_and_the_engine_answers_on_the_next_one(card, caplog):
    """For real: a process that compiles, runs and compares; the fake is the card's name alone."""
    folder = card(REAL)
    with caplog.at_level(logging.INFO, logger="jaxserve"):
        llm = make()
    assert llm.engine.config.attention_backend == "right"
    described = llm.describe()
    assert described.verdicts is not None and described.qualification in caplog.text
    found = {(v["backend"], v["result"]) for v in described.verdicts["verdicts"]}
    assert found == {("bent", WRONG), ("right", PASSED), ("twin", PASSED)}
    why = described.verdicts["left_out"]["attention"]["bent"]
    assert why.startswith("wrong values: gpu-decodes-smollm2: off by 0.0")
    lines = [r for r in caplog.records if r.levelno == logging.WARNING and "LEFT OUT" in r.getMessage()]
    assert len(lines) == 1 and "\n" not in lines[0].getMessage()
    assert len(list(folder.glob("*.json"))) == 1
    qualify_module._found.clear()
    card(["/nowhere"])  # the record is enough
    again = make()
    assert again.engine.config.attention_backend == "right"
    assert again.describe().verdicts == described.verdicts
    card(["/nowhere"], card=None)
    plain = make()
    assert plain.engine.config.attention_backend == "bent", "it would have been taken"
    xla = make(attention_backend="xla")
    assert answer(llm) == answer(xla)


def test_one_that_passes_is_taken_without_a_warning(card, fake, caplog):
    card(fake())
    llm = make()
    assert llm.engine.config.attention_backend == "bent" and not caplog.records
    assert "attention bent passed" in llm.describe().qualification and "attention bent passed" in llm.engine.describe()


@pytest.mark.parametrize("behaviour", ["hang", "segv", "uncompiled", "memory"])
def test_whatever_goes_wrong_the_engine_starts_and_answers(card, fake, behaviour):
    card(fake(bent=behaviour, right=behaviour), limits=dataclasses.replace(LIMITS, unit=0.5))
    llm = make()
    assert llm.engine.config.attention_backend == "xla" and len(answer(llm)) > 0


def test_a_process_that_can_not_be_started_leaves_xla(card):
    card(["/nowhere/python"])
    llm = make()
    assert llm.engine.config.attention_backend == "xla"
    assert "not tried" in llm.describe().qualification and "/nowhere/python" in llm.describe().qualification


def test_skipped_is_skipped(card):
    folder = card(["/nowhere"])
    llm = make(skip_qualification=True)
    assert llm.engine.config.attention_backend == "bent" and not folder.exists()
    assert llm.describe().qualification == llm.engine.qualification == "skipped" and llm.describe().verdicts is None


def test_a_named_backend_is_used_with_a_warning(card, fake, caplog):
    """Our Hopper kernel, on a card that found it wrong: the user has the last word."""
    card(fake(mosaic_sm90="wrong"))
    config = jaxserve.EngineConfig(attention_backend="mosaic_sm90", page_size=16)
    with gpu.interpreted():
        chosen = kernel_choice.choose_kernels(dataclasses.replace(CONFIG, head_dim=64), "bfloat16", config)
    assert chosen.attention == "mosaic_sm90"
    said = [r.getMessage() for r in caplog.records if "as asked" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("attention runs on mosaic_sm90 as asked")
    assert "wrong values: wrong of a fake" in said[0]


def test_experts_that_fail_run_on_the_next_row(card, fake):
    sparse = {"sparse_layers": (0, 1), "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32}
    choose = functools.partial(
        kernel_choice.choose_kernels, dataclasses.replace(CONFIG, **sparse), "float32", jaxserve.EngineConfig()
    )
    card(None, card=None)
    assert choose().moe == "twin"
    card(fake(bent="wrong", twin="segv", mosaic_sm90="lacks"))
    chosen = choose()
    assert (chosen.attention, chosen.moe) == ("right", "xla")
    assert "grouped_matmul twin LEFT OUT, crashed: a batch: signal SIGSEGV" in chosen.said


def test_a_cpu_is_asked_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    llm = make(attention_backend="xla")
    assert llm.describe().qualification == "none: no GPU here" and llm.engine.qualification is None
    assert not (tmp_path / "qualification").exists()
