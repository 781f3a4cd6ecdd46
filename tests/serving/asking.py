"""Requests of the alphabet model to an AsyncLLM."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from jaxserve import SamplingParams
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.streams import Ask
from tests.alphabet_model import ids


def ask(prompt: str = "a", **params: Any) -> Ask:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 8} | params
    return Ask(ids(prompt), SamplingParams(**given), prompt)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded():
        return await asyncio.wait_for(main, 60)

    return asyncio.run(bounded())


async def text_of(engine: AsyncLLM, given: Ask) -> str:
    async with await engine.open([given]) as stream:
        return "".join([delta.text async for delta in stream])


async def pages_back(engine: AsyncLLM) -> None:
    while engine.stats.num_free_pages != engine.stats.num_pages or engine.num_requests:
        await asyncio.sleep(0.001)
        await engine.reset_prefix_cache()  # any call brings a report


def long() -> Ask:
    return ask("a", max_tokens=200, ignore_eos=True)
