"""Threads beside the event loop that read long prompts and bodies.

Owns three pools of threads: one for requests, one for everything else, so that no request waits for the second kind, and one for
the JSON of long bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jaxserve.serving.messages import UnavailableError

SHORT = 4096  # characters, or bytes of a body, that are read on the event loop itself; a thread reads longer ones


class ReadingPools:
    """Threads that tokenise and parse. After `close_to_new` nothing more is taken."""

    def __init__(self) -> None:
        self._requests = ThreadPoolExecutor(2, "jaxserve-reader")
        self._aside = ThreadPoolExecutor(1, "jaxserve-aside")
        self._bodies = ThreadPoolExecutor(2, "jaxserve-bodies")
        self._closing: str | None = None

    async def request[T](self, size: int, work: Callable[[], T]) -> T:
        """Runs `work` for a request of `size` characters or bytes, and returns its result. Raises UnavailableError if the pools are
        shut down first."""
        return await self._run(self._requests, size, work)

    async def aside[T](self, size: int, work: Callable[[], T]) -> T:
        """As `request`, for work that no request waits for."""
        return await self._run(self._aside, size, work)

    async def body[T](self, work: Callable[[], T]) -> T:
        """As `request`, for work that reads a long body's JSON, whatever it is of."""
        return await self._beside(self._bodies, work)

    async def _run[T](self, pool: ThreadPoolExecutor, size: int, work: Callable[[], T]) -> T:
        return work() if size <= SHORT else await self._beside(pool, work)

    async def _beside[T](self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Work that has begun runs to its end, also if the caller is cancelled meanwhile."""
        if self._closing:
            raise UnavailableError(self._closing)
        result = asyncio.get_running_loop().run_in_executor(pool, work)
        try:
            return await result
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closing and task is not None and not task.cancelling():  # the pool dropped it
                raise UnavailableError(self._closing) from None
            raise

    def close_to_new(self, reason: str) -> None:
        """Refuses long work with this reason from now on."""
        self._closing = reason

    async def shutdown(self) -> None:
        """Drops work that has not begun, and waits for the rest."""
        for pool in (self._requests, self._aside, self._bodies):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)
