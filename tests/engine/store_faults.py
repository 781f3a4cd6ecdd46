"""What can go wrong with a store of KV, done to it at random: tiers that fail, files and memory that are damaged."""

import errno
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.kv_store.blob import FORMAT, MAGIC
from jaxserve.kv_store.tier import Tier
from jaxserve.kv_store.transfer import TransferError

SLOW = 0.003  # seconds of a slow read, of which a few make a load late


class Flaky(Tier):
    """A tier that at random fails, lies about what it has, takes its time, or damages nothing but what it says was not read.

    done: how often each.
    """

    def __init__(self, tier: Any, seed: int):
        self.tier, self.stats, self.is_shared, self.random = tier, tier.stats, tier.is_shared, random.Random(seed)
        self.done: Counter[str] = Counter()

    def contains(self, hash_):
        return self.tier.contains(hash_) if self.random.random() < 0.9 else self.random.random() < 0.5

    def read(self, hash_, out):
        what = self.random.random()
        if what < 0.05:
            self.done["read raises"] += 1
            raise OSError("by chance")
        if what < 0.2:
            self.done["miss"] += 1
            out.fill(np.nan)
            return False
        if what > 0.8:
            self.done["slow"] += 1
            time.sleep(SLOW)
        return self.tier.read(hash_, out)

    def close(self):
        self.tier.close()

    def write(self, hash_, page):
        what = self.random.random()
        if what < 0.05:
            self.done["write raises"] += 1
            raise MemoryError("by chance")
        if what < 0.1:
            self.done["not written"] += 1
            return False
        return self.tier.write(hash_, page)

    def touch(self, hash_):
        self.tier.touch(hash_)

    def refresh(self):
        self.tier.refresh()

    def forget(self, hash_):
        self.tier.forget(hash_)


class FolderTrouble:
    """Damages files of a folder while a store reads and writes them, and fills the disk. `disk` is jaxserve.kv_store.disk."""

    def __init__(self, folder: Path, seed: int, disk: Any):
        self.folder, self.random, self.done = folder, random.Random(seed), Counter()
        self._write = disk._write

    def write(self, path: str, data: memoryview) -> None:
        """In place of disk._write."""
        if self.random.random() < 0.05:
            Path(path).write_bytes(data[: len(data) // 2])
            self.done["full disk"] += 1
            raise OSError(errno.ENOSPC, "by chance")
        self._write(path, data)

    def __call__(self) -> None:
        """One more thing goes wrong, perhaps."""
        if self.random.random() > 0.2:
            return
        paths = list(self.folder.glob("*/*.kv"))
        if not paths:
            return
        path, other = self.random.choice(paths), self.random.choice(paths)
        kind = self.random.choice(("bit", "truncated", "empty", "another page", "another version", "gone"))
        try:
            blob = bytearray(path.read_bytes())
            if kind == "bit" and blob:
                blob[self.random.randrange(len(blob))] ^= 1 << self.random.randrange(8)
            new = {
                "bit": bytes(blob),
                "truncated": bytes(blob[: self.random.randrange(len(blob) + 1)]),
                "empty": b"",
                "another page": other.read_bytes(),
                "another version": FORMAT + b"0\n" + bytes(blob[len(MAGIC) :]),
            }
            if kind == "gone":
                path.unlink()
            else:
                path.write_bytes(new[kind])
        except OSError:
            return  # the store has deleted it meanwhile
        self.done[kind] += 1


class TroubledTransfer:
    """A `Transfer` that at random fails, is slow, or brings something else than what lies there. tier: of the engine that reads."""

    def __init__(self, transfer: Any, seed: int):
        self.transfer, self.random, self.done = transfer, random.Random(seed), Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transfer, name)

    def read(self, peer, address, into, seconds):
        what = self.random.random()
        if what < 0.05:
            self.done["transfer fails"] += 1
            raise TransferError("by chance")
        if what > 0.9:
            self.done["slow"] += 1
            time.sleep(SLOW)
        self.transfer.read(peer, address, into, seconds)
        if 0.05 < what < 0.1:
            self.done["bit"] += 1
            into[self.random.randrange(len(into))] ^= 1 << self.random.randrange(8)


class MemoryTrouble:
    """Damages the pages that an engine's nixl tier lends to others, and lets go of all of them."""

    def __init__(self, tier: Any, seed: int):
        self.tier, self.random, self.done = tier, random.Random(seed), Counter()

    def __call__(self) -> None:
        """One more thing goes wrong, perhaps."""
        what, tier = self.random.random(), self.tier
        if what < 0.05 and (slots := sorted(tier._slots.values())):
            self.done["damaged in memory"] += 1
            tier._blobs[self.random.choice(slots), self.random.randrange(tier._blob_bytes)] ^= 1 << self.random.randrange(8)
        if what > 0.995:
            self.done["all overwritten"] += 1
            with tier._lock:
                tier._leases.clear()
                tier._written.clear()
                tier._slots.clear()
                tier._free = list(range(len(tier._blobs)))
            tier._blobs[:] = self.random.randrange(256)
