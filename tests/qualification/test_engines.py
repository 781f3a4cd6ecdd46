"""What follows for an engine: which kernels it takes, what it says of them, and that it answers. The card is a CPU."""

import dataclasses
import functools
import json
import logging
import os
import subprocess
import sys

import pytest

import jaxserve
from jaxserve.engine import kernel_choice
from jaxserve.qualification import qualify as qualify_module
from kernels import gpu
from kernels.cpu import library
from kernels.qualification.plan import PASSED, WRONG
from tests import alphabet_model
from tests.dummy import CONFIG, SETTINGS, dummy_model
from tests.qualification import fake_child
from tests.qualification.conftest import CARD, HERE, LIMITS
from tests.selection import slow_unless
from tests.serving.http_server import serving

SMALL_PLAN = jaxserve.BucketPlan(mixed=((16, 2),), head_rows=(2,))
REAL = [sys.executable, str(HERE / "real_child.py")]
NEXT = "xla" if library.load() is None else "cpu"  # what "auto" takes on a CPU behind the fakes: no card is asked about it


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


@pytest.mark.slow
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


@pytest.mark.parametrize("behaviour", slow_unless(lambda name: name != "hang", ["hang", "segv", "uncompiled", "memory"]))
def test_whatever_goes_wrong_the_engine_starts_and_answers(card, fake, behaviour):
    card(fake(bent=behaviour, right=behaviour), limits=dataclasses.replace(LIMITS, batch=0.5))
    llm = make()
    assert llm.engine.config.attention_backend == NEXT and len(answer(llm)) > 0


def test_a_process_that_can_not_be_started_leaves_the_next_row(card):
    card(["/nowhere/python"])
    llm = make()
    assert llm.engine.config.attention_backend == NEXT
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
    assert choose().layer.moe == "twin"
    card(fake(bent="wrong", twin="segv", mosaic_sm90="lacks"))
    chosen = choose()
    assert (chosen.attention, chosen.layer.moe) == ("right", NEXT)
    assert "grouped_matmul twin LEFT OUT, crashed: a batch: signal SIGSEGV" in chosen.said


def test_a_cpu_is_asked_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    llm = make(attention_backend="xla")
    assert llm.describe().qualification == "none: no GPU here" and llm.engine.qualification is None
    assert not (tmp_path / "qualification").exists()


LOADS = """
import sys
from jax._src import xla_bridge
from jaxserve.engine import kernel_choice
asked = []
kernel_choice.find_card = lambda *, ask_jax: asked.append((ask_jax, xla_bridge.backends_are_initialized()))
import jaxserve
jaxserve.LLM(sys.argv[1], skip_tokenizer_init=True, num_pages=8, page_size=16, max_model_len=64, compilation_cache_dir="")
print(asked)
"""


def test_a_model_from_files_is_asked_about_before_jax_takes_the_device(tmp_path):
    """The first question is put while JAX has no backend, so that the process that tries kernels has the device to itself."""
    alphabet_model.save(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[(False, False), (True, True)]"


@pytest.mark.parametrize("behaviour", slow_unless(lambda name: name == "memory", ["wrong", "memory"]))
def test_what_was_found_before_the_weights_is_not_asked_again(card, fake, starts, tmp_path, behaviour):
    """Nor where it can't be kept, nor where there was no memory, of which there is less once the weights are read."""
    alphabet_model.save(tmp_path / "model")
    right, taken = ("memory", NEXT) if behaviour == "memory" else ("pass", "right")
    card(fake(bent=behaviour, right=right))
    (tmp_path / "cache").write_text("in the way")
    options = {"skip_tokenizer_init": True, "num_pages": 8, "page_size": 16, "max_model_len": 64, "compilation_cache_dir": ""}
    llm = jaxserve.LLM(tmp_path / "model", **options)
    assert llm.engine.config.attention_backend == taken and starts() == 1
    assert llm.describe().qualification.startswith("kernels on Fake 3000")


def test_the_server_says_what_was_found(card, fake):
    card(fake(bent="segv"))
    engine = make()
    with serving(engine) as server:
        health = server.client.get("/health").json()
    assert health == {"status": "ok", "reason": None, "kernels": engine.describe().qualification}
    assert "attention bent LEFT OUT, crashed: a batch: signal SIGSEGV" in health["kernels"]


def run_command(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve", "qualify", *args]
    return subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"max_model_len": 10**6}, ValueError, "must not exceed the model's max_position_embeddings"),
        ({"max_model_len": 64, "num_pages": 1}, ValueError, "the pool has 1"),
        ({"max_num_seqs": 3}, ValueError, "lower max_num_seqs to 2"),
        ({"deterministic": "always", "attention_backend": "reference"}, ValueError, "follows the bucket"),
        ({"tbt_slo_ms": 20, "step_times": "/nowhere.json"}, (ValueError, OSError), "/nowhere.json"),
        ({"attention_backend": "mosaic_sm90"}, NotImplementedError, "mosaic_sm90"),
    ],
)
def test_bad_options_are_refused_before_kernels_are_tried(card, starts, fake, settings, error, message):
    card(fake())
    with pytest.raises(error, match=message):
        make(**settings)
    assert starts() == 0
    make().close()
    assert starts() == 1


