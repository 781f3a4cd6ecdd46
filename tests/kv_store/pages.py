"""Small pages for tests of stores."""

import hashlib

import numpy as np

from jaxserve.kv_store.blob import blob_bytes, pack_page
from jaxserve.kv_store.tier import PageLayout

LAYOUT = PageLayout(num_layers=2, num_kv_heads=3, page_size=4, head_dim=8, dtype=np.dtype("float32"))


def hash_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def page_of(number: int, layout: PageLayout = LAYOUT) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(layout.shape).astype(layout.dtype)


def blob_of(number: int, layout: PageLayout = LAYOUT) -> bytes:
    out = np.zeros(blob_bytes(layout), np.uint8)
    pack_page(layout, hash_of(number), page_of(number, layout), out)
    return out.tobytes()


def empty(num_pages: int | None = None) -> np.ndarray:
    return np.full(LAYOUT.shape if num_pages is None else (num_pages, *LAYOUT.shape), np.nan, LAYOUT.dtype)
