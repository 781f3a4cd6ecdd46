"""`Transfer` within one process, for tests where NIXL is not installed and for failures that can be had at will."""

import ctypes

import numpy as np

from jaxserve.kv_store.transfer import TransferError


class MemoryTransfer:
    """Reads memory that any other in the process has registered.

    network: {name: what is registered} of all that can reach each other.
    before_read: called before a read, with what it will fill; it may raise TransferError.
    """

    def __init__(self, name: str, network: dict[str, list[np.ndarray]]):
        self.name, self.network = name, network
        self.peers: set[str] = set()
        self.before_read = lambda into: None
        network[name] = []

    def register(self, memory):
        self.network[self.name].append(memory)

    @property
    def metadata(self):
        return self.name.encode()

    def add_peer(self, metadata):
        if metadata.decode() not in self.network:
            raise TransferError("nobody of that name")
        self.peers.add(metadata.decode())
        return metadata.decode()

    def remove_peer(self, name):
        self.peers.discard(name)

    def read(self, peer, address, into, seconds):
        self.before_read(into)
        assert peer in self.peers and any(into.base is x or into is x for x in self.network[self.name])
        for memory in self.network.get(peer, ()):
            if memory.ctypes.data <= address and address + into.nbytes <= memory.ctypes.data + memory.nbytes:
                into[:] = np.frombuffer((ctypes.c_ubyte * into.nbytes).from_address(address), np.uint8)
                return
        raise TransferError("what is not registered")

    def close(self):
        self.network[self.name] = []
