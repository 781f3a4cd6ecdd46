"""`AsyncLLM`: how many requests may wait, and how long one may take."""

import time

import pytest

from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.messages import DeadlineError, QueueFullError
from tests.alphabet_model import after
from tests.serving.asking import ask, long, pages_back, run, text_of


def test_the_queue_is_bounded(llm):
    async def main():
        async with AsyncLLM(llm, max_waiting=2) as engine:  # 4 run
            await engine.pause()
            streams = [await engine.open([ask(c)]) for c in "abcd"] + [await engine.open([ask("e", n=2)])]
            with pytest.raises(QueueFullError, match="6 samples are running or waiting, of at most 6") as refused:
                await engine.open([ask()])
            assert 1 <= refused.value.retry_after <= 60
            with pytest.raises(ValueError, match="7 samples in one call can't be held; the most is 6"):
                await engine.open([ask(n=7)])
            streams.pop().close()
            streams += [await engine.open([ask("f", n=2)])]
            await engine.resume()
            for c, stream in zip("abcdf", streams, strict=True):
                assert "".join([d.text async for d in stream if d.index == 0]) == after(c, 8)
            assert engine._streams.num_samples == 0

    run(main())


def test_a_deadline_ends_the_request(llm):
    async def main():
        async with AsyncLLM(llm, request_timeout=0.2) as engine:
            assert await text_of(engine, ask("a")) == after("a", 8)
            await engine.pause()  # so that it can't end in time
            async with await engine.open([long()]) as stream:
                with pytest.raises(DeadlineError, match="longer than 0.2 s"):
                    await anext(stream)
            await engine.resume()
            await pages_back(engine)

    run(main())


def test_a_deadline_of_ones_own(llm):
    """Within the engine's, from the arrival on."""

    async def main():
        async with AsyncLLM(llm, request_timeout=0.2) as engine:
            await engine.pause()
            for timeout, ends in ((0.05, 0.05), (9, 0.2)):
                with pytest.raises(DeadlineError, match=f"longer than {ends} s"):
                    async for _ in engine.generate("a", timeout=timeout):
                        pass
            with pytest.raises(DeadlineError, match="longer than 0.1 s"):
                await engine.open([ask()], timeout=0.1, arrival=time.monotonic() - 0.1)
            with pytest.raises(ValueError, match="timeout=0 must be a number of seconds > 0"):
                await engine.open([ask()], timeout=0)
            await engine.resume()
            await pages_back(engine)
            assert engine._streams.num_samples == 0

    run(main())
