"""Tiers: what was written is read bit for bit, within the bound, and what can't be used is not."""

import ctypes
import errno
import logging
import mmap
import os
import platform
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.kv_store import disk, host
from jaxserve.kv_store import tier as tiers
from jaxserve.kv_store.blob import blob_bytes, unpack_page
from jaxserve.kv_store.disk import DiskTier
from jaxserve.kv_store.host import HostTier
from jaxserve.kv_store.memory_limit import host_memory_bytes
from jaxserve.kv_store.tier import PageLayout, take_memory
from tests.kv_store.pages import LAYOUT, blob_of, empty, hash_of, page_of

BLOB_BYTES = blob_bytes(LAYOUT)


def disk_tier(folder, num_pages=100, layout=LAYOUT):
    return DiskTier(layout, folder, num_pages * BLOB_BYTES)


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    return HostTier(LAYOUT, 100 * LAYOUT.page_bytes) if request.param == "host" else disk_tier(tmp_path / "new" / "kv")


def test_pages_come_back_bit_for_bit(tier):
    for i in range(5):
        assert not tier.contains(hash_of(i))
        assert tier.write(hash_of(i), page_of(i))
    for i in range(5):
        out = empty()
        assert tier.contains(hash_of(i)) and tier.read(hash_of(i), out)
        np.testing.assert_array_equal(out, page_of(i))
    tier.forget(hash_of(3))
    tier.forget(hash_of(77))
    assert not tier.contains(hash_of(3)) and not tier.read(hash_of(3), empty()) and tier.contains(hash_of(4))


def test_a_page_that_is_there_already_is_not_counted_as_written(tier):
    for i in (0, 1, 0, 0):
        assert tier.write(hash_of(i), page_of(i))
    assert (tier.stats.pages_written, tier.stats.bytes_written) == (2, 2 * LAYOUT.page_bytes)
    tier.forget(hash_of(0))
    assert tier.write(hash_of(0), page_of(0)) and tier.stats.pages_written == 3


def test_a_page_of_a_shared_folder_is_counted_by_who_wrote_it(tmp_path):
    first, second = disk_tier(tmp_path), disk_tier(tmp_path)
    for tier in (first, second):
        assert tier.write(hash_of(0), page_of(0))
    assert (first.stats.pages_written, second.stats.pages_written) == (1, 0)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_blob_holds_any_dtype(dtype):
    layout = PageLayout(2, 3, 4, 8, np.dtype(dtype))
    page, out = page_of(1, layout), np.zeros(layout.shape, layout.dtype)
    unpack_page(layout, hash_of(1), blob_of(1, layout), out)
    np.testing.assert_array_equal(out.view(np.uint8), page.view(np.uint8))


def test_a_blob_has_a_section_for_each_kv_head():
    """Whoever holds head 1 alone finds it at its place behind the header."""
    page = page_of(0)
    blob = blob_of(0)
    start = len(blob) - LAYOUT.page_bytes + LAYOUT.head_bytes
    assert blob[start : start + LAYOUT.head_bytes] == page[:, :, 1].tobytes()


def test_the_host_tier_evicts_what_was_used_least_recently():
    tier = HostTier(LAYOUT, 3 * LAYOUT.page_bytes + 1)
    for i in range(3):
        tier.write(hash_of(i), page_of(i))
    tier.read(hash_of(0), empty())
    tier.touch(hash_of(0))
    tier.write(hash_of(3), page_of(3))
    assert [tier.contains(hash_of(i)) for i in range(4)] == [True, False, True, True]
    assert tier.stats.bytes_held == 3 * LAYOUT.page_bytes
    tier.forget(hash_of(0))
    tier.write(hash_of(4), page_of(4))
    out = empty()
    assert tier.read(hash_of(3), out) and (out == page_of(3)).all() and tier.contains(hash_of(2))


def test_a_host_tier_must_hold_a_page():
    with pytest.raises(ValueError, match=f"takes {LAYOUT.page_bytes}"):
        HostTier(LAYOUT, LAYOUT.page_bytes - 1)


def test_a_disk_tier_must_hold_a_page(tmp_path):
    with pytest.raises(ValueError, match=f"takes {BLOB_BYTES}"):
        DiskTier(LAYOUT, tmp_path, BLOB_BYTES - 1)
    tier = DiskTier(LAYOUT, tmp_path, BLOB_BYTES)
    for i in range(2):
        assert tier.write(hash_of(i), page_of(i))
    assert [tier.contains(hash_of(i)) for i in range(2)] == [False, True]