def test_the_command_does_nothing_on_a_cpu_and_says_so():
    done = run_command()
    assert done.returncode == 0 and done.stdout == "JAX uses no GPU here: nothing to qualify, XLA's kernels run\n"
    assert json.loads(run_command("--json").stdout)["card"] is None


@pytest.mark.parametrize(
    "given, message",
    [
        (["--model=/nowhere"], "/nowhere"),
        (["--page_size=32", "--dtype=float32"], "--dtype, --page_size: of a model's shapes: give --model"),
    ],
)
def test_the_command_refuses_what_it_can_not_use(given, message):
    done = run_command(*given)
    assert done.returncode == 1 and message in done.stderr + done.stdout and "Traceback" not in done.stderr


def test_the_command_tries_a_models_shapes_for_its_engine(fake, starts, tmp_path, card):
    """With the shapes that the engine of that model then asks for: it finds the record."""
    alphabet_model.save(tmp_path / "model")
    command, cache = fake(mosaic_sm90="lacks"), tmp_path / "cache"
    given = [json.dumps(command), str(cache), f"--model={tmp_path / 'model'}", "--page_size=16", "--dtype=float32", "--json"]
    done = subprocess.run([sys.executable, str(HERE / "fake_command.py"), *given], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert starts() == 1 and sum(v["backend"] == "bent" for v in json.loads(done.stdout)["verdicts"]) == 2
    card(fake())

    def start(page_size: int) -> None:
        options = {"num_pages": 8, "page_size": page_size, "max_model_len": 64, "compilation_cache_dir": ""}
        jaxserve.LLM(tmp_path / "model", dtype="float32", skip_tokenizer_init=True, **options).close()

    start(16)
    assert starts() == 1
    start(32)
    assert starts() == 2, "or the test could not fail"


@pytest.mark.parametrize(
    ("behaviour", "status"),
    [("wrong", 1), *(pytest.param(*other, marks=pytest.mark.slow) for other in (("pass", 0), ("lacks", 0), ("memory", 1)))],
)
def test_the_command_tries_all_and_its_status_tells(fake, starts, tmp_path, behaviour, status):
    """In a process of its own, since commands share no flags."""
    command = fake(right=behaviour, mosaic_sm90="lacks")

    def run(*args):
        given = [json.dumps(command), str(tmp_path / "cache"), *args]
        return subprocess.run([sys.executable, str(HERE / "fake_command.py"), *given], capture_output=True, text=True, timeout=120)

    done = run()
    assert done.returncode == status, done.stderr
    assert "Fake 3000 (compute capability 9.9" in done.stdout and "attention bent: passed" in done.stdout
    assert f"attention right: {fake_child.SAID[behaviour]} ({behaviour} of a fake)" in done.stdout
    again = json.loads(run("--json").stdout)
    assert starts() == 1 + (behaviour == "memory") and again["card"]["name"] == "Fake 3000"
    assert [v["result"] for v in again["verdicts"] if v["backend"] == "right"] == [fake_child.SAID[behaviour]]
    before = starts()
    assert run("--again").returncode == status and starts() == before + 1
