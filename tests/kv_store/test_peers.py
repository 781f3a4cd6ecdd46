"""Tiers of memory that others read: pages come bit for bit or not at all, whatever fails; leases hold as long as they should."""

import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxserve.kv_store import peers
from jaxserve.kv_store.blob import blob_bytes
from jaxserve.kv_store.leases import MAX_MESSAGE_BYTES, LeaseClient
from jaxserve.kv_store.nixl_transfer import PACKAGES
from jaxserve.kv_store.peers import PeerTier
from jaxserve.kv_store.spec import parse_kv_store
from jaxserve.kv_store.store import TieredStore, make_store
from jaxserve.kv_store.tier import PageLayout
from jaxserve.kv_store.transfer import TransferError
from tests.kv_store.memory_transfer import MemoryTransfer
from tests.kv_store.pages import LAYOUT, empty, hash_of, page_of
from tests.kv_store.transfers import MAKE, skip_unless_installed

STRIDE = -(-blob_bytes(LAYOUT) // 64) * 64


@pytest.fixture
def engines(monkeypatch):
    """Makes tiers that can reach each other, and closes them."""
    monkeypatch.setattr(peers, "DOWN_SECONDS", 0.0)
    network, made = {}, []

    def make(*peers, num_pages=100, layout=LAYOUT, port=0):
        addresses = "+".join([f"127.0.0.1:{port}", *(f"127.0.0.1:{p if isinstance(p, int) else p.port}" for p in peers)])
        transfer = MemoryTransfer(f"engine-{len(made)}", network)
        tier = PeerTier(layout, "nixl", addresses, num_pages * STRIDE, transfer)
        made.append(tier)
        return tier

    yield make
    for tier in made:
        tier.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def is_hung_up(connection):
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:  # there was more to read
        return True


def read(tier, number):
    """The page, None if it is not to be had."""
    out = empty()
    return out if tier.read(hash_of(number), out) else None


def assert_reads(tier, *numbers):
    for number in numbers:
        np.testing.assert_array_equal(read(tier, number), page_of(number))


def test_pages_of_another_engine_come_bit_for_bit(engines):
    one = engines()
    other = engines(one)
    for i in range(5):
        assert one.write(hash_of(i), page_of(i))
    assert_reads(one, *range(5))
    assert_reads(other, *range(5))  # as it was told of them: it has not looked
    assert not other.contains(hash_of(0)) and read(other, 7) is None
    other.refresh()
    assert other.contains(hash_of(0)) and not other.contains(hash_of(7))
    assert other.stats.num_failures == 0 and not one._leases


def test_a_tier_evicts_what_was_used_least_recently_and_says_no_more_of_it(engines):
    one = engines(num_pages=3)
    other = engines(one)
    for i in range(3):
        one.write(hash_of(i), page_of(i))
    one.touch(hash_of(0))
    one.write(hash_of(3), page_of(3))
    one.forget(hash_of(2))
    other.refresh()
    assert [one.contains(hash_of(i)) for i in range(4)] == [True, False, False, True]
    assert [other.contains(hash_of(i)) for i in range(4)] == [True, False, False, True]
    assert one.stats.bytes_held == 2 * blob_bytes(LAYOUT)
    one.write(hash_of(4), page_of(4))
    one.write(hash_of(5), page_of(5))
    assert not one.contains(hash_of(0)) and other.contains(hash_of(0)), "which it has not heard"
    assert read(other, 0) is None and not other.contains(hash_of(0))
    assert_reads(other, 3, 4, 5)


def test_a_leased_page_is_not_overwritten_until_its_lease_ends(engines, monkeypatch):
    one = engines(num_pages=2)
    client = LeaseClient(("127.0.0.1", one.port))
    for i in range(2):
        one.write(hash_of(i), page_of(i))
    leases = [client.ask({"ask": "lease", "hash": hash_of(i).hex()}) for i in range(2)]
    one.forget(hash_of(0))  # its slot is free, and somebody reads it
    assert not one.write(hash_of(2), page_of(2)) and one.contains(hash_of(1)) and one.stats.num_failures == 1
    assert client.ask({"ask": "release", "lease": leases[1]["lease"]}) == {}
    assert one.write(hash_of(2), page_of(2)) and not one.contains(hash_of(1))
    assert not one.write(hash_of(3), page_of(3)) or not one.contains(hash_of(2))
    monkeypatch.setattr(peers.time, "monotonic", lambda now=time.monotonic: now() + peers.LEASE_SECONDS + 1)
    assert one.write(hash_of(4), page_of(4)) and one.write(hash_of(5), page_of(5)), "whoever was lost holds nothing"
    client.close()


def test_a_page_that_is_overwritten_while_it_is_read_is_not_used(engines, caplog):
    one = engines(num_pages=1)
    other = engines(one)
    one.write(hash_of(0), page_of(0))
    other.refresh()

    def overwrite(_into):
        one._leases.clear()  # they have ended
        assert one.write(hash_of(1), page_of(1))

    other._transfer.before_read = overwrite
    assert read(other, 0) is None and "is not used: another page" in caplog.text
    other._transfer.before_read = lambda into: None
    assert_reads(other, 1)  # the engine itself was not at fault


@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_damaged_page_is_not_used(engines, caplog, at):
    one = engines()
    other = engines(one)
    for i in range(2):
        one.write(hash_of(i), page_of(i))
    one._blobs[one._slots[hash_of(0)], at] ^= 1
    assert read(other, 0) is None and other.stats.num_failures == 1 and "is not used" in caplog.text
    assert_reads(other, 1)


def test_a_read_that_was_given_up_writes_over_no_other_page(engines):
    """It fills the memory of what arrives while the next page is looked at."""
    one = engines()
    other = engines(one)
    for i in range(2):
        one.write(hash_of(i), page_of(i))
    unpack, late = peers.unpack_page, np.array(one._blobs[one._slots[hash_of(0)]])

    def write_late(layout, hash_, blob, out):
        other._arrived[:] = late
        unpack(layout, hash_, blob, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "unpack_page", write_late)
        assert_reads(other, 1)


def test_an_engine_that_is_lost_is_said_once_and_found_again(engines, caplog, monkeypatch):
    port = free_port()
    one = engines(port=port)
    other = engines(one)
    one.write(hash_of(0), page_of(0))
    other.refresh()
    one.close()
    del other._transfer.network[one._transfer.name]
    with caplog.at_level(logging.WARNING):
        assert read(other, 0) is None and read(other, 0) is None
    assert caplog.text.count(f"127.0.0.1:{port} gives no pages") == 1 and other.stats.num_failures == 2
    assert not other.contains(hash_of(0)), "what it had is gone"
    again = engines(port=port)
    again.write(hash_of(1), page_of(1))
    other.refresh()
    assert other.contains(hash_of(1)) and not other.contains(hash_of(0))
    assert_reads(other, 1)


def test_an_engine_that_failed_is_left_alone_for_a_while(engines, monkeypatch):
    one = engines()
    other = engines(one)
    one.write(hash_of(0), page_of(0))
    tries = []

    def fail(_into):
        tries.append(1)
        raise TransferError("by will")

    other._transfer.before_read = fail
    monkeypatch.setattr(peers, "DOWN_SECONDS", 60.0)
    assert read(other, 0) is None and read(other, 0) is None and len(tries) == 1
    assert one.contains(hash_of(0)) and len(one._leases) == 1, "a lease that ends by itself"


@pytest.mark.parametrize("answer", [{}, {"lease": 1}, {"lease": 1, "address": "x"}, {"lease": 1, "address": 8}], ids=str)
def test_answers_that_mean_nothing_are_a_page_that_is_not_there(engines, answer):
    one = engines()
    other = engines(one)
    one.write(hash_of(0), page_of(0))
    one._lease = lambda hash_: answer
    assert read(other, 0) is None


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\0\0\0\4null",
        b"\0\0\0\2{}",
        b'\0\0\0\x0e{"ask":"tape"}',
        b"\0\0\0\7{",
        b"\0\0\0\3{{{",
    ],
)
def test_who_says_what_is_no_message_is_hung_up_on(engines, data):
    one = engines()
    with socket.create_connection(("127.0.0.1", one.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert is_hung_up(connection)
    other = engines(one)
    one.write(hash_of(0), page_of(0))
    assert_reads(other, 0)


def test_a_message_that_is_too_long_is_not_waited_for(engines):
    one = engines()
    with socket.create_connection(("127.0.0.1", one.port), timeout=10) as connection:
        connection.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4))
        assert is_hung_up(connection)