def test_a_host_tier_beyond_the_memory_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=rf"{1 << 60} bytes is more than the {host_memory_bytes()} bytes"):
        HostTier(LAYOUT, 1 << 60)
    with monkeypatch.context() as patch:
        patch.setattr(tiers, "host_memory_bytes", lambda: 1 << 20)  # of a container
        with pytest.raises(ValueError, match=f"a host tier of {1 << 21} bytes is more than the {1 << 20} bytes of memory"):
            HostTier(LAYOUT, 1 << 21)

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(host.np, "empty", refuse)
    with pytest.raises(ValueError, match="no memory for a host tier"):
        HostTier(LAYOUT, 1 << 20)


def resident_share(array: np.ndarray) -> float:
    """Of an array's whole pages, those that the system has given."""
    page, mincore = os.sysconf("SC_PAGE_SIZE"), ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    first = -(-array.ctypes.data // page) * page
    told = ctypes.create_string_buffer((array.ctypes.data + array.nbytes - first) // page)
    assert mincore(first, len(told) * page, told) == 0
    return float(np.frombuffer(told, np.uint8).astype(bool).mean())


needs_populate = pytest.mark.skipif(
    not sys.platform.startswith("linux") or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="needs Linux 5.14 or newer, which gives memory before it is written",
)


@needs_populate
def test_memory_is_taken_before_it_is_written():
    """All of it, and what is written already stays as it is."""
    pages = np.frombuffer(mmap.mmap(-1, 64 << 20), np.uint8)  # not what malloc may have from before
    pages[5 << 20 : 6 << 20] = 7
    assert resident_share(pages) < 0.25
    take_memory(lambda: pages)
    assert resident_share(pages) == 1
    assert (pages[5 << 20 : 6 << 20] == 7).all()


@needs_populate
def test_a_host_tier_has_its_memory_soon():
    tier = HostTier(LAYOUT, 64 << 20)
    assert tier.write(hash_of(0), page_of(0))
    for thread in threading.enumerate():
        if thread.name == "jaxserve-kv-memory":
            thread.join(30)
    assert resident_share(tier._pages) == 1
    out = empty()
    assert tier.read(hash_of(0), out)
    np.testing.assert_array_equal(out, page_of(0))


def test_folders_of_others_are_not_read(tmp_path, monkeypatch):
    (tmp_path / "lost+found").mkdir()
    listdir, listed = os.listdir, []
    monkeypatch.setattr(disk.os, "listdir", lambda path: listed.append(path) or listdir(path))
    tier = disk_tier(tmp_path)
    tier.write(hash_of(0), page_of(0))
    tier.refresh()
    assert listed == [str(Path(tier._path(hash_of(0))).parent)] and tier.contains(hash_of(0))


def test_files_of_others_are_neither_counted_nor_deleted(tmp_path):
    name = hash_of(0).hex()
    theirs = [tmp_path / name, tmp_path / "ab" / "notes.kv", tmp_path / "ab" / "cd" / f"{name}.kv", tmp_path / "letter.writing"]
    theirs += [tmp_path / f"{name}.kv", tmp_path / "ab" / "host-1-a-0.writing", tmp_path / "zz" / f"{name}.kv"]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 9 * BLOB_BYTES)
        os.utime(path, (1, 1))
    tier = disk_tier(tmp_path, 3)
    assert not tier.stats.bytes_held
    for i in range(9):
        tier.write(hash_of(i), page_of(i))
    assert all(path.exists() for path in theirs) and tier.stats.bytes_held <= 3 * BLOB_BYTES and tier.contains(hash_of(8))


def test_a_page_that_cannot_be_deleted_still_counts(tmp_path, monkeypatch, caplog):
    tier = disk_tier(tmp_path, 3)
    for i in range(3):
        tier.write(hash_of(i), page_of(i))
    with monkeypatch.context() as patch:

        def refuse(*_, **__):
            raise PermissionError("not yours")

        patch.setattr(disk.os, "unlink", refuse)
        assert tier.write(hash_of(3), page_of(3)) and tier.stats.bytes_held == 4 * BLOB_BYTES
    assert "over its bound" in caplog.text and all(tier.contains(hash_of(i)) for i in range(4))
    tier.write(hash_of(4), page_of(4))
    assert tier.stats.bytes_held <= 3 * BLOB_BYTES


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    disk_tier("~/kv").write(hash_of(0), page_of(0))
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 1
    with pytest.raises(ValueError, match="can't be used"):
        disk_tier("~nobody-of-this-name/kv")


def test_a_folder_stays_within_its_bound(tmp_path):
    tier = disk_tier(tmp_path, 10)
    for i in range(25):
        tier.write(hash_of(i), page_of(i))
        if tier.contains(hash_of(0)):
            os.utime(tier._path(hash_of(i)), (i, i))  # used at second i
            os.utime(tier._path(hash_of(0)))  # and this one just now
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.kv")) <= 10 * BLOB_BYTES
    assert tier.contains(hash_of(0)) and tier.contains(hash_of(24)) and not tier.contains(hash_of(1))


def test_a_folder_survives_restarts_and_is_shared(tmp_path):
    one, other = disk_tier(tmp_path), disk_tier(tmp_path)
    one.write(hash_of(1), page_of(1))
    out = empty()
    assert not other.contains(hash_of(1))
    other.refresh()
    assert other.contains(hash_of(1))
    assert other.read(hash_of(1), out) and (out == page_of(1)).all()
    assert disk_tier(tmp_path).stats.bytes_held == BLOB_BYTES


def damage(kind, blob):
    at = len(blob) - LAYOUT.page_bytes
    return {
        "a bit of the KV": blob[:-5] + bytes([blob[-5] ^ 1]) + blob[-4:],
        "truncated": blob[:-1],
        "header alone": blob[:at],
        "empty": b"",
        "not a blob": b"x" * len(blob),
        "header that is no JSON": blob[:30] + b"\xff" + blob[31:],
        "another page": blob_of(2),
        "longer": blob + b"0",
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["a bit of the KV", "truncated", "header alone", "empty", "not a blob", "header that is no JSON", "another page", "longer"],
)
def test_damaged_files_are_not_used_but_dropped(tmp_path, caplog, kind):
    tier = disk_tier(tmp_path)
    for i in (0, 1):
        tier.write(hash_of(i), page_of(i))
        path = Path(tier._path(hash_of(i)))
        path.write_bytes(damage(kind, path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert not tier.read(hash_of(0), empty()) and not tier.read(hash_of(1), empty())
    assert [r.name for r in caplog.records] == ["jaxserve"] and "is not used" in caplog.text, "one line for all of them"
    assert tier.stats.num_failures == 2 and not tier.contains(hash_of(0))
    assert tier.write(hash_of(0), page_of(0)) and tier.read(hash_of(0), empty())


def test_a_page_of_another_layout_is_left_to_its_owner(tmp_path, caplog):
    theirs = disk_tier(tmp_path, layout=PageLayout(2, 3, 8, 4, np.dtype("float32")))
    theirs.write(hash_of(0), page_of(0, theirs._layout))
    tier = disk_tier(tmp_path)
    assert not tier.read(hash_of(0), empty())
    assert "another layout: L2 K3 P8 H4 float32, not L2 K3 P4 H8 float32" in caplog.text
    assert theirs.read(hash_of(0), np.empty(theirs._layout.shape, np.float32))


def test_a_page_of_another_version_is_left_to_its_owner(tmp_path, caplog):
    tier = disk_tier(tmp_path)
    tier.write(hash_of(0), page_of(0))
    path = Path(tier._path(hash_of(0)))
    theirs = path.read_bytes().replace(b"jaxserve KV 2", b"jaxserve KV 1")
    path.write_bytes(theirs)
    assert not tier.read(hash_of(0), empty()) and not tier.contains(hash_of(0))
    assert "another version" in caplog.text and path.read_bytes() == theirs


def test_a_full_disk_is_said_once_and_leaves_nothing_half_written(tmp_path, caplog, monkeypatch):
    tier = disk_tier(tmp_path)
    with monkeypatch.context() as patch:

        def full(path, data):
            Path(path).write_bytes(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(disk, "_write", full)
        assert not tier.write(hash_of(0), page_of(0)) and not tier.write(hash_of(1), page_of(1))
    assert caplog.text.count("No space left on device") == 1 and tier.stats.num_failures == 2
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
    assert tier.write(hash_of(0), page_of(0)) and tier.read(hash_of(0), empty())


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file' can't be used"):
        disk_tier(tmp_path / "file")


def test_files_of_processes_that_died_are_removed(tmp_path):
    tier = disk_tier(tmp_path)
    old, new = Path(tier._unfinished()), Path(tier._unfinished())
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    disk_tier(tmp_path)
    assert new.exists() and not old.exists()
