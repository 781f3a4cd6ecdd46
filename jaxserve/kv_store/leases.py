"""Who lends pages to other processes, and who borrows them: messages over TCP, beside the transfer of the pages themselves.

Owns the messages, the server that answers them, and a connection to one such server. A message is four bytes, the length of what
follows, and JSON. The pages do not pass here. Nobody is asked who they are: the port is for a network that only engines reach.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

MAX_MESSAGE_BYTES = 1 << 24
CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 2.0
_LENGTH = struct.Struct(">I")


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message, None at the end. ValueError, OSError: what came is none."""
    start = _receive_bytes(connection, _LENGTH.size)
    if not start:
        return None
    (length,) = _LENGTH.unpack(start)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(_receive_bytes(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def _receive_bytes(connection: socket.socket, count: int) -> bytes:
    """So many bytes; none at all at the end of the connection. OSError if it ends between."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            if data:
                raise ConnectionError("the connection ended within a message")
            return b""
        data += part
    return bytes(data)


class LeaseServer:
    """Answers messages at an address, on a thread for each connection. OSError if it can't listen there.

    answer: called on these threads, with the message. Whoever sends one that it raises a ValueError, KeyError or TypeError for is
      hung up on.
    """

    def __init__(self, address: tuple[str, int], answer: Callable[[dict[str, Any]], dict[str, Any]]):
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._answer = answer
        self._listener = socket.create_server(address, family=family)
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="jaxserve-kv-leases", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="jaxserve-kv-lease", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # who sends such, or goes away, is not served
            while (message := _receive(connection)) is not None:
                _send(connection, self._answer(message))
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def close(self) -> None:
        """Hangs up on everybody."""
        with self._lock:
            self._is_closed = True
            for connection in self._connections:
                _shut(connection)
        _shut(self._listener)
        self._thread.join(ANSWER_SECONDS)
        self._listener.close()


def _shut(connection: socket.socket) -> None:
    """Whoever waits for it, on any thread, is woken."""
    with contextlib.suppress(OSError):  # it is no longer connected
        connection.shutdown(socket.SHUT_RDWR)


class LeaseClient:
    """A connection to a `LeaseServer`. OSError if nobody listens there. One thread uses it."""

    def __init__(self, address: tuple[str, int]):
        self._connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
        self._connection.settimeout(ANSWER_SECONDS)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer. OSError (TimeoutError too), ValueError: there is none; the connection is of no use any more."""
        _send(self._connection, message)
        answer = _receive(self._connection)
        if answer is None:
            raise ConnectionError("the connection was ended")
        return answer

    def close(self) -> None:
        """Hangs up."""
        self._connection.close()
