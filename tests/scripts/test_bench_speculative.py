"""scripts.bench_speculative and bench_structured run, and what they report fits. How large it is is no test's business."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from jaxserve import BucketPlan
from jaxserve.scheduling.schedule import LogitsRows
from scripts import bench_structured
from scripts.bench.timed_device import TimedDevice
from tests import alphabet_model

ROOT = Path(__file__).parents[2]


def run(work: Path, name: str, *given: str) -> dict:
    environment = os.environ | {"JAXSERVE_CACHE": str(work / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", f"scripts.{name}", "--json=-", *given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """One folder for runs of the same programs, which the second finds compiled."""
    return tmp_path_factory.mktemp("work")


@pytest.mark.parametrize("task, temperature", [("code", 0), ("chat", 1.5)])
@pytest.mark.slow
def test_both_sides_of_speculation_answer_alike(task, temperature, work):
    """In steps of one shape they must."""
    model = alphabet_model.save(work / "model", max_position_embeddings=1024)
    BucketPlan(mixed=((64, 2),), head_rows=(6,)).save(work / "plan.json")
    flags = [f"--model={model}", f"--bucket_plan={work / 'plan.json'}", "--max_num_seqs=2", "--max_num_batched_tokens=64"]
    flags += [f"--tasks={task}", f"--temperature={temperature}", "--batches=2", "--rounds=2", "--max_tokens=12"]
    (result,) = run(work, "bench_speculative", *flags, "--num_speculative_tokens=2", "--noadaptive")["results"]
    assert (result["task"], result["batch"], result["num_outputs"]) == (task, 2, 16)
    assert result["num_outputs_that_differ"] == 0 and result["largest_gap_where_they_part"] is None
    assert result["method"] == "ngram" and 1 <= result["accepted_length"] <= 3
    assert len(result["runs"]["on"]) == 2 and min(result["runs"]["on"] + result["runs"]["off"]) > 0
    assert 0 <= result["acceptance"] <= 1 and result["tokens_per_step"] > 0
    assert result["steps_by_bucket"] == {"mixed(64,2)": result["num_steps"]}
    assert set(result["steps_by_num_drafts"]) <= {"0", "1", "2"} and "2" in result["steps_by_num_drafts"]
    assert 0 < sum(result["steps_by_num_drafts"].values()) <= result["num_steps"], "of prompts alone, some"


@pytest.mark.slow
def test_methods_by_turns(work):
    """The model drafts for itself: all drafts stand. Of 12 tokens one comes with the prompt, and the last step has less room."""
    model = alphabet_model.save(work / "model", max_position_embeddings=1024)
    BucketPlan(mixed=((64, 2),), head_rows=(6,)).save(work / "plan.json")
    flags = [f"--model={model}", f"--bucket_plan={work / 'plan.json'}", "--max_num_seqs=2", "--max_num_batched_tokens=64"]
    flags += ["--tasks=chat", "--batches=1,2", "--rounds=1", "--max_tokens=12", "--num_speculative_tokens=2"]
    results = run(work, "bench_speculative", *flags, "--methods=suffix,draft_model", f"--draft_model={model}")["results"]
    assert [(r["method"], r["batch"]) for r in results] == [(m, b) for b in (1, 2) for m in ("suffix", "draft_model")]
    by_itself = [r for r in results if r["method"] == "draft_model"]
    assert all(2.2 < r["accepted_length"] <= 3 and r["num_outputs_that_differ"] == 0 for r in by_itself)
    assert 1 <= by_itself[0]["tokens_per_sequence_step"] <= 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods=eagle3"], "--eagle3: give it if and only if eagle3 is of --methods"),
        (["--medusa=here"], "--medusa: give it if and only if medusa is of --methods"),
        (["--methods=ngram,guess"], "--methods: guess must be of ngram, suffix"),
        (["--methods=ngram,suffix", "--num_speculative_tokens=1,2,3"], "one integer above 0, or one for each of --methods"),
        (["--methods=suffix", "--prompt_lookup_max=3"], "are of ngram, which is not of --methods"),
    ],
)
def test_methods_that_make_no_sense_are_refused(flags, message):
    done = python("-m", "scripts.bench_speculative", "--model=nowhere", *flags)
    assert done.returncode and message in done.stderr + done.stdout


def python(*given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *given], capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("batch", ["9", "0", "two"])
def test_a_batch_of_more_than_there_are_prompts_is_refused(batch):
    done = python("-m", "scripts.bench_speculative", f"--batches=1,{batch}", "--model=nowhere")
    assert done.returncode and f"--batches: {batch} must be an integer from 1 to 8" in done.stderr + done.stdout


def test_each_task_has_as_many_prompts_as_the_largest_batch():
    code = "from scripts.bench_speculative import TASKS\nprint([len(set(t)) for t in TASKS.values()])"
    assert python("-c", code).stdout == "[8, 8, 8]\n"


def test_the_gap_where_outputs_part():
    """Of each output the first token that differs counts; of all outputs, the largest lead there."""
    code = """
from types import SimpleNamespace as Logprob
from scripts.bench_speculative import largest_gap_where_they_part as largest

def entries(*leads):
    return [{0: Logprob(logprob=-1.0), 1: Logprob(logprob=-1.0 - lead), 2: Logprob(logprob=-9.0)} for lead in leads]

