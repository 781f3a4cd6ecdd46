"""The engine's thread: steps that raise, texts that can't be made, and a bug of its own."""

import asyncio
import threading
from typing import Any

import pytest

from jaxserve.hosts.pulse import HostLostError
from jaxserve.serving import engine_loop
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.messages import Compiled, FailedError, UnavailableError
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text.detokenizer import IncrementalDetokenizer
from tests.alphabet_model import after, ids
from tests.serving.asking import ask, long, pages_back, run, text_of


class Broken:
    """Makes `owner.name` raise on the calls that `when` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when=lambda *args: True):
        self.on, real = True, getattr(owner, name)

        def call(*args, **kwargs):
            if self.on and when(*args):
                raise RuntimeError("broken on purpose")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


def test_a_step_that_raises_fails_what_runs_and_serves_on(llm, monkeypatch):
    async def main():
        async with AsyncLLM(llm) as engine:
            streams = [await engine.open([long()]) for _ in range(3)]
            await anext(streams[0])
            fault = Broken(monkeypatch, llm.engine.runner, "fetch")
            for stream in streams:
                with pytest.raises(FailedError, match="a step of the engine failed.*broken on purpose"):
                    async for _ in stream:
                        pass
            fault.on = False
            engine.check_health()
            assert await text_of(engine, ask("a")) == after("a", 8)
            assert engine.stats.num_failures == 1
            await pages_back(engine)

    run(main())


def test_a_form_that_the_loop_hears_of_late_is_checked_at_its_beginning(llm, monkeypatch):
    """The engine knows first that it is compiled: a token is out before the loop accepts the request. What forbids that token a
    second time says nothing of the beginning."""
    send = engine_loop.EngineLoop.send
    monkeypatch.setattr(engine_loop.EngineLoop, "send", lambda self, told: isinstance(told, Compiled) or send(self, told))
    late = ask("t", structured_outputs=StructuredOutputsParams(regex="abc"), bad_words_token_ids=[ids("aa")])

    async def main():
        async with AsyncLLM(llm) as engine:
            assert await text_of(engine, late) == "abc"

    run(main())


def test_a_lost_host_turns_health_red_though_nobody_asks_for_a_step(llm, monkeypatch):
    told: list = []
    monkeypatch.setattr(llm.engine, "on_lost", told.append)

    async def main():
        async with AsyncLLM(llm) as engine:
            assert await text_of(engine, ask("a")) == after("a", 8)
            told[0](HostLostError(3, "has ended"))
            for _ in range(200):
                await asyncio.sleep(0.01)
                if engine.stats.broken:
                    break
            with pytest.raises(UnavailableError, match="host 3 has ended"):
                engine.check_health()
            with pytest.raises(UnavailableError, match="host 3 has ended"):
                await text_of(engine, ask())

    run(main())


def test_all_are_told_of_a_lost_host_while_the_thread_stands_in_a_step(llm, monkeypatch):
    """What runs, and what the thread has not even taken."""
    told: list = []
    monkeypatch.setattr(llm.engine, "on_lost", told.append)
    monkeypatch.setattr(engine_loop, "LAST_WORDS_SECONDS", 0.1)
    going_on, standing, fetch = threading.Event(), threading.Event(), llm.engine.runner.fetch

    def stand_still(handle: Any) -> Any:
        standing.set()
        going_on.wait(10)
        return fetch(handle)

    async def main():
        async with AsyncLLM(llm) as engine:
            monkeypatch.setattr(llm.engine.runner, "fetch", stand_still)
            asked = [asyncio.ensure_future(text_of(engine, ask("a")))]
            while not standing.is_set():
                await asyncio.sleep(0.01)
            asked.append(asyncio.ensure_future(text_of(engine, ask("b"))))
            await asyncio.sleep(0.05)
            told[0](HostLostError(0, "did not end a step in 10 s"))
            for each in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5):
                assert isinstance(each, FailedError) and "host 0 did not end a step in 10 s" in str(each)
            assert not going_on.is_set()
            with pytest.raises(UnavailableError, match="host 0 did not end a step"):
                engine.check_health()
            going_on.set()

    try:
        run(main())
    finally:
        going_on.set()


def test_a_step_without_a_host_is_the_last(llm, monkeypatch):
    """One such failure is enough, whatever max_failures says."""

    def fetch(handle: Any) -> None:
        raise HostLostError(1, "was not heard for 8 s")

    async def main():
        async with AsyncLLM(llm, max_failures=3) as engine:
            monkeypatch.setattr(llm.engine.runner, "fetch", fetch)
            with pytest.raises(FailedError, match="host 1 was not heard for 8 s"):
                await text_of(engine, ask())
            with pytest.raises(UnavailableError, match="host 1 was not heard"):
                engine.check_health()

    run(main())


def test_repeated_failures_end_in_refusals_not_in_a_loop(llm, monkeypatch):
    async def main():
        async with AsyncLLM(llm, max_failures=2) as engine:
            fault = Broken(monkeypatch, llm.engine.runner, "fetch")
            with pytest.raises(FailedError):
                await text_of(engine, ask())
            fault.on = False
            assert await text_of(engine, ask("a")) == after("a", 8)  # a success in between: the count begins anew
            fault.on = True
            for _ in range(2):
                engine.check_health()
                with pytest.raises(FailedError):
                    await text_of(engine, ask())
            with pytest.raises(UnavailableError, match="2 steps in a row failed"):
                await text_of(engine, ask())
            with pytest.raises(UnavailableError, match="2 steps in a row failed"):
                engine.check_health()

    run(main())


def test_text_that_cannot_be_made_fails_its_own_request_only(llm, monkeypatch):
    async def main():
        async with AsyncLLM(llm) as engine:
            Broken(monkeypatch, IncrementalDetokenizer, "step", when=lambda _, token: token == ord("f"))
            good = asyncio.create_task(text_of(engine, ask("m")))
            with pytest.raises(FailedError, match="could not be processed.*broken on purpose"):
                await text_of(engine, ask("a"))
            assert await good == after("m", 8)
            await pages_back(engine)

    run(main())


def test_a_bug_in_the_loop_leaves_nobody_waiting(llm, monkeypatch):
    async def main():
        async with AsyncLLM(llm) as engine:
            stream = await engine.open([long()])
            await anext(stream)
            Broken(monkeypatch, engine._engine, "_can_step")
            with pytest.raises(FailedError, match="the engine's thread ended"):
                async for _ in stream:
                    pass
            with pytest.raises(UnavailableError):
                await text_of(engine, ask())

    run(main())
