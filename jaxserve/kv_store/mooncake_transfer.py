"""Memory that other processes read, by Mooncake's transfer engine: over RDMA where there is such, over TCP where not.

Owns all that is said to Mooncake (github.com/kvcache-ai/Mooncake; Qin et al., FAST 2025). Processes find each other by addresses
that they tell one another (P2PHANDSHAKE): there is no server of metadata.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from jaxserve.kv_store.spec import parse_address
from jaxserve.kv_store.transfer import TransferError, looks

_DONE, _PENDING = 1, 0  # of transfer_check_status; all else is a failure


class MooncakeTransfer:
    """`Transfer` by an engine of Mooncake's, which others reach at `host`, at a port that it chooses.

    Raises:
      ValueError: Mooncake is not installed, or does not start.
    """

    def __init__(self, host: str):
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # or it logs every connection
        try:
            api = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise ValueError(
                f"kv_store: a mooncake tier needs Mooncake's transfer engine ({error}): pip install 'jaxserve[mooncake]'; "
                "it takes the system's libibverbs too"
            ) from None
        self._engine: Any = api.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise ValueError(f"kv_store: Mooncake's transfer engine does not start at {host}; what it said stands above")
        self._host = host

    def register(self, memory: np.ndarray) -> None:
        """As `Transfer.register`. ValueError: Mooncake refuses it."""
        if self._engine.register_memory(memory.ctypes.data, memory.nbytes):
            raise ValueError(f"kv_store: Mooncake could not register {memory.nbytes} bytes: give the tier less")

    @property
    def metadata(self) -> bytes:
        """As `Transfer.metadata`: its address."""
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def add_peer(self, metadata: bytes) -> str:
        """As `Transfer.add_peer`. It is reached when it is first read."""
        try:
            name = metadata.decode()
            parse_address(name)
        except ValueError as error:
            raise TransferError(f"no address of Mooncake's: {metadata!r}") from error
        return name

    def remove_peer(self, name: str) -> None:
        """As `Transfer.remove_peer`. Mooncake keeps what it knows of it; one that begins anew has another address."""

    def read(
        self,
        peer: str,
        address: int,
        into: np.ndarray,  # u8[any], registered
        seconds: float,
    ) -> None:
        """As `Transfer.read`."""
        batch = self._engine.batch_transfer_async_read(peer, [into.ctypes.data], [address], [into.nbytes])
        if not batch or batch == 2**64 - 1:
            raise TransferError(f"Mooncake could not begin to read from {peer}")
        for _ in looks(seconds):
            status = self._engine.transfer_check_status(batch)
            if status == _DONE:
                return
            if status != _PENDING:
                raise TransferError(f"Mooncake could not read from {peer} (status {status})")
        raise TransferError(f"Mooncake has not read {into.nbytes} bytes within {seconds:g} s")

    def close(self) -> None:
        """As `Transfer.close`: an engine ends when nothing refers to it."""
        self._engine = None
