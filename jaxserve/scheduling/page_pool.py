"""The pages of the KV cache: which are free, how many sequences share each, what it holds, and which is evicted first.

Owns reference counts, the free list and the prefix cache (hash -> page). Knows no request, row or token budget, and holds no KV:
a page is a number in [0, num_pages).

A full page is identified by a chained hash: sha256(hash of the page before it, its token ids as int32). The parent of a first page
is a root hash of the weights' version and a salt. Equal hashes therefore mean equal prefixes, and a prefix is looked up one page at
a time. A free page keeps its hash, and may be hit, until it is needed for other tokens. Sources: prefix sharing by page hash is
vLLM's automatic prefix caching; paging is Kwon et al., SOSP 2023.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence


def root_hash(num_weight_updates: int, salt: str | None, names: tuple[str, str] = ("", "")) -> bytes:
    """The parent of a first page's hash: prefixes are shared only within equal roots. names: as PagePool's root_names."""
    return hashlib.sha256(repr((num_weight_updates, salt, names[num_weight_updates > 0])).encode()).digest()


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full page that holds `token_ids` and follows the page whose hash is `parent`."""
    return hashlib.sha256(parent + _packed(len(token_ids))(*token_ids)).digest()


@functools.cache
def _packed(num_tokens: int) -> Callable[..., bytes]:
    """Of so many integers their bytes, as int32. (Of 16 it takes 0.3 us, and array("i", ...).tobytes() 0.5.)"""
    return struct.Struct(f"{num_tokens}i").pack


def extend_hash_chain(chain: list[bytes], token_ids: Sequence[int], page_size: int, num_pages: int) -> None:
    """Extends `chain` (the root, then one hash a page) in place until it covers the first `num_pages` pages of `token_ids`."""
    for page in range(len(chain) - 1, num_pages):
        chain.append(page_hash(chain[-1], token_ids[page * page_size : (page + 1) * page_size]))


