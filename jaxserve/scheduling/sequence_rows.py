"""The rows that running requests own, and the per-sequence numbers kept there as arrays.

Owns which request has which row, the order of admission, and every counter that a step reads or advances for all sequences at once.
The page table here is the host's copy of the device's. Knows nothing of queues, policies or reference counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from jaxserve.request import Request

NEVER = np.iinfo(np.int32).max  # a value of num_hashed: no page of the row will be registered


class SequenceRows:
    """Arrays indexed by row, in [0, max_num_seqs). Values at a row without a request are stale. S is max_num_seqs. Where devices
    attend in groups, the first S / num_groups rows are the first group's, and so on: a request's row says which group it is of.

    num_computed      i32[S]     tokens whose KV is written, or will be by a step already scheduled
    prefill_end       i32[S]     tokens known at admission or forced since: up to here the host uploads a row's tokens, after it
                                 the device has sampled them
    num_known         i32[S]     prompt + output tokens that the host knows
    limit             i32[S]     most tokens of prompt + output
    capacity          i32[S]     tokens that the row's pages hold
    num_uploaded      i32[S]     tokens of capacity whose pages were sent as page_updates
    num_hashed        i32[S]     pages registered in, or hit from, the prefix cache; NEVER where none will be
    generation        i64[S]     how many owners the row has had: a late result is for the present owner only if this is unchanged
    page_table        i32[S, P]
    order             intp[n]    rows in use, in order of admission; replaced, never changed in place. (intp indexes three times
                                 as fast as int32.)
    """

    num_computed: np.ndarray
    prefill_end: np.ndarray
    num_known: np.ndarray
    limit: np.ndarray
    capacity: np.ndarray
    num_uploaded: np.ndarray
    num_hashed: np.ndarray

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int, num_groups: int = 1):
        def numbers() -> np.ndarray:
            return np.zeros(max_num_seqs, np.int32)

        self.page_size = page_size
        self.num_computed, self.prefill_end, self.num_known, self.limit = numbers(), numbers(), numbers(), numbers()
        self.capacity, self.num_uploaded, self.num_hashed = numbers(), numbers(), numbers()
        self.generation: np.ndarray = np.zeros(max_num_seqs, np.int64)
        self.page_table: np.ndarray = np.zeros((max_num_seqs, -(-max_model_len // page_size)), np.int32)
        self.order: np.ndarray = np.zeros(0, np.intp)
        self._requests: list[Request | None] = [None] * max_num_seqs
        self.rows_per_group: int = max_num_seqs // num_groups
        firsts = range(0, max_num_seqs, self.rows_per_group)
        self._free = [list(range(first, first + self.rows_per_group))[::-1] for first in firsts]  # of each group
        self._gathered: tuple[bytes, list[Request]] = (b"", [])

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def num_free_of(self, group: int) -> int:
        return len(self._free[group])

    def take(self, request: Request, pages: list[int], num_hit_pages: int, group: int = 0) -> int:
        """Gives `request` a row of the group and its `pages`, of which the first `num_hit_pages` hold computed tokens already."""
        row = self._free[group].pop()
        self._requests[row], request.row, request.rows = request, row, self
        num_known = len(request.token_ids)
        self.num_computed[row] = num_hit_pages * self.page_size
        self.prefill_end[row] = self.num_known[row] = num_known
        self.limit[row] = request.max_total_tokens
        self.capacity[row] = len(pages) * self.page_size
        self.num_uploaded[row] = 0
        self.num_hashed[row] = num_hit_pages
        self.page_table[row, : len(pages)] = pages
        self.order = np.append(self.order, row)
        self._gathered = (b"", [])
        return row

    def release(self, request: Request) -> list[int]:
        """Takes the row back, to be reused at once; returns its pages, head to tail."""
        row = request.row
        pages = self.pages(row)
        self._requests[row], request.row, request.rows = None, -1, None
        self.generation[row] += 1
        self.order = self.order[self.order != row]
        self._free[row // self.rows_per_group].append(row)
        self._gathered = (b"", [])
        return pages

    def pages(self, row: int) -> list[int]:
        """The pages of a row, head to tail."""
        return self.page_table[row, : self.capacity[row] // self.page_size].tolist()

    def request_at(self, row: int) -> Request:
        request = self._requests[row]
        assert request is not None, f"row {row} belongs to nobody"
        return request

    def requests_at(
        self,
        rows: np.ndarray,  # intp[n]
    ) -> list[Request]:
        """The owners of `rows`. The list is shared between calls with equal rows: not to be changed."""
        key = rows.tobytes()
        if key != self._gathered[0]:
            self._gathered = (key, [self.request_at(row) for row in rows.tolist()])
        return self._gathered[1]

    def grow(
        self,
        rows: np.ndarray,  # intp[n], distinct
        pages: list[int],  # n of them
    ) -> None:
        """Adds one page to each of `rows`."""
        held = self.capacity[rows]
        self.page_table[rows, held // self.page_size] = pages
        self.capacity[rows] = held + self.page_size

    def take_page_updates(
        self,
        rows: np.ndarray,  # intp[n], distinct
    ) -> np.ndarray:
        """i32[m, 3]: (row, column, page) of every page that `rows` got since the last call. They count as sent afterwards."""
        held, sent = self.capacity[rows], self.num_uploaded[rows]
        changed = (held != sent).nonzero()[0]
        rows, held, sent = rows[changed], held[changed], sent[changed]
        self.num_uploaded[rows] = held
        counts, columns = (held - sent) // self.page_size, sent // self.page_size
        ends = counts.cumsum()
        if (num_updates := int(ends[-1]) if len(ends) else 0) > len(rows):  # seldom: a row that got several pages
            columns = (columns - ends + counts).repeat(counts) + np.arange(num_updates)
            rows = rows.repeat(counts)
        updates = np.empty((num_updates, 3), np.int32)
        updates[:, 0], updates[:, 1], updates[:, 2] = rows, columns, self.page_table[rows, columns]
        return updates

    @contextmanager
    def hiding(
        self,
        hidden: np.ndarray,  # bool[S]
    ) -> Iterator[None]:
        """Inside the `with`, `order` leaves out the rows of `hidden`, as if their owners did not run. Other rows may be taken and
        released there. Afterwards all rows in use are in order of admission again."""
        everyone = self.order
        out = hidden[everyone]
        if not out.any():
            yield
            return
        rank = np.full(len(hidden), len(everyone))  # in order of admission, new ones last
        rank[everyone] = np.arange(len(everyone))
        owners = self.generation.copy()
        self.order = everyone[~out]
        yield
        rank[self.generation != owners] = len(everyone)
        order = np.concatenate([everyone[out], self.order])
        self.order = order[np.argsort(rank[order], kind="stable")]

    def check_invariants(self) -> None:
        """Asserts that rows, owners and counters agree."""
        used = self.order.tolist()
        free = [row for rows in self._free for row in rows]
        assert len(set(used)) == len(used) and sorted(used + free) == list(range(len(self._requests)))
        assert all(row // self.rows_per_group == group for group, rows in enumerate(self._free) for row in rows)
        for row in free:
            assert self._requests[row] is None
        for row in used:
            request = self.request_at(row)
            assert request.row == row and request.rows is self
            known, computed, end = int(self.num_known[row]), int(self.num_computed[row]), int(self.prefill_end[row])
            assert known == len(request.token_ids) >= end >= request.num_prompt_tokens
            assert known < self.limit[row] == request.max_total_tokens, "a request at its limit still runs"
            assert max(computed + 1, end) >= known and computed < self.limit[row] and computed <= self.capacity[row]
            hashed = int(self.num_hashed[row])
            assert hashed == NEVER or hashed * self.page_size <= min(known, computed)
            pages = self.pages(row)
            assert len(set(pages)) == len(pages), "a sequence holds a page twice"
