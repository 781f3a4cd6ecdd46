"""Engines whose devices belong to several processes, here with CPU devices: they answer as one process does, and when a host is
lost everybody is told in time."""

import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import alphabet_model
from tests.checkpoints.gguf_files import write_gguf
from tests.selection import chosen, exhaustive_unless

ROOT = Path(__file__).parents[2]
OPTIONS = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 64}
OPTIONS |= {"bucket_plan": {"format": "jaxserve-bucket-plan-1", "decode": [], "mixed": [[16, 4]], "head_rows": [4]}}
OPTIONS |= {"tensor_parallel_size": 2, "warm_up": "all", "compilation_cache_dir": ""}
REQUESTS = int(os.environ.get("HOST_REQUESTS", 60))  # of the random ones
IN_TIME = 15.0  # seconds from a loss to when it is said
ENDED_IN = 30.0  # and to the process's end, on a machine that has much else to do


def start(num_hosts: int, num_devices: int, **asked: Any) -> list[subprocess.Popen]:
    """The processes of a group, or one alone, with so many devices each."""
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}", "JAX_PLATFORMS": "cpu"}
    with socket.create_server(("", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    places = [{"host_id": i, "num_hosts": num_hosts, "coordinator": address} for i in range(num_hosts)] if num_hosts > 1 else [{}]
    command = [sys.executable, "-m", "tests.hosts.program"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if REQUESTS > 1000:  # it takes long: with -s, progress is seen
        pipes["stderr"] = None
    return [subprocess.Popen([*command, json.dumps(asked | place)], cwd=ROOT, env=env, **pipes) for place in places]


def found(processes: list[subprocess.Popen]) -> Any:
    """What host 0 found, once all have ended well."""
    outputs = [process.communicate(timeout=300 + REQUESTS)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return json.loads(outputs[0].strip().splitlines()[-1])


@pytest.fixture
def started():
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


LAYOUTS = {  # processes, devices of each, and the engine's
    "two_devices": (2, 1, {"tensor_parallel_size": 2}),
    "two_stages": (2, 1, {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}),
    "two_stages_of_two": (2, 2, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", exhaustive_unless(lambda name: name != "two_stages", LAYOUTS))
def test_an_llm_on_two_hosts(layout, tmp_path, started):
    """Its texts can be predicted; steps, masks, log-probabilities, scores, sleep and weights reach the other host and come back;
    nothing is compiled after warm-up."""
    num_hosts, num_devices, sizes = LAYOUTS[layout]
    plain = alphabet_model.weights(num_layers=2)
    by_twos = plain | {"lm_head.weight": np.roll(plain["lm_head.weight"], 1, axis=0)}
    save = functools.partial(alphabet_model.save, num_hidden_layers=2)
    folder, other = str(save(tmp_path / "model", tensors=plain)), str(save(tmp_path / "other", tensors=by_twos))
    asked = {"scenario": "whole_llm", "folder": folder, "other": other, **OPTIONS, **sizes}
    started += start(num_hosts, num_devices, **asked)
    answers = found(started)
    assert answers["greedy"] == ["bcde", "lmno"] and answers["form"] == ["xyz"]
    assert answers["awake"] == ["cdef"] and answers["other weights"] == ["egik"] and answers["after refusals"] == ["fhjl"]
    assert "FileNotFoundError" in answers["refused 6"] and "NotImplementedError: with 2 hosts update_params" in answers["refused 7"]
    assert answers["compiled"] == 0
    saved, plain = answers["not saved"]
    assert (
        saved.startswith("a version is written by one process, and this is one of 2") and "lies on devices of other proc" in plain
    )
    for after, ((token, logprob),) in zip(b"z{|}", answers["logprobs"], strict=True):
        assert token == after + 1 and logprob == pytest.approx(logprob_of(token, after), abs=1e-5)
    for token, after, ((scored, logprob),) in zip(b"bz", b"ab", answers["scores"][1:], strict=True):
        assert scored == token and logprob == pytest.approx(logprob_of(token, after), abs=1e-5)


def logprob_of(token: int, after: int) -> float:
    """Of the model that says the alphabet, written down apart from it."""
    logits = alphabet_model.logits(after).astype(np.float64)
    return float(logits[token] - np.log(np.exp(logits).sum()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("gguf", "two_stages_of_two"),
        pytest.param("orbax", "two_stages_of_two", marks=pytest.mark.exhaustive),
        ("orbax", "two_devices"),
    ],
)
def test_other_forms_of_files_on_two_hosts(form, layout, tmp_path, started):
    """A llama with tied embeddings, which the last stage has a copy of: from a GGUF file, and from an Orbax folder made of it. It
    answers as on one device."""
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama")
    if form == "orbax":
        command = [sys.executable, "-m", "jaxserve", "convert", f"--model={path}", f"--output={tmp_path / 'orbax'}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        path = tmp_path / "orbax"
    num_hosts, num_devices, sizes = LAYOUTS[layout]
    prompts = [np.random.default_rng(5).integers(4, 250, n).tolist() for n in (3, 17, 30)]
    asked = {"scenario": "read_llm", "path": str(path), "prompts": prompts, **OPTIONS, "attention_backend": "xla"}
    started += start(1, 1, **asked | {"tensor_parallel_size": 1})
    one = found(started)
    others = start(num_hosts, num_devices, **asked | sizes)
    started += others
    several = found(others)
    for name in ("first", "again"):
        for mine, others in zip(several[name], one[name], strict=True):
            assert [token for token, _ in mine] == [token for token, _ in others]
            np.testing.assert_allclose([x for _, x in mine], [x for _, x in others], atol=2e-5)


@pytest.mark.slow
def test_hosts_that_differ_are_told_so_before_weights_are_read(tmp_path, started):
    """In an option, in weights of one shape, and in the version of a package: all in one message, with both values."""
    by_twos = alphabet_model.weights()
    by_twos["lm_head.weight"] = np.roll(by_twos["lm_head.weight"], 1, axis=0)
    folder, other = str(alphabet_model.save(tmp_path / "model")), str(alphabet_model.save(tmp_path / "other", tensors=by_twos))
    asked = {"scenario": "whole_llm", "folder": folder, "other": folder, **OPTIONS}
    started += start(2, 1, **asked)
    started[1].kill()
    place = json.loads(started[1].args[-1])  # pyright: ignore[reportIndexIssue, reportAttributeAccessIssue]
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    differing = {"max_num_seqs": 2, "folder": other, "versions": {"jaxlib": "0.9.9"}}
    command = [sys.executable, "-m", "tests.hosts.program", json.dumps(place | differing)]
    started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for process in (started[0], started[2]):
        output = process.communicate(timeout=120)[0]
        assert process.returncode and "max_num_seqs is 4 on host 0 and 2 on host 1" in output, output[-3000:]
        assert "the fingerprint of the weights' files is" in output and "the model's" not in output, output[-3000:]
        assert f"hosts disagree: jaxlib is {metadata.version('jaxlib')} on host 0 and 0.9.9 on host 1" in output
        assert "flax is" not in output


RANDOM = [
    *(("2x1", "odd_groups_tied", "bucket"), ("2x2", "gqa", "bucket"), ("4x1", "gqa", "bucket"), ("4x1", "experts", "bucket")),
    *(("2x2", "gqa", "always"), ("4x1", "gqa", "always")),
]
IN_CI = {("4x1", "experts", "bucket"), ("2x2", "gqa", "always")}


@pytest.mark.slow
@pytest.mark.parametrize("case", exhaustive_unless(lambda case: case in IN_CI, RANDOM), ids=str)
def test_random_requests_are_answered_as_in_one_process(case, started):
    """To the last bit, however the devices are shared out over processes (1x4 = 2x2 = 4x1), with preemption, samples, filters and
    penalties. HOST_REQUESTS says how many requests."""
    layout, model, deterministic = case
    num_hosts, num_devices = map(int, layout.split("x"))
    asked = {"model": model, "tp": num_hosts * num_devices, "deterministic": deterministic}
    assert compare(started, num_hosts, num_devices, asked)["preemptions"]


STAGED = {  # processes, devices of each, and the engine's: a stage's may be of one process or of several
    "two": (2, 1, {"model": "odd_groups_tied", "tp": 1, "pp": 2}),
    "two_of_two": (2, 2, {"model": "odd_groups_tied", "tp": 2, "pp": 2}),
    "two_a_process": (2, 2, {"model": "experts", "tp": 1, "pp": 4, "layers": 5}),
    "four": (4, 1, {"model": "gqa", "tp": 1, "pp": 4, "layers": 5}),
    "two_processes_a_stage": (4, 1, {"model": "odd_groups_tied", "tp": 2, "pp": 2}),
    "all_processes_in_each": (2, 2, {"model": "gqa", "tp": 2, "pp": 2, "turned": True}),
}
STAGED_IN_CI = {"two_a_process", "two_processes_a_stage"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", exhaustive_unless(lambda name: name in STAGED_IN_CI, STAGED))
def test_stages_of_several_processes_answer_as_those_of_one(layout, started):
    """To the last bit and in as many steps, with preemptions and hits, and so as one stage does (tests/parallel)."""
    num_hosts, num_devices, asked = STAGED[layout]
    several = compare(started, num_hosts, num_devices, asked)
    assert several["busy"] > 0 and several["preemptions"] and several["hits"]


STORED = {  # as STAGED, and the engine of one process that has the same store
    "devices": (2, 1, {"model": "three_kv_heads", "tp": 2}, {"tp": 2}),
    "stages": (2, 1, {"model": "three_kv_heads", "pp": 2, "tp": 1}, {"tp": 1}),
    "both": (4, 1, {"model": "three_kv_heads", "pp": 2, "tp": 2}, {"tp": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", exhaustive_unless(lambda name: name == "both", STORED))
def test_hosts_keep_pages_in_a_store_that_engines_of_other_layouts_share(layout, started, tmp_path):
    """What they have saved is loaded by engines of the same layout and of one process. Answers are to the last bit those of no
    store."""
    num_hosts, num_devices, asked, alone = STORED[layout]
    asked = {"scenario": "random_requests", "count": min(REQUESTS, 60), "deterministic": "always", **asked}
    one = found_by_one(alone["tp"], json.dumps(asked | {"pp": 1}))
    store, of_one = {"kv_store": f"disk:{tmp_path}:64MiB"}, {"pp": 1}
    for turn, (processes, devices, sizes) in enumerate([(num_hosts, num_devices, {})] * 2 + [(1, alone["tp"], of_one)]):
        running = start(processes, devices, **asked | sizes, **store)
        started += running
        several = found(running)
        assert several["tokens"] == one["tokens"] and several["bits"] == one["bits"], turn
        assert several["failed"] == 0 and several["held"] and several["loaded" if turn else "saved"], turn


def compare(started: list[subprocess.Popen], num_hosts: int, num_devices: int, layout: dict) -> dict[str, Any]:
    """What the processes found, which is what one process with as many devices finds."""
    asked = {"scenario": "random_requests", "count": REQUESTS, "num_seqs": 6 if REQUESTS < 1000 else 128, **layout}
    one = found_by_one(num_hosts * num_devices, json.dumps(asked))
    began = time.monotonic()
    started += start(num_hosts, num_devices, **asked)
    several = found(started)
    print(f"{num_hosts}x{num_devices} {layout}: {time.monotonic() - began:.0f} s, {several}", flush=True)
    assert {name: x for name, x in several.items() if name != "busy"} == {name: x for name, x in one.items() if name != "busy"}
    return several


@functools.cache
def found_by_one(num_devices: int, asked: str) -> dict[str, Any]:
    return found(start(1, num_devices, **json.loads(asked)))


def await_ready(process: subprocess.Popen) -> None:
    await_said(process, "ready\n")


def await_said(process: subprocess.Popen, what: str) -> str:
    """What the process has said by then."""
    assert process.stdout is not None
    said = ""
    while what not in said:
        line = process.stdout.readline()
        assert line, f"the process has ended, and did not say {what!r}: {said[-3000:]}"
        said += line
    return said


def last_words(process: subprocess.Popen) -> str:
    """What it says from here to its end, which must come within 60 s. Not by `communicate`: that reads the pipe itself, and leaves
    out what has been read behind the line that `await_said` waited for."""
    assert process.stdout is not None
    timer = threading.Timer(60, process.kill)
    timer.start()
    text = process.stdout.read()
    process.wait()
    timer.cancel()
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "victim", "signal_name"),
    chosen(  # in CI each pair of values once
        itertools.product(("devices", "stages"), (0, 1), ("SIGKILL", "SIGSTOP")),
        quick=lambda *_: False,
        in_ci=lambda kind, victim, signal_name: (kind == "stages") ^ victim ^ (signal_name == "SIGSTOP") == 1,
    ),
)
def test_a_lost_host_ends_all_in_time(kind, victim, signal_name, started):
    tp, pp = (2, 1) if kind == "devices" else (1, 2)
    number = signal.Signals[signal_name]
    started += start(2, 1, scenario="random_requests", model="gqa", tp=tp, pp=pp, count=1, stop_after=30, wait=True)
    await_ready(started[0])
    os.kill(started[victim].pid, number)
    lost_at = time.monotonic()
    survivor, text = started[1 - victim], ""
    why = "has ended" if number == signal.SIGKILL else "was not heard for 8 s"
    if victim == 1:
        text = await_said(survivor, f"host 1 {why}")
        assert time.monotonic() - lost_at < IN_TIME
    text += last_words(survivor)
    assert time.monotonic() - lost_at < ENDED_IN
    assert survivor.returncode == 100 + victim, text[-3000:]
    if victim == 1:
        assert pp > 1 or f"lost: host 1 {why}" in text  # a send may hold a stage's process until it is ended


@pytest.mark.slow
def test_a_leader_that_goes_on_after_its_group_has_ended_ends_too(started):
    """SIGSTOP, and SIGCONT when the other host has left it. It says that it was itself at fault."""
    started += start(2, 1, scenario="random_requests", model="gqa", tp=2, count=1, stop_after=30, wait=True)
    await_ready(started[0])
    os.kill(started[0].pid, signal.SIGSTOP)
    last_words(started[1])
    os.kill(started[0].pid, signal.SIGCONT)
    gone_on_at = time.monotonic()
    text = await_said(started[0], "lost: host 0 was not heard for 8 s")
    assert time.monotonic() - gone_on_at < IN_TIME
    text += last_words(started[0])
    assert started[0].returncode == started[1].returncode == 100, text[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("compiling", ["nothing", "behind"])
def test_a_dispatch_that_stands_still_ends_all_in_time(compiling, started):
    """Inside XLA on host 0, while both hosts beat, and whatever host 1 compiles behind its steps."""
    started += start(2, 1, scenario="stalled_step", blocked=True, compiling=compiling)
    await_ready(started[0])
    stalled_at = time.monotonic()
    texts = [await_said(process, "host 0 did not end a step in 10 s") for process in started]
    assert 10 < time.monotonic() - stalled_at < IN_TIME
    texts += [last_words(process) for process in started]
    assert [process.returncode for process in started] == [100, 100], texts


@pytest.mark.slow
def test_a_step_that_waits_for_a_compile_is_not_lost(started):
    """Of 13 s on host 1, where a step has 10 s."""
    started += start(2, 1, scenario="stalled_step", blocked=False, compiling="awaited")
    began = time.monotonic()
    assert found(started) == {"tokens": 8} and time.monotonic() - began > 13
