"""warm_up="background": a few programs are compiled at start and the rest behind the steps; answers are the same, none is compiled
twice, and the thread ends with the engine."""

import logging
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxserve import EngineConfig, SamplingParams
from jaxserve.buckets.plan import Bucket
from jaxserve.engine.engine import Engine
from jaxserve.execution.compilation import compile_counts
from jaxserve.execution.programs import Programs
from jaxserve.execution.warm_up import BackgroundWarmUp, first_programs, remaining_programs
from tests.dummy import EOS, SETTINGS, SEVERAL_BUCKETS, VOCAB, dummy_model

PLAN = SEVERAL_BUCKETS
FIRST = 5  # mixed(8,6), head(6, logprobs), update, decode(2,2), head(2)


class Gate:
    """Holds the compiling thread before each of its programs until `open`; the engine's own thread passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None):
        self._open, compile_one = threading.Event(), Programs._compile

        def compile_or_wait(programs: Programs, key):
            if threading.current_thread().name == "jaxserve-compiler":
                self._open.wait(60)
                if error is not None and key == "score":
                    raise error
            return compile_one(programs, key)

        monkeypatch.setattr(Programs, "_compile", compile_or_wait)

    def open(self) -> None:
        self._open.set()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """Tests beside this one keep the cores busy: a thread of low priority would hardly get one."""
    monkeypatch.setattr("jaxserve.execution.warm_up.NICENESS", 0)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def make_engine(**settings) -> Engine:
    options = {
        **SETTINGS,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "bucket_plan": PLAN,
        "warm_up": "background",
        **settings,
    }
    return Engine(dummy_model(), EngineConfig(**options), eos_token_ids=(EOS,))


def compiling_thread() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "jaxserve-compiler"]


def answers(engine: Engine, num_requests: int = 6, length: int = 20) -> list[list[int]]:
    """Greedy tokens of requests that run together: prompts longer than the first buckets, and more samples than the first head."""
    rng = np.random.default_rng(3)
    made = [
        engine.add_request(str(i), rng.integers(1, VOCAB, length).tolist(), SamplingParams(max_tokens=8, temperature=0))[0]
        for i in range(num_requests)
    ]
    while engine.has_unfinished_requests():
        engine.step()
    return [request.output_token_ids for request in made]


def shapes_run(engine: Engine) -> set[tuple[int, int]]:
    """(tokens, sequences) of the buckets that steps ran in."""
    return {(bucket.tokens, bucket.seqs) for bucket, _ in engine.stats.padding.by_bucket()}


def wait_for_programs(engine: Engine) -> None:
    assert engine._warm_up is not None and engine._warm_up.wait(120)


@pytest.mark.slow
def test_steps_run_in_the_first_programs_and_none_waits_for_a_compiler(gate):
    engine = make_engine()
    assert engine.num_programs_left == PLAN.num_programs - FIRST
    before = compile_counts().programs
    early = answers(engine)
    assert compile_counts().programs == before  # neither the engine nor the thread compiled anything
    assert shapes_run(engine) <= {(8, 6), (2, 2)}
    gate.open()
    wait_for_programs(engine)
    assert engine.num_programs_left == 0
    before = compile_counts().programs
    engine.reset_prefix_cache()
    assert answers(engine) == early
    assert compile_counts().programs == before
    assert engine._warm_up is None and engine.scheduler.composer.max_step_tokens == 24
    assert (24, 6) in shapes_run(engine)  # prompts are not cut any more
    engine.close()


@pytest.mark.slow
def test_a_program_that_is_needed_sooner_is_compiled_once(gate):
    engine, calls, others = make_engine(), [], []
    engine.on_compiled(lambda: calls.append(engine.num_programs_left))
    engine.on_compiled(lambda: others.append(len(calls)))  # every one that asked is called
    request = engine.add_request("scored", [1, 2, 3], SamplingParams(max_tokens=1, prompt_logprobs=2))[0]
    while engine.has_unfinished_requests():
        engine.step()  # the score program is not among the first
    assert request.finished and engine.num_programs_left == PLAN.num_programs - FIRST - 1
    gate.open()
    wait_for_programs(engine)
    assert engine.num_programs_left == 0 and calls[-1] == 0 and len(calls) == PLAN.num_programs - FIRST
    assert others == [n + 1 for n in range(len(calls))]
    engine.close()


@pytest.mark.slow
def test_sleeping_new_weights_and_failed_steps_meanwhile(gate, monkeypatch):
    engine = make_engine()
    expected = answers(engine)
    engine.sleep(1)
    engine.wake_up()
    engine.update_params(dummy_model())
    assert answers(engine) == expected
    monkeypatch.setattr(engine.packer, "pack", lambda _: 1 / 0)
    engine.add_request("fails", [1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert answers(engine) == expected  # with a new packer and scheduler, still within what is compiled
    assert shapes_run(engine) <= {(8, 6), (2, 2)}
    gate.open()
    wait_for_programs(engine)
    assert answers(engine) == expected
    engine.close()


@pytest.mark.slow
def test_a_program_that_cannot_be_compiled_is_logged_and_the_rest_is(monkeypatch, caplog):
    gate = Gate(monkeypatch, MemoryError("no room for it"))
    with caplog.at_level(logging.ERROR, logger="jaxserve"):
        engine = make_engine()
        gate.open()
        wait_for_programs(engine)
    assert "score could not be compiled" in caplog.text and "no room for it" in caplog.text
    assert engine.num_programs_left == 1
    assert answers(engine)
    engine.close()


def test_close_ends_the_thread_before_the_rest_is_compiled(gate):
    engine = make_engine()
    assert len(compiling_thread()) == 1
    threading.Timer(0.2, gate.open).start()
    engine.close()
    assert not compiling_thread()
    assert engine.num_programs_left >= PLAN.num_programs - FIRST - 1  # but for the one that was under way


def test_two_threads_compile_a_program_once(monkeypatch):
    engine, compiled = make_engine(warm_up="first_use"), []

    def slow(_: Programs, key):
        time.sleep(0.05)
        compiled.append(key)
        return object()

    monkeypatch.setattr(Programs, "_compile", slow)
    programs, found = engine.runner.programs, []
    threads = [threading.Thread(target=lambda: found.append(programs.get("score"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == ["score"] and len(set(map(id, found))) == 1


@pytest.mark.parametrize("chunked, tokens", [(True, 8), (False, 24)])
def test_the_first_programs_can_run_every_step(chunked, tokens):
    first = first_programs(PLAN, 6, chunked=chunked)
    bucket = first[0]
    assert isinstance(bucket, Bucket)
    assert bucket.tokens == bucket.max_q_len == tokens and bucket.seqs == 6
    assert first[1:3] == [(6, True), "update"]
    keys = [*PLAN.buckets, *((rows, lp) for rows in PLAN.head_rows for lp in (False, True)), "score", "update"]
    rest = remaining_programs(PLAN, keys, first)
    assert sorted(map(str, [*first, *rest])) == sorted(map(str, keys))


def test_prompts_that_must_not_be_cut_start_with_the_largest_bucket(gate):
    engine = make_engine(enable_chunked_prefill=False)
    before = compile_counts().programs
    assert all(answers(engine))
    assert compile_counts().programs == before
    engine.close()


def test_no_program_is_begun_while_requests_run_unless_they_never_stop(monkeypatch):
    begun, busy = [], threading.Event()
    monkeypatch.setattr(Programs, "_compile", lambda _, key: begun.append(key) or object())
    monkeypatch.setattr("jaxserve.execution.warm_up.QUIET_SECONDS", 0.05)
    monkeypatch.setattr("jaxserve.execution.warm_up.PATIENCE_SECONDS", 60.0)
    programs = make_engine(warm_up="first_use").runner.programs
    busy.set()
    thread = BackgroundWarmUp(programs, busy.is_set)
    thread.start()
    assert not thread.wait(0.5) and not begun  # ten times as long as it waits for where nothing runs
    busy.clear()
    assert thread.wait(60) and len(begun) == PLAN.num_programs - FIRST

    programs = make_engine(warm_up="first_use").runner.programs
    begun.clear()
    monkeypatch.setattr("jaxserve.execution.warm_up.PATIENCE_SECONDS", 0.05)
    thread = BackgroundWarmUp(programs, lambda: True)
    thread.start()
    assert thread.wait(60) and len(begun) == PLAN.num_programs - FIRST


LEAVES_IT_RUNNING = """
import time
from tests.engine.test_background_warm_up import make_engine
engine = make_engine()
left = engine.num_programs_left
while engine.num_programs_left == left:
    time.sleep(0.01)
print(engine.num_programs_left, "left")
"""


@pytest.mark.slow
def test_a_process_ends_cleanly_while_programs_are_compiled():
    done = subprocess.run([sys.executable, "-c", LEAVES_IT_RUNNING], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0