class PagePool:
    """Pages with reference counts, a free list in eviction order and a prefix cache.

    The free list is doubly linked through two arrays, `_next` and `_prev`. The sentinel `num_pages` is before its head and after
    its tail. Pop, append and removal from the middle are O(1). The list begins with pages without a hash. Cached pages follow,
    least recently freed first; of those freed together, a sequence's last page comes first.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True):
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{num_pages=} and {page_size=} must be >= 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_free_pages: int = num_pages
        self.num_queried_tokens = 0  # tokens of admitted requests looked up in the prefix cache, and how many were found
        self.num_hit_tokens = 0
        # What hashes mean outside this process: the KV of the first weights, and of those that replaced them.
        self.root_names: tuple[str, str] = ("", "")
        self.journal: list[tuple[int, bytes]] | None = None  # what `register` was given to save; None: nobody saves pages
        self._leased: Counter[int] = Counter()
        self._ref_counts = array("i", [0]) * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}  # further pages with a hash that _page_of already maps
        self._next = array("i", [*range(1, num_pages + 1), 0])
        self._prev = array("i", [num_pages, *range(num_pages)])

    def match(self, chain: list[bytes], token_ids: Sequence[int]) -> list[int]:
        """The cached pages of the longest known prefix of `token_ids`, at most all but its last token.

        At least one token is left to compute, since a sequence needs the hidden state of its last token. That token lies in a page
        that is not shared, so nothing is ever written to a shared page.

        Args:
          chain: the root hash and those of the pages hashed so far; extended in place as far as the search goes.
          token_ids: the tokens that the chain hashes.
        """
        pages: list[int] = []
        if not self.enable_prefix_caching:
            return pages
        for i in range((len(token_ids) - 1) // self.page_size):
            if len(chain) == i + 1:
                extend_hash_chain(chain, token_ids, self.page_size, i + 1)
            page = self._page_of.get(chain[i + 1])
            if page is None:
                break
            pages.append(page)
        return pages

    def allocate(self, num_new_pages: int, hit_pages: Sequence[int] = ()) -> list[int] | None:
        """Takes a reference to each of `hit_pages`, and `num_new_pages` free pages. Hits are taken first, so that none of them is
        evicted for a new page.

        Returns:
          The hits, then the new pages; None, and nothing has changed, if there are too few free pages.
        """
        refs = self._ref_counts
        revived = [page for page in hit_pages if refs[page] == 0]
        if num_new_pages > self.num_free_pages - len(revived):
            return None
        for page in revived:
            self._unlink(page)
        for page in hit_pages:
            refs[page] += 1
        pages = list(hit_pages)
        page = self._next[self.num_pages]
        for _ in range(num_new_pages):  # unlinked together, from the head
            if self._hashes[page] is not None:
                self._drop_hash(page)
            refs[page] = 1
            pages.append(page)
            page = self._next[page]
        self._next[self.num_pages], self._prev[page] = page, self.num_pages
        self.num_free_pages -= num_new_pages
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Gives up one reference to each of `pages`, a sequence's pages from head to tail."""
        refs = self._ref_counts
        for page in reversed(pages):
            assert refs[page] > 0, f"page {page} is freed more often than it was taken"
            refs[page] -= 1
            if refs[page] == 0:
                self._link(page, after=self.num_pages if self._hashes[page] is None else self._prev[self.num_pages])

    def lease(self, num_new_pages: int, hit_pages: Sequence[int] = ()) -> list[int] | None:
        """As `allocate`, for pages that no sequence holds while KV is loaded into them. Ended by `end_lease`."""
        pages = self.allocate(num_new_pages, hit_pages)
        if pages is not None:
            self._leased.update(pages)
        return pages

    def end_lease(self, pages: Sequence[int]) -> None:
        """Gives back what `lease` returned. Pages that were registered meanwhile are cached, the others free."""
        self._leased.subtract(pages)
        self._leased = +self._leased
        self.free(pages)

    def holds(self, page: int, hash_: bytes) -> bool:
        """Whether `page` is registered under this hash."""
        return self._hashes[page] == hash_

    def register(self, page: int, hash_: bytes, *, is_saved: bool = True) -> None:
        """Registers `page`, which is full and in use, under its hash: from now on it may be hit. is_saved: the journal gets it."""
        assert self._ref_counts[page] > 0 and self._hashes[page] is None
        self._hashes[page] = hash_
        if is_saved and self.journal is not None:
            self.journal.append((page, hash_))
        if self._page_of.setdefault(hash_, page) != page:
            self._duplicates.setdefault(hash_, []).append(page)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages registered under any of `hashes`, duplicates included."""
        return [page for h in hashes if h in self._page_of for page in (self._page_of[h], *self._duplicates.get(h, ()))]

    def forget(self, pages: Iterable[int]) -> None:
        """Drops the hashes of `pages`, in use or not: they are not hit again. For a request whose KV is wrong."""
        for page in pages:
            if self._hashes[page] is not None:
                self._drop_hash(page)
                if self._ref_counts[page] == 0:
                    self._unlink(page)
                    self._link(page, after=self.num_pages)

    def reset(self) -> bool:
        """Empties the prefix cache. Returns False, and changes nothing, while any page is in use."""
        if self.num_free_pages != self.num_pages:
            return False
        self._hashes = [None] * self.num_pages
        self._page_of.clear()
        self._duplicates.clear()
        return True

    def _unlink(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before] = after
        self._prev[after] = before
        self.num_free_pages -= 1

    def _link(self, page: int, after: int) -> None:
        behind = self._next[after]
        self._next[after] = self._prev[behind] = page
        self._prev[page], self._next[page] = after, behind
        self.num_free_pages += 1

    def _drop_hash(self, page: int) -> None:
        hash_ = self._hashes[page]
        assert hash_ is not None
        self._hashes[page] = None
        others = self._duplicates.get(hash_)
        if not others:
            del self._page_of[hash_]
            return
        if self._page_of[hash_] == page:
            self._page_of[hash_] = others.pop()
        else:
            others.remove(page)
        if not others:
            del self._duplicates[hash_]

    def free_pages(self) -> list[int]:
        """The free pages in the order in which they will be taken. O(num_free_pages): for checks."""
        pages, page = [], self._next[self.num_pages]
        while page != self.num_pages:
            pages.append(page)
            page = self._next[page]
        return pages

    def check_invariants(self, owned: Iterable[int]) -> None:
        """Asserts that reference counts, free list and hash map agree with each other and with `owned`.

        Args:
          owned: the pages of every sequence, one after the other, a shared page once a sequence. Leased pages come on top.
        """
        counts = [0] * self.num_pages
        for page in (*owned, *self._leased.elements()):
            counts[page] += 1
        assert counts == list(self._ref_counts), "reference counts differ from owners"
        free = self.free_pages()
        assert len(free) == len(set(free)) == self.num_free_pages, "the free list's count is wrong or a page is in it twice"
        assert set(free) == {page for page in range(self.num_pages) if counts[page] == 0}, "free list and counts differ"
        assert all(self._prev[self._next[page]] == page for page in [self.num_pages, *free]), "free list links are broken"
        hashed = {page: h for page, h in enumerate(self._hashes) if h is not None}
        mapped = [(page, h) for h, page in self._page_of.items()]
        mapped += [(page, h) for h, pages in self._duplicates.items() for page in pages]
        assert len(mapped) == len(hashed) and dict(mapped) == hashed, "hash map and pages' hashes differ"
        assert all(h in self._page_of and pages for h, pages in self._duplicates.items())
