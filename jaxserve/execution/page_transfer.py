"""KV between the pool and the host: two programs of a fixed number of pages, padded where there are fewer.

Owns the programs as functions, and how many pages they move. A runner runs them between steps in the order of dispatch: what `take`
reads is what the steps before it wrote, and the steps behind `put` read what that wrote.

On several devices each moves its own KV heads. On the host a page has the model's heads, each once and in order, so that engines of
any number of devices share a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.parallel.layout import Layout

TRANSFER_PAGES = 4  # of a run of either program
MAX_SAVES = 4  # runs of `take` whose pages are not kept yet
HEADS = 3  # axis of the KV heads in [N, L, 2, K, page_size, H]


def take(
    kv_pages: list[jax.Array],  # L of [num_pages, 2, K, page_size, H]
    page_ids: jax.Array,  # i32[N]; padding repeats any page
) -> jax.Array:
    """[N, L, 2, K, page_size, H]: these pages of all layers."""
    with jax.named_scope("take_pages"):
        return jnp.stack([pages[page_ids] for pages in kv_pages], axis=1)


def put(
    kv_pages: list[jax.Array],  # L of [num_pages, 2, K, page_size, H], donated
    page_ids: jax.Array,  # i32[N], distinct; padding points past the end and writes nothing
    kv: jax.Array,  # [N, L, 2, K, page_size, H]
) -> list[jax.Array]:
    """The pages with these written."""
    with jax.named_scope("put_pages"):
        return [pages.at[page_ids].set(kv[:, layer], mode="drop") for layer, pages in enumerate(kv_pages)]


@dataclass(frozen=True, eq=False)
class TakenPages:
    """What `take` has read, on its way to the host. As a numpy array, which waits for it: [N, L, 2, K, page_size, H]."""

    kv: jax.Array  # that of all devices
    heads: Layout  # how its KV heads are cut

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.heads.joined(np.asarray(self.kv)), dtype, copy=copy)


def transfer_bytes(page_bytes: int) -> int:
    """Device memory of KV on its way to a store and back."""
    return (MAX_SAVES + 1) * TRANSFER_PAGES * page_bytes


def padded_ids(page_ids: Sequence[int], padding: int) -> np.ndarray:
    """i32[TRANSFER_PAGES]"""
    return np.array([*page_ids, *[padding] * (TRANSFER_PAGES - len(page_ids))], np.int32)
