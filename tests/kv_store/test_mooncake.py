"""What is said to Mooncake, and what is made of its answers, without it: a module that stands in its place."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jaxserve.kv_store.mooncake_transfer import MooncakeTransfer
from jaxserve.kv_store.peers import PeerTier
from jaxserve.kv_store.transfer import TransferError
from tests.kv_store.pages import LAYOUT, empty, hash_of, page_of

DONE, PENDING, FAILED = 1, 0, -1


class TransferEngine:
    """Mooncake's, within one process. statuses: what looks at a read find, the last one for ever; the memory is copied at DONE.
    handle: of the next read. refuses: which of the calls that say whether they failed do."""

    def __init__(self):
        self.statuses, self.handle, self.refuses = [DONE], 7, ""
        self.said, self.registered, self.num_looks = (), [], 0
        made.append(self)

    def initialize(self, *said):
        self.said = said
        return -1 if self.refuses == "initialize" or "taken" in said[0] else 0

    def get_rpc_port(self):
        return 15000 + made.index(self)

    def register_memory(self, address, num_bytes):
        self.registered.append((address, num_bytes))
        return -1 if self.refuses == "register" else 0

    def batch_transfer_async_read(self, peer, ours, theirs, sizes):
        self.read = peer, *ours, *theirs, *sizes
        assert any(address <= ours[0] and ours[0] + sizes[0] <= address + n for address, n in self.registered)
        return self.handle

    def transfer_check_status(self, handle):
        assert handle == self.handle
        status = self.statuses[min(self.num_looks, len(self.statuses) - 1)]
        self.num_looks += 1
        if status == DONE:
            _, ours, theirs, size = self.read
            ctypes.memmove(ours, theirs, size)
        return status


made: list[TransferEngine] = []


@pytest.fixture(autouse=True)
def mooncake(monkeypatch):
    made.clear()
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=TransferEngine))


@pytest.fixture
def memories():
    """(theirs, full; ours, empty)."""
    return np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)


def test_it_begins_registers_and_says_where_it_is(memories):
    transfer = MooncakeTransfer("10.0.0.1")
    transfer.register(memories[0])
    (engine,) = made
    assert engine.said == ("10.0.0.1", "P2PHANDSHAKE", "tcp", "")
    assert engine.registered == [(memories[0].ctypes.data, 256)] and transfer.metadata == b"10.0.0.1:15000"


def test_what_does_not_begin_or_register_is_named(memories):
    with pytest.raises(ValueError, match="does not start at taken"):
        MooncakeTransfer("taken")
    transfer = MooncakeTransfer("10.0.0.1")
    made[-1].refuses = "register"
    with pytest.raises(ValueError, match="could not register 256 bytes: give the tier less"):
        transfer.register(memories[0])


def test_a_peer_is_its_address_and_what_is_none_is_named():
    transfer = MooncakeTransfer("10.0.0.1")
    assert transfer.add_peer(b"10.0.0.2:15000") == "10.0.0.2:15000"
    for metadata in (b"", b"10.0.0.2", b"10.0.0.2:x", b"\xff:1"):
        with pytest.raises(TransferError, match="no address of Mooncake's"):
            transfer.add_peer(metadata)
    transfer.remove_peer("10.0.0.2:15000")


@pytest.mark.parametrize("statuses", [[DONE], [PENDING, PENDING, PENDING, DONE]], ids=["at once", "after a while"])
def test_a_read_that_is_done(memories, statuses):
    theirs, ours = memories
    transfer = MooncakeTransfer("10.0.0.1")
    transfer.register(ours)
    (engine,) = made
    engine.statuses = statuses
    transfer.read("10.0.0.2:15000", theirs.ctypes.data + 16, ours[:32], 10.0)
    assert engine.read == ("10.0.0.2:15000", ours.ctypes.data, theirs.ctypes.data + 16, 32) and engine.num_looks == len(statuses)
    np.testing.assert_array_equal(ours[:32], theirs[16:48])
    assert not ours[32:].any()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"statuses": [PENDING, FAILED]}, r"could not read from b:1 \(status -1\)"),
        ({"statuses": [5]}, r"could not read from b:1 \(status 5\)"),
        ({"handle": 0}, "could not begin to read from b:1"),
        ({"handle": 2**64 - 1}, "could not begin to read from b:1"),
        ({"statuses": [PENDING]}, "has not read 256 bytes within 0.02 s"),
    ],
    ids=["fails", "means nothing", "no handle", "the last handle", "hangs"],
)
def test_a_read_that_fails_is_named(memories, change, why):
    theirs, ours = memories
    transfer = MooncakeTransfer("10.0.0.1")
    transfer.register(ours)
    vars(made[0]).update(change)
    with pytest.raises(TransferError, match=why):
        transfer.read("b:1", theirs.ctypes.data, ours, 0.02)
    assert not ours.any()


def test_tiers_read_one_anothers_pages_by_it(caplog):
    """And a read that fails is a page that is not there."""
    one = PeerTier(LAYOUT, "mooncake", "127.0.0.1:0", 1 << 20)
    other = PeerTier(LAYOUT, "mooncake", f"127.0.0.1:0+127.0.0.1:{one.port}", 1 << 20)
    try:
        out = empty()
        assert one.write(hash_of(0), page_of(0)) and other.read(hash_of(0), out)
        np.testing.assert_array_equal(out, page_of(0))
        assert made[1].read[0] == "127.0.0.1:15000" and not one._leases
        made[1].handle = 0
        assert not other.read(hash_of(0), out) and "gives no pages" in caplog.text
    finally:
        other.close()
        one.close()
