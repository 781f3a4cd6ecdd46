"""Pages as files of a folder, which survive restarts and which several processes may share.

Owns the pages of the folder and their bound: a file a page, FOLDER/xx/HASH.kv, written under another name and renamed when it is
whole. A file's time of change says when it was last used. Pages that can't be used are dropped, but for those of another layout or
version, which belong to somebody else. Files of other names are neither counted nor touched.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np

from jaxserve.kv_store.blob import BlobError, ForeignBlobError, blob_bytes, pack_page, unpack_page
from jaxserve.kv_store.tier import PageLayout, TierStats

logger: logging.Logger = logging.getLogger("jaxserve")

SUFFIX = ".kv"
UNFINISHED = ".writing"
UNFINISHED_SECONDS = 3600.0  # after which a file that is not whole was left behind by a process that died
_FOLDER = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(r"[0-9a-f]{64}\.kv")
_OURS = re.compile(r".+-[0-9]+-[0-9a-f]+-[0-9]+\.writing")  # what `_unfinished` names
PRUNE_TO = 0.9  # of the bound: what is left when files are deleted for it


class DiskTier:
    """Files of `folder`, which is made if need be, of about `max_bytes` together.

    Each process deletes pages when its own count passes the bound, the least recently used first, whoever wrote them. Which pages
    there are is known from a walk at the start, from what this process does, and from `refresh`.

    Raises:
      ValueError: the folder can't be made, read or written, or the bound is below a page.
    """

    def __init__(self, layout: PageLayout, folder: str | Path, max_bytes: int):
        self.stats: TierStats = TierStats("disk")
        self.is_shared: bool = True
        if max_bytes < blob_bytes(layout):
            raise ValueError(f"kv_store: a disk tier of {max_bytes} bytes can't hold a KV page, which takes {blob_bytes(layout)}")
        self._layout, self._max_bytes = layout, max_bytes
        self._numbers = itertools.count()
        self._said: set[str] = set()
        self._known: set[bytes] = set()  # replaced or changed on one thread, asked on any
        self._blob = np.empty(blob_bytes(layout) + 1, np.uint8)  # of the page that is read or written, and a byte of a longer file
        try:
            self._folder = Path(folder).expanduser()
            self._folder.mkdir(parents=True, exist_ok=True)
            # As text, of which a page's paths are made: a Path takes as long as a call of the system.
            self._prefix = os.fspath(self._folder)
            self._own_prefix = os.path.join(self._folder, f"{os.uname().nodename}-{os.getpid()}-{id(self):x}")
            probe = Path(self._unfinished())
            probe.write_bytes(b"")
            probe.unlink()
            self._remove_unfinished()
            self._know(self._files())
        except (OSError, RuntimeError) as error:  # RuntimeError: "~" of nobody
            raise ValueError(f"kv_store: the folder {str(folder)!r} can't be used: {error}") from None

    def contains(self, hash_: bytes) -> bool:
        """As `Tier.contains`."""
        return hash_ in self._known

    def read(
        self,
        hash_: bytes,
        out: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """As `Tier.read`."""
        path = self._path(hash_)
        try:
            with open(path, "rb", buffering=0) as file:
                unpack_page(self._layout, hash_, self._blob.data[: _read(file, self._blob.data)], out)
        except FileNotFoundError:
            self._known.discard(hash_)
            return False  # deleted since, by another process
        except OSError as error:
            return self._fail("read", f"{path} can't be read ({error}): its tokens are computed")
        except BlobError as error:
            if isinstance(error, ForeignBlobError):
                self._known.discard(hash_)
            else:
                self.forget(hash_)
            return self._fail("blob", f"{path} is not used: {error}; its tokens are computed")
        self._known.add(hash_)  # another process may have written it since the last look
        return True

    def write(
        self,
        hash_: bytes,
        page: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """As `Tier.write`; deletes other files where the bound is passed."""
        path, unfinished = self._path(hash_), self._unfinished()
        if os.path.exists(path):
            self._known.add(hash_)
            return True
        blob = self._blob[:-1]
        pack_page(self._layout, hash_, page, blob)
        try:
            _write(unfinished, blob.data)
            _set_used(unfinished)
            _rename(unfinished, path)
        except OSError as error:
            self._delete(unfinished)
            return self._fail("write", f"no page can be written to {self._folder} ({error}): pages are not kept there meanwhile")
        self._said.discard("write")
        self._known.add(hash_)
        self.stats.add_written(page.nbytes)
        self.stats.bytes_held += len(blob)
        if self.stats.bytes_held > self._max_bytes:
            self._prune()
        return True

    def forget(self, hash_: bytes) -> None:
        """As `Tier.forget`."""
        self._known.discard(hash_)
        self._delete(self._path(hash_))

    def touch(self, hash_: bytes) -> None:
        """As `Tier.touch`."""
        _set_used(self._path(hash_))

    def close(self) -> None:
        """As `Tier.close`: there is nothing to end."""

    def refresh(self) -> None:
        """As `Tier.refresh`; the bytes of what others wrote are counted when this process prunes."""
        with contextlib.suppress(OSError):
            self._known = {_hash_of(path) for path in self._paths()}

    def _path(self, hash_: bytes) -> str:
        name = hash_.hex()
        return f"{self._prefix}/{name[:2]}/{name}{SUFFIX}"

    def _unfinished(self) -> str:
        return f"{self._own_prefix}-{next(self._numbers)}{UNFINISHED}"

    def _paths(self) -> Iterator[str]:
        """Of every page."""
        with os.scandir(self._folder) as folders:
            names = [found.name for found in folders if _FOLDER.fullmatch(found.name) and found.is_dir(follow_symlinks=False)]
        for name in names:
            folder = os.path.join(self._folder, name)
            yield from (os.path.join(folder, page) for page in os.listdir(folder) if _PAGE.fullmatch(page) and page[:2] == name)

    def _files(self) -> list[tuple[int, int, str]]:
        """(time of last use, bytes, path) of every page, the least recently used first."""
        found = []
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                found.append((stat.st_mtime_ns, stat.st_size, path))
        return sorted(found)

    def _know(self, files: list[tuple[int, int, str]]) -> None:
        self._known = {_hash_of(path) for _, _, path in files}
        self.stats.bytes_held = sum(size for _, size, _ in files)

    def _remove_unfinished(self) -> None:
        """What processes that died have left."""
        for path in self._folder.glob(f"*{UNFINISHED}"):
            with contextlib.suppress(OSError):
                if _OURS.fullmatch(path.name) and time.time() - path.stat().st_mtime > UNFINISHED_SECONDS:
                    path.unlink()

    def _prune(self) -> None:
        """Deletes the least recently used pages, if those of all processes together pass the bound."""
        self._remove_unfinished()
        files = self._files()
        self._know(files)
        if self.stats.bytes_held <= self._max_bytes:
            return
        for _, size, path in files[:-1]:
            if self.stats.bytes_held <= PRUNE_TO * self._max_bytes:
                return
            if self._delete(path):
                self._known.discard(_hash_of(path))
                self.stats.bytes_held -= size
        if self.stats.bytes_held > self._max_bytes:
            self._fail("prune", f"pages of {self._folder} can't be deleted, so that it is over its bound")

    def _delete(self, path: str) -> bool:
        """Whether it is gone."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _fail(self, kind: str, message: str) -> bool:
        """Counts a failure and logs the first one of its kind."""
        self.stats.num_failures += 1
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("kv_store: %s (further ones are counted, not logged)", message)
        return False


def _read(file: FileIO, into: memoryview) -> int:
    """How many bytes of the file are in `into`: all, or as many as it holds."""
    num_read = 0
    while count := file.readinto(into[num_read:]):
        num_read += count
    return num_read


def _write(path: str, data: memoryview) -> None:
    """A file of its own; no object of Python's is made of it, which would take longer than to open it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        while data:
            data = data[os.write(file, data) :]
    finally:
        os.close(file)


def _rename(unfinished: str, path: str) -> None:
    """The folder is made where it is not there: asking each time costs as much as writing a page's bytes."""
    try:
        os.replace(unfinished, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(unfinished, path)


def _set_used(path: str) -> None:
    """Now, by a clock that tells pages of one moment apart, which that of a file system may not."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(path, ns=(now, now))


def _hash_of(path: str) -> bytes:
    return bytes.fromhex(os.path.basename(path)[: -len(SUFFIX)])