def test_engines_of_another_layout_or_the_engine_itself_are_named(engines, caplog):
    theirs = engines(layout=PageLayout(2, 3, 8, 4, np.dtype("float32")))
    assert read(engines(theirs), 0) is None
    assert "its pages have the layout L2 K3 P8 H4 float32, not L2 K3 P4 H8 float32" in caplog.text
    port = free_port()
    assert read(engines(port, port=port), 0) is None and "it is this engine itself" in caplog.text


def test_what_can_not_be_had_is_named(engines):
    with pytest.raises(ValueError, match=f"a nixl tier of 100 bytes can't hold a KV page, which takes {STRIDE}"):
        PeerTier(LAYOUT, "nixl", "127.0.0.1:0", 100, MemoryTransfer("a", {}))
    taken = engines()
    with pytest.raises(ValueError, match=f"a nixl tier can't listen at 127.0.0.1:{taken.port}"):
        engines(port=taken.port)
    with pytest.raises(ValueError, match="bytes of memory that this process may use: give less"):
        PeerTier(LAYOUT, "nixl", "127.0.0.1:0", 1 << 60, MemoryTransfer("a", {}))


def test_where_nixl_is_not_installed_it_is_said_how_to(monkeypatch):
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxserve\[nixl\]'"):
        make_store(parse_kv_store("nixl:127.0.0.1:0:1MiB"), LAYOUT)


