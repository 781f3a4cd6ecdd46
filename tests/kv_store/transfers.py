"""Which of the packages that move bytes between processes are here."""

from collections.abc import Callable

import pytest

from jaxserve.kv_store import peers
from jaxserve.kv_store.transfer import Transfer

MAKE: dict[str, Callable[[str], Transfer]] = {"nixl": peers.NixlTransfer, "mooncake": peers.MooncakeTransfer}


def skip_unless_installed(kind: str) -> None:
    """Makes one and drops it: a package may be installed and lack a library of the system's. Skips with what it says."""
    try:
        MAKE[kind]("127.0.0.1")
    except ValueError as error:
        pytest.skip(str(error))