off = {"tokens": [[5, 6, 7], [5, 6], [8]], "logprobs": [entries(4.0, 0.25, 3.0), entries(0.5, 2.0), entries(5.0)]}
same, first, later = [[5, 6, 7], [5, 6], [8]], [[5, 9, 9], [5, 6], [8]], [[5, 6, 7], [4, 9, 9], [8]]
for outputs in ([same], [same, first], [same, first, later]):
    print(largest(off, [{"tokens": tokens} for tokens in outputs]))
"""
    assert python("-c", code).stdout.split() == ["None", "0.25", "0.5"]


@pytest.mark.slow
def test_grammars_on_a_timer(tmp_path):
    model = alphabet_model.save(tmp_path / "model")
    flags = [f"--tokenizer={model}", "--rows=2,3", "--steps=4", "--compiles=2", "--step_ms=1", "--head_ms=0.2"]
    result = run(tmp_path, "bench_structured", *flags)
    assert [(row["schema"], row["rows"]) for row in result["masks"]] == [(s, n) for s in bench_structured.SIZES for n in (2, 3)]
    for row in result["masks"]:
        assert 0 < row["fill_ms"] <= row["work_p99_ms"] and 0 <= row["hidden"] <= 1 and row["step_ms"] > 0
    vocabulary = result["compiles"]["vocabulary"]
    assert vocabulary["read_ms"] > 0 and vocabulary["longest_gap_ms"] > 0
    assert all(0 < result["compiles"][s]["median_ms"] <= result["compiles"][s]["max_ms"] for s in bench_structured.SIZES)


@pytest.mark.slow
def test_grammars_of_drafts_on_a_timer(tmp_path):
    """The device would object to a mask that forbids a document's token, of a draft's row too."""
    model = alphabet_model.save(tmp_path / "model")
    flags = [f"--tokenizer={model}", "--rows=3", "--steps=8", "--compiles=2", "--step_ms=1", "--head_ms=0.2"]
    result = run(tmp_path, "bench_structured", *flags, "--num_speculative_tokens=2")
    assert result["num_speculative_tokens"] == 2 and len(result["masks"]) == len(bench_structured.SIZES)
    assert all(2 < row["tokens_per_row"] <= 3 for row in result["masks"]), "all drafts stand, but for those of a document's end"


@pytest.mark.parametrize("num_properties", [3, 40])
def test_documents_fit_their_schemas(num_properties):
    rng = np.random.default_rng(num_properties)
    for _ in range(10):
        schema = bench_structured.make_schema(rng, num_properties)
        jsonschema_rs.validate(schema, bench_structured.make_document(rng, schema))


def timed_device(body: float, to_come: list[list[int]]) -> TimedDevice:
    """Between steps of an entry for each list of the tokens to come: a decode with as many drafts as fit half of them."""
    n, num_drafts = len(to_come), len(to_come[0]) // 2
    runner, pipeline = SimpleNamespace(score_rows=1), SimpleNamespace()
    requests, q_lens = [SimpleNamespace(num_forced_in_flight=0)] * n, np.full(n, 1 + num_drafts)
    schedule: Any = SimpleNamespace(requests=requests, samples=np.ones(n, bool), num_seqs=n, num_decodes=n, q_lens=q_lens)
    schedule.rows, schedule.num_drafts, schedule.num_tokens = np.arange(n), n * num_drafts, n * (1 + num_drafts)
    schedule.logits_rows = LogitsRows.of(schedule)
    engine = SimpleNamespace(runner=runner, pipeline=pipeline, scheduler=SimpleNamespace(schedule=lambda: schedule))
    made = TimedDevice(engine, body, 0.0, lambda schedule: np.array(to_come, np.int32), num_drafts)
    engine.scheduler.schedule()
    return made


INPUTS: Any = SimpleNamespace(head_rows=1)


def dispatch(device: TimedDevice, masks: Callable[[], np.ndarray]) -> Any:
    """As an engine does: the masks are made while the body runs."""
    body = device.dispatch_body(INPUTS)
    return device.dispatch_head(body, masks())


def test_a_head_waits_for_what_the_body_does_not_hide():
    def masks() -> np.ndarray:
        time.sleep(0.02)
        return np.array([[0, 2]], np.int32)  # token 33 alone

    hidden, exposed = timed_device(60.0, [[33]]), timed_device(0.0, [[33]])
    dispatch(hidden, masks)
    handle = dispatch(exposed, masks)
    assert hidden.late == [0.0] and exposed.late[0] >= 0.02
    assert exposed.fetch(handle).tokens.tolist() == [33]
    with pytest.raises(AssertionError, match="not what the grammars allow"):
        dispatch(exposed, lambda: np.array([[1, 1]], np.int32))


def test_drafts_of_a_timed_device_stand():
    device = timed_device(0.0, [[5, 6, 7, 8, 9], [1, 2, -1, -1, -1]])
    masks = np.array([[1 << 5], [1 << 6], [1 << 7], [1 << 1], [1 << 2], [0]], np.int32)
    sampled = device.fetch(dispatch(device, lambda: masks))
    assert sampled.delivered is not None and sampled.drafts is not None
    assert sampled.tokens.tolist()[:5] == [5, 6, 7, 1, 2] and sampled.delivered.tolist() == [True] * 5 + [False]
    assert sampled.drafts.tolist() == [[6, 7], [7, 8], [8, 9], [2, -1], [-1, -1], [-1, -1]]
    masks[1] = 1 << 7
    with pytest.raises(AssertionError, match="not what the grammars allow"):
        dispatch(device, lambda: masks)
