"""Sockets that several processes of a server listen on: bound before a model is loaded, one for each address of a host.

Owns how they are made, as uvicorn and asyncio make theirs, and what is said of them. Knows no flags.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from typing import Any

BACKLOG = 4096  # connections that wait to be accepted


@contextlib.contextmanager
def bound(host: str, port: int, uds: str | None) -> Iterator[list[socket.socket]]:
    """Sockets on which `listen` may be called; until then clients are refused. OSError where there can be none.

    host, port: one for each address of the host, on one port; port 0 is any free one. uds: a path in place of both."""
    with contextlib.ExitStack() as stack:
        if not uds:
            yield [stack.enter_context(made) for made in _bound_to_port(host, port)]
            return
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(uds).st_mode):  # of a server that was killed
                os.unlink(uds)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        _bind(listener, uds)
        try:
            os.chmod(uds, 0o666)  # as uvicorn does
            yield [listener]
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(uds)


def _bound_to_port(host: str, port: int) -> list[socket.socket]:
    """As asyncio does it, but with one port for all addresses."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made, missing = list[socket.socket](), None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listener = socket.socket(family, kind, protocol)
            except OSError as error:  # no such family here
                missing = error
                continue
            made.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                _bind(listener, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                missing = error
                made.pop().close()
            else:
                port = listener.getsockname()[1]
        if not made and missing is not None:
            raise missing
    except BaseException:
        for listener in made:
            listener.close()
        raise
    return made


def _bind(listener: socket.socket, address: Any) -> None:
    try:
        listener.bind(address)
    except OSError as error:
        raise OSError(error.errno, f"can't listen on {_shown(address)}: {error.strerror}") from error


def listen(listeners: Sequence[socket.socket]) -> None:
    """Begins to listen on sockets of `bound`. OSError where another process was first."""
    for listener in listeners:
        address = listener.getsockname()
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            raise OSError(error.errno, f"can't listen on {_shown(address)}: {error.strerror}") from error


def say_where(listeners: Sequence[socket.socket], scheme: str = "http") -> None:
    """Logs their addresses, as uvicorn does for a socket of its own."""
    for listener in listeners:
        address = listener.getsockname()
        where = f"unix socket {address}" if listener.family == socket.AF_UNIX else f"{scheme}://{_shown(address)}"
        logging.getLogger("jaxserve").info("Uvicorn running on %s (Press CTRL+C to quit)", where)


def _shown(address: Any) -> str:
    """A socket's address, as in a URL."""
    if isinstance(address, str):
        return address
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