def test_where_mooncake_is_not_installed_it_is_said_how_to(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxserve\[mooncake\]'"):
        make_store(parse_kv_store("mooncake:127.0.0.1:0:1MiB"), LAYOUT)


def test_closed_tiers_leave_no_thread_and_no_memory_registered(engines):
    one = engines()
    other = engines(one)
    assert read(other, 0) is None
    network = one._transfer.network
    assert all(network.values())
    other.close()
    one.close()
    assert not any(network.values())
    deadline = time.monotonic() + 30
    while any(thread.name.startswith("jaxserve-kv-lease") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_pages_are_right_or_not_there(engines, seed, monkeypatch):
    """Three engines that write, read, lose leases, damage pages, break off reads and restart, by chance."""
    rng = random.Random(seed)
    ports = [free_port() for _ in range(3)]
    tiers = [engines(*(p for p in ports if p != port), num_pages=5, port=port) for port in ports]

    def trouble(into):
        what = rng.random()
        if what < 0.1:
            raise TransferError("by chance")
        if what < 0.2:
            for tier in tiers:
                tier._leases.clear()
                tier.write(hash_of(rng.randrange(9)), page_of(rng.randrange(9, 12)))  # evicts; its numbers are no page's of ours
        if what < 0.3:
            tier = rng.choice(tiers)
            for slot in range(5):
                if rng.random() < 0.3 and slot in tier._slots.values():
                    tier._blobs[slot, rng.randrange(tier._blob_bytes)] ^= 1 << rng.randrange(8)

    num_read = num_missed = 0
    for _ in range(600):
        i = rng.randrange(3)
        tier, number, what = tiers[i], rng.randrange(20, 32), rng.random()
        tier._transfer.before_read = trouble
        if what < 0.4:
            tier.write(hash_of(number), page_of(number))
        elif what < 0.9:
            found = read(tier, number)
            if found is None:
                num_missed += 1
            else:
                num_read += 1
                np.testing.assert_array_equal(found, page_of(number))
        elif what < 0.97:
            tier.refresh()
        else:
            tier.close()
            del tier._transfer.network[tier._transfer.name]
            tiers[i] = engines(*(p for p in ports if p != ports[i]), num_pages=5, port=ports[i])
    assert num_read > 20 and num_missed > 20
    for tier in tiers:
        slots = [*tier._slots.values(), *tier._free]
        assert sorted(slots) == list(range(5)), "no slot lost, none twice"


PRODUCER = """
import sys
from jaxserve.kv_store.peers import PeerTier
from tests.kv_store.pages import LAYOUT, hash_of, page_of
tier = PeerTier(LAYOUT, sys.argv[1], "127.0.0.1:0", 1 << 20)
for i in range(20):
    assert tier.write(hash_of(i), page_of(i))
print("port", tier.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKE)
def test_pages_of_another_process(caplog, kind):
    """Read, then the process is killed; what it had is not there any more, and this one goes on."""
    skip_unless_installed(kind)
    env = {**os.environ, "UCX_TLS": "tcp,self,cma,sysv,posix", "UCX_NET_DEVICES": "lo"}
    root = Path(__file__).parents[2]
    producer = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, kind], cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert producer.stdout is not None
        port = next(int(line.split()[1]) for line in producer.stdout if line.startswith("port"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UCX_TLS", env["UCX_TLS"])
            patch.setenv("UCX_NET_DEVICES", "lo")
            tier = PeerTier(LAYOUT, kind, f"127.0.0.1:0+127.0.0.1:{port}", 1 << 20)
        store = TieredStore([tier])
        tier.refresh()
        hashes = [hash_of(i) for i in range(20)]
        assert store.lookup(hashes) == 20
        pages = empty(20)
        store.load(hashes, pages)
        assert store.poll(60.0)[0][1]
        for i in range(20):
            np.testing.assert_array_equal(pages[i], page_of(i))
        producer.kill()
        producer.wait()
        assert not tier.read(hash_of(3), empty()) and not store.lookup(hashes)
        assert "gives no pages" in caplog.text
        store.close()
    finally:
        producer.kill()
        producer.communicate()
