"""What a server's process does beyond making an engine."""

import gc
from types import SimpleNamespace

from jaxserve.serving import launch
from jaxserve.serving.options import ModelOptions


def test_python_does_not_collect_what_the_last_program_left(monkeypatch):
    calls, frozen = [], []
    engine = SimpleNamespace(num_programs_left=2, on_compiled=calls.append)
    monkeypatch.setattr(launch, "LLM", lambda *_, **__: SimpleNamespace(engine=engine))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(engine.num_programs_left))
    launch.load_llm(ModelOptions(model="any"))
    for left in (1, 0):
        engine.num_programs_left = left
        for call in calls:
            call()
    assert frozen == [0]
