"""`AsyncLLM.shutdown`: what runs, what waits, what is being read."""

import asyncio
import threading
import time

import pytest

from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.messages import UnavailableError
from jaxserve.serving.reading import SHORT
from jaxserve.text.tokenizer import Tokenizer
from tests.alphabet_model import after
from tests.serving.asking import ask, long, run


def test_shutdown_lets_what_runs_finish(llm):
    async def main():
        engine = AsyncLLM(llm)
        stream = await engine.open([ask("a", max_tokens=20)])
        ending = asyncio.create_task(engine.shutdown())
        text = "".join([d.text async for d in stream])
        await ending
        with pytest.raises(UnavailableError, match="shutting down"):
            await engine.open([ask()])
        return text

    assert run(main()) == after("a", 20)


def test_shutdown_after_its_grace_ends_what_still_runs(llm):
    async def main():
        engine = AsyncLLM(llm)
        await engine.pause()
        stream = await engine.open([long()])
        started = time.monotonic()
        await engine.shutdown(0.1)
        assert time.monotonic() - started >= 0.1
        with pytest.raises(UnavailableError, match="shutting down"):
            await anext(stream)

    run(main())


def test_shutdown_ends_what_waits_to_be_read(llm, monkeypatch):
    encode, begun, go_on = Tokenizer.encode, [], threading.Event()

    def held(tokenizer, text, *args):
        begun.append(text)
        assert go_on.wait(120)
        return encode(tokenizer, text, *args)

    async def texts(engine: AsyncLLM) -> list[str]:
        return [output.outputs[0].text async for output in engine.generate("a" * (SHORT + 1))]

    async def main():
        engine = AsyncLLM(llm)
        engine.max_prompt_characters = None  # or else it is refused at once
        tasks = [asyncio.create_task(texts(engine)) for _ in range(4)]
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        tasks.pop().cancel()  # its own end is no shutdown
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        await engine.shutdown(0)
        assert len(begun) == 2, "the third waited"
        for ended in [
            *await asyncio.gather(*tasks, return_exceptions=True),
            *await asyncio.gather(texts(engine), return_exceptions=True),
        ]:
            assert isinstance(ended, UnavailableError) and "shutting down" in str(ended)
        with pytest.raises(UnavailableError, match="shutting down"):
            await engine.aside(SHORT + 1, lambda: None)
        assert engine._streams.num_samples == 0

    monkeypatch.setattr(Tokenizer, "encode", held)
    run(main())
