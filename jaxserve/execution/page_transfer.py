"""KV between the pool and the host: two programs of a fixed number of pages, padded where there are fewer.

Owns the programs as functions, and how many pages they move. A runner runs them between steps in the order of dispatch: what `take`
reads is what the steps before it wrote, and the steps behind `put` read what that wrote.

On several devices each moves its own KV heads, and on several stages each its own layers. On the host a page has the model's layers
and heads, each once and in order, so that engines of any layout share a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.stage_reports import Result
from jaxserve.parallel.layout import Layout
from jaxserve.parallel.shard import Shard

TRANSFER_PAGES = 4  # of a run of either program
MAX_SAVES = 4  # runs of `take` whose pages are not kept yet
LAYERS, HEADS = 1, 3  # axes of [N, L, 2, K, page_size, H]


def take(
    shard: Shard | None,  # of which all have what each has taken; None: each keeps its own
    kv_pages: list[jax.Array],  # L of [num_pages, 2, K, page_size, H]
    page_ids: jax.Array,  # i32[N]; padding repeats any page
) -> jax.Array:
    """[N, L, 2, K, page_size, H]: these pages of all layers."""
    with jax.named_scope("take_pages"):
        kv = jnp.stack([pages.at[page_ids].get(mode="promise_in_bounds") for pages in kv_pages], LAYERS)
        return kv if shard is None else shard.gather(kv, HEADS)


def put(
    shard: Shard,
    kv_pages: list[jax.Array],  # L of [num_pages, 2, K, page_size, H], donated
    page_ids: jax.Array,  # i32[groups * N], each group's, distinct; padding points past the end and writes nothing
    kv: jax.Array,  # [N, L, 2, K, page_size, H]
) -> list[jax.Array]:
    """The pages with these written."""
    with jax.named_scope("put_pages"):
        page_ids = shard.own_rows(page_ids)
        return [pages.at[page_ids].set(kv[:, layer], mode="drop") for layer, pages in enumerate(kv_pages)]


@dataclass(frozen=True, eq=False)
class TakenPages:
    """What `take` has read, on its way to the host. As a numpy array, which waits for it: [N, L, 2, K, page_size, H]."""

    parts: Sequence[Result]  # one after the other along the KV heads, they are what the devices hold
    heads: Layout  # how that is cut

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = [np.asarray(part) for part in self.parts]
        kv = found[0] if len(found) == 1 else np.concatenate(found, HEADS)
        return np.array(self.heads.joined(kv), dtype, copy=copy)


@dataclass(frozen=True, eq=False)
class TakenStages:
    """The same of a pipeline, whose stages have read their layers."""

    stages: Sequence[TakenPages]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(np.concatenate([np.asarray(stage) for stage in self.stages], LAYERS), dtype, copy=copy)


def transfer_bytes(page_bytes: int, num_gathered: int = 1) -> int:
    """Memory of one device for KV on its way to a store and back. page_bytes: of its part of a page. num_gathered: devices whose
    parts each has of what was taken."""
    return (MAX_SAVES * num_gathered + 1) * TRANSFER_PAGES * page_bytes


def parts_of_group(kv: jax.Array, group: int, num_groups: int) -> list[jax.Array]:
    """What the devices of one group have of an array that is cut along its heads, in their order."""
    shards = sorted(kv.addressable_shards, key=lambda shard: shard.index[HEADS].start or 0)
    count = len(shards) // num_groups
    return [shard.data for shard in shards[group * count : (group + 1) * count]]


def padded_ids(page_ids: Sequence[int], padding: int) -> np.ndarray:
    """i32[TRANSFER_PAGES]"""
    return np.array([*page_ids, *[padding] * (TRANSFER_PAGES - len(page_ids))], np.int32)
