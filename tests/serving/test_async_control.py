"""`AsyncLLM` while it is paused, and while it reads other weights."""

import asyncio
import threading
import time

import pytest

from jaxserve.models import named_leaves
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.engine_loop import EngineLoop
from jaxserve.serving.messages import Call, UnavailableError
from tests.alphabet_model import after
from tests.serving.asking import ask, long, pages_back, run, text_of
from tests.serving.http_server import slow_down


def test_paused_nothing_runs_and_nothing_is_lost(llm):
    async def main():
        async with AsyncLLM(llm) as engine:
            async with await engine.open([ask("a", max_tokens=20)]) as stream:
                first = await anext(stream)
                await engine.pause()
                steps = engine.stats.num_steps
                late = asyncio.create_task(text_of(engine, ask("x", max_tokens=2)))
                await asyncio.sleep(0.05)
                await engine.pause()  # any call brings a report
                assert engine.stats.num_steps == steps and engine.stats.is_paused
                await engine.resume()
                assert first.text + "".join([d.text async for d in stream]) == after("a", 20)
            assert await late == after("x", 2)

    run(main())


def test_weights_are_read_beside_the_steps(llm, folder, monkeypatch):
    """And only their path crosses to the engine's side."""
    from jaxserve.models import loading as model_loader

    load, read = model_loader.load_files, []

    def while_it_steps(*args, **kwargs):
        wanted, deadline = llm.engine.stats.num_steps + 3, time.monotonic() + 60
        while llm.engine.stats.num_steps < wanted:
            assert time.monotonic() < deadline, "the engine stands still"
            time.sleep(0.001)
        read.append(load(*args, **kwargs))
        return read[0]

    async def main():
        async with AsyncLLM(llm) as engine:
            send, sent = engine._engine.send, []
            monkeypatch.setattr(engine._engine, "send", lambda command: (sent.append(command), send(command)))
            async with await engine.open([long()]) as stream:
                await anext(stream)
                with pytest.raises(FileNotFoundError):
                    await engine.update_weights_from_path("/nothing/there")
                monkeypatch.setattr(model_loader, "load_files", while_it_steps)
                await engine.update_weights_from_path(folder, in_flight="keep")
                assert not stream.finished
                held = llm.engine.runner.programs.functions.weights
                assert list(map(id, held)) == list(map(id, named_leaves(read[0].module).values())), "converted between two steps"
            calls = [command for command in sent if isinstance(command, Call)]
            assert [dict(c.arguments)["path"] for c in calls] == ["/nothing/there", str(folder)]
            await pages_back(engine)

    slow_down(monkeypatch, llm)
    run(main())


def test_one_checkpoint_is_read_at_a_time(llm, folder, monkeypatch):
    """And shutting down leaves no thread behind that reads one."""
    from jaxserve.models import loading as model_loader

    load, begun, go_on = model_loader.load_files, asyncio.Event(), threading.Event()

    async def main():
        loop = asyncio.get_running_loop()

        def held(*args, **kwargs):
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(120)
            return load(*args, **kwargs)

        monkeypatch.setattr(model_loader, "load_files", held)
        async with AsyncLLM(llm) as engine:
            first = asyncio.create_task(engine.update_weights_from_path(folder))
            await begun.wait()
            with pytest.raises(RuntimeError, match="other weights are being loaded"):
                await engine.update_weights_from_path("/another")
            go_on.set()
            await first
            await engine.update_weights_from_path(folder)
            go_on.clear()
            begun.clear()
            last = asyncio.create_task(engine.update_weights_from_path(folder))
            await begun.wait()
            assert isinstance(engine._engine, EngineLoop)
            loader = engine._engine._loading
            assert loader is not None and loader.is_alive()
            loop.call_later(0.1, go_on.set)
        assert not loader.is_alive()
        with pytest.raises(UnavailableError, match="shutting down"):
            await last

    run(main())
