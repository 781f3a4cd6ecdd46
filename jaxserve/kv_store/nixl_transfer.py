"""Memory that other processes read, by NIXL: over RDMA or NVLink where there is such, over TCP and shared memory where not.

Owns all that is said to NIXL (github.com/ai-dynamo/nixl).
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np

from jaxserve.kv_store.transfer import TransferError, looks

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")  # the modules that have NIXL's Python API; each works without a GPU
BACKEND = "UCX"


class NixlTransfer:
    """`Transfer` by an agent of NIXL's.

    Raises:
      ValueError: NIXL is not installed, or has no UCX here.
    """

    def __init__(self, name: str):
        api = _nixl_api()
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=[BACKEND]))
        except Exception as error:  # its own classes, which say nothing of each other
            raise ValueError(f"kv_store: NIXL could not be started with {BACKEND} ({error!r})") from error

    def register(self, memory: np.ndarray) -> None:
        """As `Transfer.register`. ValueError: NIXL refuses it."""
        try:
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], mem_type="DRAM")
        except Exception as error:
            raise ValueError(f"kv_store: NIXL could not register {memory.nbytes} bytes ({error!r}): give the tier less") from error

    @property
    def metadata(self) -> bytes:
        """As `Transfer.metadata`."""
        return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """As `Transfer.add_peer`."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"NIXL can't use its metadata: {error!r}") from error
        return name.decode() if isinstance(name, bytes) else name

    def remove_peer(self, name: str) -> None:
        """As `Transfer.remove_peer`."""
        with contextlib.suppress(Exception):  # it is gone already
            self._agent.remove_remote_agent(name)

    def read(
        self,
        peer: str,
        address: int,
        into: np.ndarray,  # u8[any], registered
        seconds: float,
    ) -> None:
        """As `Transfer.read`."""
        agent, handle, state = self._agent, None, "PROC"
        try:
            theirs = agent.get_xfer_descs([(address, into.nbytes, 0)], "DRAM")
            ours = agent.get_xfer_descs([(into.ctypes.data, into.nbytes, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", ours, theirs, peer)
            state = agent.transfer(handle)
            for _ in looks(seconds):
                if state in ("DONE", "ERR"):
                    break
                state = agent.check_xfer_state(handle)
        except Exception as error:
            raise TransferError(f"NIXL could not read: {error!r}") from error
        finally:
            if handle is not None:
                with contextlib.suppress(Exception):  # a read that can't be cancelled keeps its handle
                    agent.release_xfer_handle(handle)
        if state != "DONE":
            late = f"has not read {into.nbytes} bytes within {seconds:g} s" if state == "PROC" else "could not read"
            raise TransferError(f"NIXL {late}")

    def close(self) -> None:
        """As `Transfer.close`: an agent ends when nothing refers to it."""
        self._agent = None


def _nixl_api() -> Any:
    """NIXL's module of agents. ValueError if it is not installed."""
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise ValueError("kv_store: a nixl tier needs NIXL, which is not installed: pip install 'jaxserve[nixl]'")
