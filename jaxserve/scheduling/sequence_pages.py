"""The pages of running requests: where the pool, the rows' page tables and the requests' hash chains meet.

Owns no state of its own. It takes pages for a sequence, adds to them, gives them back, and makes full pages shareable. Knows no
queue, budget or policy: the scheduler chooses which request to preempt when pages run out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.request import Request
from jaxserve.scheduling.page_pool import PagePool, extend_hash_chain
from jaxserve.scheduling.sequence_rows import NEVER, SequenceRows


class SequencePages:
    """Pages for the sequences in `rows`, taken from the pool of each row's group: one of `pools`, which are alike."""

    def __init__(self, pools: Sequence[PagePool], rows: SequenceRows):
        self.pools = pools
        self.rows = rows
        self.page_size: int = pools[0].page_size
        self.enable_prefix_caching: bool = pools[0].enable_prefix_caching

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def group_of(self, row: int) -> int:
        return row // self.rows.rows_per_group

    def admit(self, request: Request, hits: list[int], num_tokens: int, group: int = 0) -> bool:
        """Takes a row of the group for the request, and pages for `num_tokens` tokens, the first of them `hits`. Returns False, and
        changes nothing, if there are too few pages."""
        pool = self.pools[group]
        pages = pool.allocate(self.num_pages(num_tokens) - len(hits), hits)
        if pages is None:
            return False
        self.rows.take(request, pages, len(hits), group)
        if pool.enable_prefix_caching:
            pool.num_queried_tokens += len(request.token_ids)
            pool.num_hit_tokens += len(hits) * pool.page_size
        return True

    def grow(
        self,
        rows: np.ndarray,  # intp[n], distinct
    ) -> bool:
        """Adds one page to each of `rows`. Returns False, and changes nothing, if there are too few pages."""
        if len(self.pools) == 1:
            return self._grow(self.pools[0], rows)
        groups = rows // self.rows.rows_per_group
        parts = [rows[groups == group] for group in range(len(self.pools))]
        if any(len(part) > pool.num_free_pages for pool, part in zip(self.pools, parts, strict=True)):
            return False
        return all(self._grow(pool, part) for pool, part in zip(self.pools, parts, strict=True))

    def _grow(self, pool: PagePool, rows: np.ndarray) -> bool:
        pages = pool.allocate(len(rows))
        if pages is not None:
            self.rows.grow(rows, pages)
        return pages is not None

    def release(self, request: Request) -> None:
        """Takes back the request's row and its references to pages."""
        pool = self.pools[self.group_of(request.row)]
        pool.free(self.rows.release(request))

    def shareable(self, row: int) -> bool:
        """Whether all KV in the row's pages was computed with the present weights."""
        return bool(self.rows.num_hashed[row] != NEVER)

    def register_full(
        self,
        rows: np.ndarray,  # intp[n], distinct
    ) -> None:
        """Hashes the pages of `rows` that are full: the host knows their tokens, and steps scheduled so far compute them.

        A page may be hit before its step has run. Steps run in order, and each writes its KV before it reads any, so the page is
        written by the time that it is read.
        """
        if not self.enable_prefix_caching:
            return
        state, page_size = self.rows, self.page_size
        num_full = np.minimum(state.num_known[rows], state.num_computed[rows]) // page_size
        num_hashed = state.num_hashed[rows]
        more = (num_full > num_hashed).nonzero()[0]
        if not len(more):
            return
        rows, starts, ends = rows[more], num_hashed[more], num_full[more]
        state.num_hashed[rows] = ends
        firsts = state.page_table[rows, starts].tolist()  # mostly a row has one
        for row, start, end, page in zip(rows.tolist(), starts.tolist(), ends.tolist(), firsts, strict=True):
            request, pool = state.request_at(row), self.pools[self.group_of(row)]
            chain, is_saved = request.hash_chain, request.saves_kv is not False
            extend_hash_chain(chain, request.token_ids, page_size, end)
            pool.register(page, chain[start + 1], is_saved=is_saved)
            for i in range(start + 1, end):
                pool.register(int(state.page_table[row, i]), chain[i + 1], is_saved=is_saved)
