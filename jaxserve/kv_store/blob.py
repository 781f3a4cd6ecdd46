"""A page as bytes: a header, then one section a KV head, so that whoever holds a part of the heads reads its part alone.

Owns the format. A header names the layout and the page's hash, and has a checksum of each section: CRC-32, which finds damage, and
no forgery.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np

from jaxserve.kv_store.tier import PageLayout

FORMAT = b"jaxserve KV "  # of any version
MAGIC = FORMAT + b"2\n"
ALIGNMENT = 64  # bytes, of the first section's place
MAX_HEADER_BYTES = 1 << 16  # of 5,000 KV heads
HASH_BYTES = 32


class BlobError(ValueError):
    """Bytes that are no whole page, or not the one that was asked for."""


class ForeignBlobError(BlobError):
    """A page of another layout or version of the format: somebody else may use it."""


def pack_page(
    layout: PageLayout,
    hash_: bytes,
    page: np.ndarray,  # PageLayout.shape
    out: np.ndarray,  # u8[blob_bytes(layout)]
) -> None:
    """Writes the page as bytes into `out`. The other threads of the process run meanwhile, but for the header's few bytes."""
    sections = out[len(out) - layout.page_bytes :].reshape(layout.num_kv_heads, layout.head_bytes)
    L, _, K, P, H = layout.shape
    np.copyto(sections.view(layout.bits).reshape(K, L, 2, P, H), page.view(layout.bits).transpose(2, 0, 1, 3, 4))
    header = _header(layout, hash_, [_checksum(section) for section in sections])
    out[: len(header)] = np.frombuffer(header, np.uint8)


def blob_bytes(layout: PageLayout) -> int:
    """Bytes of a packed page."""
    return len(_header(layout, bytes(HASH_BYTES), [_checksum(b"")] * layout.num_kv_heads)) + layout.page_bytes


def _checksum(section: Any) -> str:
    """CRC-32 as eight digits. Other threads run meanwhile."""
    return f"{zlib.crc32(section):08x}"


def _header(layout: PageLayout, hash_: bytes, checksums: list[str]) -> bytes:
    said = MAGIC + json.dumps({"layout": layout.name, "hash": hash_.hex(), "crc32": checksums}).encode()
    return said.ljust(-(-(len(said) + 1) // ALIGNMENT) * ALIGNMENT - 1) + b"\n"


def unpack_page(
    layout: PageLayout,
    hash_: bytes,
    blob: bytes | memoryview,
    out: np.ndarray,  # PageLayout.shape
) -> None:
    """Writes the page that `pack_page` made into `out`.

    Raises:
      BlobError: another format, layout or page, a wrong length, or a checksum that differs.
    """
    start = bytes(blob[:MAX_HEADER_BYTES])
    if start.startswith(FORMAT) and not start.startswith(MAGIC):
        raise ForeignBlobError(f"another version of the format: {start[: len(MAGIC)]!r}")
    end = start.find(b"\n", len(MAGIC))
    if not start.startswith(MAGIC) or end < 0:
        raise BlobError("no KV page of this version of jaxserve")
    try:
        header = json.loads(start[len(MAGIC) : end])
        said = header["layout"], header["hash"], list(header["crc32"])
    except (ValueError, KeyError, TypeError) as error:
        raise BlobError(f"its header can't be read ({error!r})") from None
    if said[0] != layout.name:
        raise ForeignBlobError(f"a page of another layout: {said[0]}, not {layout.name}")
    if said[1] != hash_.hex():
        raise BlobError(f"another page, {said[1]}")
    sections, size = memoryview(blob)[end + 1 :], layout.head_bytes
    if len(sections) != layout.page_bytes or len(said[2]) != layout.num_kv_heads:
        raise BlobError(f"{len(sections)} bytes of KV, not {layout.page_bytes}")
    for head in range(layout.num_kv_heads):
        section = sections[head * size : (head + 1) * size]
        if _checksum(section) != said[2][head]:
            raise BlobError(f"the checksum of KV head {head} differs")
        part = out.view(layout.bits)[:, :, head]
        np.copyto(part, np.frombuffer(section, layout.bits).reshape(part.shape))
