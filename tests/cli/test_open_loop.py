"""open_loop on a clock that only steps and sleeps move."""

import time
from types import SimpleNamespace

import pytest

from jaxserve.cli.common import open_loop
from jaxserve.workloads.workload import Workload, WorkloadRequest
from tests.dummy import dummy_model, make_engine


@pytest.mark.slow
def test_steps_begin_and_end(monkeypatch):
    """Two requests, a hundred seconds apart: steps take what they take, and the time between them is nobody's."""
    now, engine = [0.0], make_engine(dummy_model())

    def wait(seconds: float) -> None:
        now[0] += seconds

    def step(real=engine.step):
        wait(0.25)
        return real()

    monkeypatch.setattr(engine, "step", step)
    monkeypatch.setattr(open_loop, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=wait, process_time=time.process_time))
    run = open_loop.serve(engine, Workload("two", (WorkloadRequest(5, 3), WorkloadRequest(7, 2, 100.0))), 0)
    engine.close()
    begins, ends, num_prompt, num_output = run.steps.T
    assert ends - begins == pytest.approx([0.25] * len(begins)) and begins[0] == 0 and 100.0 in begins
    assert num_prompt.sum() == 12 and num_output.sum() == 5


def test_a_stall_is_of_the_prompt_that_it_waited_for(monkeypatch):
    """With a step in flight a call waits for the step that the call before dispatched, and without for its own: the long calls
    are those that fetch a prompt."""
    for in_flight in (True, False):
        now, engine, sizes = [0.0], make_engine(dummy_model(), async_scheduling=in_flight), []

        def dispatch(inputs, real=engine.runner.dispatch_body, sizes=sizes):
            sizes.append(inputs.num_tokens)
            return real(inputs)

        def fetch(handle, real=engine.runner.fetch, sizes=sizes, now=now):
            now[0] += sizes.pop(0)  # a second a token
            return real(handle)

        monkeypatch.setattr(engine.runner, "dispatch_body", dispatch)
        monkeypatch.setattr(engine.runner, "fetch", fetch)
        clock = SimpleNamespace(monotonic=lambda now=now: now[0], sleep=lambda _: None, process_time=time.process_time)
        monkeypatch.setattr(open_loop, "time", clock)
        run = open_loop.serve(engine, Workload("two", (WorkloadRequest(5, 9), WorkloadRequest(17, 4, 7.0))), 0)
        engine.close()
        begins, ends, num_prompt, num_output = run.steps.T
        assert sorted(num_prompt[num_prompt > 0]) == [5, 17] and num_output.sum() == 13
        waits = ends - begins
        assert (waits[num_prompt == 17] >= 17).all() and (waits[num_prompt == 0] <= 2).all()


@pytest.mark.slow
def test_tokens_that_were_never_made_are_not_counted():
    """An engine ends a request at max_model_len and says nothing; a figure of it would be too good."""
    engine = make_engine(dummy_model(), max_model_len=32)
    work = Workload("long", (WorkloadRequest(5, 3), WorkloadRequest(20, 40)))
    with pytest.raises(RuntimeError, match="1 requests of long did not .* number 1, of 20 prompt tokens, brought 12 of 40 output"):
        open_loop.serve(engine, work, 0)
    engine.close()
