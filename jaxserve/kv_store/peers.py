"""Pages in this process's memory that other engines read from there, and theirs that are read from here.

Owns the pages, their bound, and who may read which for how long. A page lies in memory as its blob (blob.py). Who wants one asks
for a lease of it (leases.py), reads it while the lease lasts (transfer.py), and gives the lease back. A leased page is not
overwritten. Leases end by themselves, so that nobody who is lost holds a page; who reads later than that finds a blob whose
checksum or hash is not the page's.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxserve.kv_store.blob import ALIGNMENT, BlobError, blob_bytes, pack_page, unpack_page
from jaxserve.kv_store.leases import LeaseClient, LeaseServer
from jaxserve.kv_store.mooncake_transfer import MooncakeTransfer
from jaxserve.kv_store.nixl_transfer import NixlTransfer
from jaxserve.kv_store.spec import parse_address
from jaxserve.kv_store.tier import PageLayout, TierStats, empty_pages
from jaxserve.kv_store.transfer import Transfer

logger: logging.Logger = logging.getLogger("jaxserve")

PROTOCOL = 1
LEASE_SECONDS = 10.0
READ_SECONDS = 2.0  # that a page may take
DOWN_SECONDS = 5.0  # that a peer is not asked after it failed
MAX_NEWS = 1 << 16  # hashes in one answer, the newest


_TRANSFERS: dict[str, Callable[[str, str], Transfer]] = {  # of each kind, by a name of this process and its host
    "nixl": lambda name, _: NixlTransfer(name),
    "mooncake": lambda _, host: MooncakeTransfer(host),
}


class PeerTier:
    """As many pages as `max_bytes` hold, which other engines may read, and those of others.

    kind: "nixl" or "mooncake", which moves the bytes.
    addresses: "HOST:PORT" where this process listens, then with a "+" before each those of other engines. Port 0: any.
    transfer: moves the bytes instead.

    Raises:
      ValueError: no page fits, an address can't be had, or NIXL, or Mooncake, is not there.
    """

    def __init__(self, layout: PageLayout, kind: str, addresses: str, max_bytes: int, transfer: Transfer | None = None):
        self.stats: TierStats = TierStats(kind)
        self.is_shared: bool = True
        self._layout, self._blob_bytes = layout, blob_bytes(layout)
        stride = -(-self._blob_bytes // ALIGNMENT) * ALIGNMENT
        num_pages = max_bytes // stride
        if not num_pages:
            raise ValueError(f"kv_store: a {kind} tier of {max_bytes} bytes can't hold a KV page, which takes {stride}")
        self._instance = secrets.token_hex(16)  # another one after a restart
        own, *others = addresses.split("+")
        address = parse_address(own)
        self._transfer = transfer or _TRANSFERS[kind](f"jaxserve-{self._instance}", address[0])
        memory = empty_pages(kind, max_bytes, (num_pages, stride), np.uint8)
        self._blobs = memory[:, : self._blob_bytes]
        self._arrived = np.empty(self._blob_bytes, np.uint8)  # of a page of another engine
        self._transfer.register(memory)
        self._transfer.register(self._arrived)
        self._metadata = base64.b64encode(self._transfer.metadata).decode()
        self._lock = threading.Lock()  # over what is below, which threads of the server read and write
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(num_pages))[::-1]
        self._leases: dict[int, tuple[int, float]] = {}  # (slot, until this time.monotonic)
        self._numbers = itertools.count()
        self._written: dict[bytes, int] = {}  # a number for each page that is here, in the order in which they were written
        self._num_written = 0
        try:
            self._server = LeaseServer(address, self._answer)
        except OSError as error:
            raise ValueError(f"kv_store: a {kind} tier can't listen at {own}: {error}") from None
        self.port: int = self._server.port
        self._peers = [Peer(other, layout, self._instance, self._transfer) for other in others]

    # -- the engine's own pages

    def contains(self, hash_: bytes) -> bool:
        """As `Tier.contains`."""
        return hash_ in self._slots or any(hash_ in peer.known for peer in self._peers)

    def read(
        self,
        hash_: bytes,
        out: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """As `Tier.read`; of other engines those are asked first that have said that they have the page."""
        slot = self._slots.get(hash_)  # pages are overwritten on this thread alone
        if slot is not None:
            return self._read_own(hash_, slot, out)
        peers = [peer for peer in self._peers if peer.is_up()]
        return any(self._borrow(peer, hash_, out) for peer in sorted(peers, key=lambda peer: hash_ not in peer.known))

    def _read_own(
        self,
        hash_: bytes,
        slot: int,
        out: np.ndarray,  # PageLayout.shape
    ) -> bool:
        try:
            unpack_page(self._layout, hash_, self._blobs[slot].data, out)
        except BlobError as error:
            logger.error("kv_store: a page in this process's memory is damaged: %s; its tokens are computed", error)
            self.stats.num_failures += 1
            self.forget(hash_)
            return False
        return True

    def write(
        self,
        hash_: bytes,
        page: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """As `Tier.write`; evicts a page where there is no room."""
        with self._lock:
            if hash_ in self._slots:
                self._slots.move_to_end(hash_)
                return True
            slot = self._take_slot()
        if slot is None:
            self.stats.num_failures += 1
            return False  # all are leased
        pack_page(self._layout, hash_, page, self._blobs[slot])
        with self._lock:
            self._slots[hash_] = slot  # only now: it is whole
            self._num_written += 1
            self._written[hash_] = self._num_written
            self._count()
        self.stats.add_written(page.nbytes)
        return True

    def _take_slot(self) -> int | None:
        """A slot that nobody may read; None: there is none. Under the lock."""
        now = time.monotonic()
        self._leases = {number: lease for number, lease in self._leases.items() if lease[1] > now}
        leased = {slot for slot, _ in self._leases.values()}
        for i in range(len(self._free) - 1, -1, -1):
            if self._free[i] not in leased:
                return self._free.pop(i)
        for hash_, slot in self._slots.items():
            if slot not in leased:
                del self._slots[hash_], self._written[hash_]
                return slot
        return None

    def forget(self, hash_: bytes) -> None:
        """As `Tier.forget`. Other engines are not told: they make the same page wrong, or none."""
        with self._lock:
            slot = self._slots.pop(hash_, None)
            if slot is not None:
                del self._written[hash_]
                self._free.append(slot)
                self._count()
        for peer in self._peers:
            peer.known.pop(hash_, None)

    def _count(self) -> None:
        self.stats.bytes_held = len(self._slots) * self._blob_bytes

    def touch(self, hash_: bytes) -> None:
        """As `Tier.touch`."""
        with self._lock:
            if hash_ in self._slots:
                self._slots.move_to_end(hash_)

    def refresh(self) -> None:
        """As `Tier.refresh`: other engines say what they have written since they were last asked."""
        for peer in self._peers:
            if peer.is_up():
                with self._blame(peer):
                    peer.hear_news()

    def close(self) -> None:
        """As `Tier.close`: other engines read nothing here any more."""
        self._server.close()
        for peer in self._peers:
            peer.hang_up()
        self._transfer.close()

    # -- what other engines ask, on threads of the server

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        what = message["ask"]
        if what == "hello":
            return {
                "protocol": PROTOCOL,
                "layout": self._layout.name,
                "instance": self._instance,
                "num_pages": len(self._blobs),
                "metadata": self._metadata,
            }
        if what == "lease":
            return self._lease(bytes.fromhex(message["hash"]))
        if what == "release":
            with self._lock:
                self._leases.pop(message["lease"], None)
            return {}
        if what == "news":
            since = int(message["since"])
            with self._lock:
                newest = itertools.takewhile(lambda entry: entry[1] > since, reversed(self._written.items()))
                hashes = [hash_.hex() for hash_, _ in itertools.islice(newest, MAX_NEWS)]
                return {"last": self._num_written, "hashes": hashes[::-1]}
        raise ValueError(f"asked for {what!r}")

    def _lease(self, hash_: bytes) -> dict[str, Any]:
        """A lease of a page, {} if it is not here."""
        with self._lock:
            slot = self._slots.get(hash_)
            if slot is None:
                return {}
            number = next(self._numbers)
            self._leases[number] = slot, time.monotonic() + LEASE_SECONDS
        return {"lease": number, "address": self._blobs[slot].ctypes.data}

    # -- pages of other engines

    def _borrow(
        self,
        peer: Peer,
        hash_: bytes,
        out: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """Whether a page of another engine has come."""
        with self._blame(peer):
            if peer.read(hash_, self._arrived):
                # As a copy: a read that was given up earlier may still write into what has arrived.
                unpack_page(self._layout, hash_, self._arrived.tobytes(), out)
                return True
            peer.known.pop(hash_, None)
        return False

    @contextlib.contextmanager
    def _blame(self, peer: Peer) -> Iterator[None]:
        """What fails inside is a page that is not there. A peer that fails is not asked for a while; a page that can't be used may
        have been overwritten, and is no fault of the peer."""
        try:
            yield
            peer.has_warned = False
        except BlobError as error:
            self._fail(peer, f"a page of {peer.address} is not used: {error}; its tokens are computed")
        except (OSError, ValueError, KeyError, TypeError) as error:
            peer.hang_up()
            self._fail(peer, f"{peer.address} gives no pages ({error!r}): their tokens are computed meanwhile")

    def _fail(self, peer: Peer, message: str) -> None:
        self.stats.num_failures += 1
        if not peer.has_warned:
            peer.has_warned = True
            logger.warning("kv_store: %s (further failures are counted, not logged)", message)


class Peer:
    """Another engine, as far as its pages go. One thread uses it; any may look into `known`.

    known: the pages that it has said it has, as keys, the oldest first.
    """

    def __init__(self, address: str, layout: PageLayout, instance: str, transfer: Transfer):
        """layout, instance: of the engine that asks."""
        self.address = address
        self.known: dict[bytes, None] = {}
        self.has_warned: bool = False
        self._place, self._layout, self._own, self._transfer = parse_address(address), layout, instance, transfer
        self._client: LeaseClient | None = None
        self._name, self._instance, self._last_news, self._num_pages = "", "", 0, 0
        self._down_until = 0.0

    def is_up(self) -> bool:
        """Whether it may be asked now: it did not fail just before."""
        return time.monotonic() >= self._down_until

    def read(
        self,
        hash_: bytes,
        into: np.ndarray,  # u8[blob_bytes(layout)], registered
    ) -> bool:
        """Whether it has the page, which `into` then holds as a blob that nobody has looked at. Errors as `_ask`'s and
        `Transfer.read`'s. A lease that is not given back, because something failed, ends by itself."""
        lease = self._ask({"ask": "lease", "hash": hash_.hex()})
        if not lease:
            return False
        self._transfer.read(self._name, int(lease["address"]), into, READ_SECONDS)
        self._ask({"ask": "release", "lease": lease["lease"]})
        return True

    def hear_news(self) -> None:
        """Asks which pages it has written. Errors as `_ask`'s."""
        answer = self._ask({"ask": "news", "since": self._last_news})
        for name in answer["hashes"]:
            hash_ = bytes.fromhex(name)
            self.known.pop(hash_, None)
            self.known[hash_] = None
        while len(self.known) > self._num_pages:  # it has overwritten the oldest
            del self.known[next(iter(self.known))]
        self._last_news = int(answer["last"])

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its answer. OSError, ValueError, KeyError, TypeError: it gives none that is of use."""
        if self._client is None:
            client = LeaseClient(self._place)
            try:
                self._meet(client.ask({"ask": "hello"}))
            except BaseException:
                client.close()
                raise
            self._client = client
        return self._client.ask(message)

    def _meet(self, hello: dict[str, Any]) -> None:
        if hello["protocol"] != PROTOCOL:
            raise ValueError(f"it speaks version {hello['protocol']} of the protocol, not {PROTOCOL}")
        if hello["layout"] != self._layout.name:
            raise ValueError(f"its pages have the layout {hello['layout']}, not {self._layout.name}")
        if hello["instance"] == self._own:
            raise ValueError("it is this engine itself: leave it out of the other engines' addresses")
        if hello["instance"] != self._instance:
            self.known, self._last_news = {}, 0  # it has begun anew
        self._instance, self._num_pages = hello["instance"], int(hello["num_pages"])
        self._name = self._transfer.add_peer(base64.b64decode(hello["metadata"]))

    def hang_up(self) -> None:
        """It is not asked for DOWN_SECONDS, and then anew."""
        self._down_until = time.monotonic() + DOWN_SECONDS
        self.known = {}
        self._last_news = 0
        if self._client is not None:
            self._client.close()
            self._transfer.remove_peer(self._name)
            self._client = None
