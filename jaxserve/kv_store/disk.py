"""Pages as files of a folder, which survive restarts and which several processes may share.

Owns the folder: a file a page, written under another name and renamed when it is whole, and its bound. A file's time of change says
when it was last used. Files that can't be used are dropped, but for those of another layout, which belong to somebody else.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxserve.kv_store.blob import BlobError, ForeignBlobError, pack_page, unpack_page
from jaxserve.kv_store.tier import PageLayout, TierStats

logger: logging.Logger = logging.getLogger("jaxserve")

SUFFIX = ".kv"
UNFINISHED = ".writing"
UNFINISHED_SECONDS = 3600.0  # after which a file that is not whole was left behind by a process that died
PRUNE_TO = 0.9  # of the bound: what is left when files are deleted for it


class DiskTier:
    """Files of `folder`, which is made if need be, of about `max_bytes` together.

    Each process deletes files when its own count passes the bound, the least recently used first, whoever wrote them.

    Raises:
      ValueError: the folder can't be made, read or written.
    """

    def __init__(self, layout: PageLayout, folder: str | Path, max_bytes: int):
        self.stats: TierStats = TierStats("disk")
        self._layout, self._folder, self._max_bytes = layout, Path(folder), max_bytes
        self._numbers = itertools.count()
        self._said: set[str] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._unfinished()
            probe.write_bytes(b"")
            probe.unlink()
            self.stats.bytes_held = sum(size for _, size, _ in self._files())
        except OSError as error:
            raise ValueError(f"kv_store: the folder {str(folder)!r} can't be used: {error}") from None

    def contains(self, hash_: bytes) -> bool:
        """As `Tier.contains`."""
        return os.path.exists(self._path(hash_))

    def read(
        self,
        hash_: bytes,
        out: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """As `Tier.read`."""
        path = self._path(hash_)
        try:
            blob = path.read_bytes()
            unpack_page(self._layout, hash_, blob, out)
        except FileNotFoundError:
            return False  # deleted since, by another process
        except OSError as error:
            return self._fail("read", f"{path} can't be read ({error}): its tokens are computed")
        except BlobError as error:
            if not isinstance(error, ForeignBlobError):
                self._delete(path)
            return self._fail("blob", f"{path} is not used: {error}; its tokens are computed")
        with contextlib.suppress(OSError):
            os.utime(path)
        return True

    def write(
        self,
        hash_: bytes,
        page: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """As `Tier.write`; deletes other files where the bound is passed."""
        path, unfinished = self._path(hash_), self._unfinished()
        if path.exists():
            return True
        blob = pack_page(self._layout, hash_, page)
        try:
            path.parent.mkdir(exist_ok=True)
            unfinished.write_bytes(blob)
            os.replace(unfinished, path)
        except OSError as error:
            self._delete(unfinished)
            return self._fail("write", f"no page can be written to {self._folder} ({error}): pages are not kept there meanwhile")
        self._said.discard("write")
        self.stats.bytes_held += len(blob)
        if self.stats.bytes_held > self._max_bytes:
            self._prune()
        return True

    def forget(self, hash_: bytes) -> None:
        """As `Tier.forget`."""
        self._delete(self._path(hash_))

    def _path(self, hash_: bytes) -> Path:
        name = hash_.hex()
        return self._folder / name[:2] / f"{name}{SUFFIX}"

    def _unfinished(self) -> Path:
        return self._folder / f"{os.uname().nodename}-{os.getpid()}-{id(self):x}-{next(self._numbers)}{UNFINISHED}"

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """(time of last use, bytes, path) of every page. Unfinished files of processes that died are deleted on the way."""
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(path)
                    if name.endswith(SUFFIX):
                        yield found.st_mtime, found.st_size, path
                    elif name.endswith(UNFINISHED) and time.time() - found.st_mtime > UNFINISHED_SECONDS:
                        os.unlink(path)

    def _prune(self) -> None:
        """Deletes the least recently used files, if those of all processes together pass the bound."""
        files = sorted(self._files())
        held = sum(size for _, size, _ in files)
        for _, size, path in files if held > self._max_bytes else []:
            if held <= PRUNE_TO * self._max_bytes:
                break
            self._delete(Path(path))
            held -= size
        self.stats.bytes_held = held

    def _delete(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    def _fail(self, kind: str, message: str) -> bool:
        """Counts a failure and logs the first one of its kind."""
        self.stats.num_failures += 1
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("kv_store: %s (further ones are counted, not logged)", message)
        return False
