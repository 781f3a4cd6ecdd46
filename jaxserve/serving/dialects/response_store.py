"""Where responses are kept that later requests may go on from: in memory, or in a SQLite file.

Owns the bounds of what is kept, in responses and bytes; the least recently used go first. Knows nothing of what a response says.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class StoredResponse:
    """response: as it was answered, JSON. items: the conversation up to its end, input items as JSON."""

    response: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore(Protocol):
    """A bounded store. One thread uses it."""

    def put(self, response_id: str, stored: StoredResponse) -> bool:
        """Keeps a response, and forgets others where there is no room. False, and nothing is done, if it alone is too large."""
        ...

    def get(self, response_id: str) -> StoredResponse | None: ...

    def delete(self, response_id: str) -> bool:
        """Forgets a response. False if there is none."""
        ...

    def close(self) -> None: ...


class StoreError(Exception):
    """What is kept can't be read or written now."""


class MemoryStore:
    """A ResponseStore that lasts as long as the server."""

    def __init__(self, max_responses: int, max_bytes: int):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes: int = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, stored: StoredResponse) -> bool:
        if stored.num_bytes > self._max_bytes or not self._max_responses:
            return False
        self.delete(response_id)
        self._stored[response_id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))
        return True

    def get(self, response_id: str) -> StoredResponse | None:
        if response_id in self._stored:
            self._stored.move_to_end(response_id)
        return self._stored.get(response_id)

    def delete(self, response_id: str) -> bool:
        stored = self._stored.pop(response_id, None)
        self.num_bytes -= stored.num_bytes if stored else 0
        return stored is not None

    def close(self) -> None:
        self._stored.clear()
        self.num_bytes = 0


_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, response BLOB NOT NULL, items BLOB NOT NULL, num_bytes INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
"""


class SQLiteStore:
    """A ResponseStore in a file, which the next server finds again. The file belongs to one server at a time.

    Raises:
      ValueError: the file can't be opened, or is no such store.
    """

    def __init__(self, path: str | Path, max_responses: int, max_bytes: int):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=1)
            self._connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
            used, num_bytes, self._len = self._connection.execute(
                "SELECT coalesce(max(used), 0), coalesce(sum(num_bytes), 0), count(*) FROM responses"
            ).fetchone()
        except sqlite3.Error as error:
            raise ValueError(f"response_store={str(path)!r}: {error}") from error
        self.num_bytes: int = num_bytes
        self._used = used  # the time of the last use, counted in uses
        self._make_room()

    def __len__(self) -> int:
        return self._len

    def put(self, response_id: str, stored: StoredResponse) -> bool:
        if stored.num_bytes > self._max_bytes or not self._max_responses:
            return False
        self.delete(response_id)
        self._used += 1
        row = (response_id, stored.response, stored.items, stored.num_bytes, self._used)
        self._connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)
        self.num_bytes += stored.num_bytes
        self._len += 1
        self._make_room()
        return True

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._connection.execute("SELECT response, items FROM responses WHERE id = ?", (response_id,)).fetchone()
        if found is None:
            return None
        self._used += 1
        with contextlib.suppress(sqlite3.Error):  # on a full disk it can still be read, and goes sooner
            self._connection.execute("UPDATE responses SET used = ? WHERE id = ?", (self._used, response_id))
        return StoredResponse(*found)

    def delete(self, response_id: str) -> bool:
        gone = self._connection.execute("DELETE FROM responses WHERE id = ? RETURNING num_bytes", (response_id,)).fetchone()
        if gone is not None:
            self.num_bytes -= gone[0]
            self._len -= 1
        return gone is not None

    def _make_room(self) -> None:
        while self._len > self._max_responses or self.num_bytes > self._max_bytes:
            (oldest,) = self._connection.execute("SELECT id FROM responses ORDER BY used LIMIT 1").fetchone()
            self.delete(oldest)

    def close(self) -> None:
        self._connection.close()


class StoreBeside:
    """A ResponseStore for the event loop: a thread waits for its file, and does one thing after another."""

    def __init__(self, store: ResponseStore):
        self._store = store
        self._thread = None if isinstance(store, MemoryStore) else ThreadPoolExecutor(1, "jaxserve-responses")

    async def put(self, response_id: str, stored: StoredResponse) -> bool:
        """As `ResponseStore.put`. Raises StoreError, and then keeps nothing."""
        return await self._do(lambda: self._store.put(response_id, stored))

    async def get(self, response_id: str) -> StoredResponse | None:
        """Raises StoreError."""
        return await self._do(lambda: self._store.get(response_id))

    async def delete(self, response_id: str) -> bool:
        """As `ResponseStore.delete`. Raises StoreError."""
        return await self._do(lambda: self._store.delete(response_id))

    async def close(self) -> None:
        """Waits for what was asked for before."""
        await self._do(self._store.close)
        if self._thread is not None:
            self._thread.shutdown()

    async def _do[T](self, work: Callable[[], T]) -> T:
        try:
            return work() if self._thread is None else await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise StoreError(str(error)) from error


def open_store(path: str | None, max_responses: int, max_bytes: int) -> ResponseStore:
    """The store in a SQLite file, or in memory where no path is given."""
    return MemoryStore(max_responses, max_bytes) if path is None else SQLiteStore(path, max_responses, max_bytes)
