"""A server that does what a test tells it, byte by byte: it answers, breaks off, falls silent, is ill."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

BREAK = b"break"  # in a script: the connection is cut here


@dataclass
class Scripted:
    """script: what is sent for each request but the checks. A number is a pause in seconds; an event is waited for, and the
    connection cut if it does not come. requests: what came, head and body."""

    url: str = ""
    script: list[bytes | float | threading.Event] = field(default_factory=list)
    healthy: bool = True
    role: str = ""  # that /health says
    weight_version: str = ""  # likewise
    on_request: Callable[[], object] = lambda: None  # called for each request but the checks
    waiting: float = 0
    running: int = 0
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    num_checks: int = 0
    num_hung_up: int = 0  # clients that left before the script's end

    def answer(self, body: dict, status: str = "200 OK", *headers: str) -> None:
        """Sets the script to a JSON answer."""
        content = json.dumps(body).encode()
        head = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(content)}", *headers]
        self.script = ["\r\n".join(head).encode() + b"\r\n\r\n" + content]

    def next_checks(self, num_checks: int = 1) -> None:
        """Waits until it has been checked so often again."""
        wanted, deadline = self.num_checks + num_checks, time.monotonic() + 60
        while self.num_checks < wanted:
            assert time.monotonic() < deadline, "nobody checks the server"
            time.sleep(0.005)

    def serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while head := _head(connection):
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
                body = _exactly(connection, length)
                path = head.split(b" ", 2)[1]
                if path == b"/health":
                    status = b"200 OK" if self.healthy else b"503 Service Unavailable"
                    facts = {"role": self.role, "weight_version": self.weight_version}
                    known = {name: fact for name, fact in facts.items() if fact}
                    said = json.dumps({"status": "ok"} | known).encode() if known else b""
                    connection.sendall(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(said), said))
                    self.num_checks += not self.healthy
                elif path == b"/metrics":
                    text = f'# a comment\nvllm:num_requests_waiting{{e="0"}} {float(self.waiting)}\n'
                    text += f"vllm:num_requests_running {self.running}\n"
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text.encode()))
                    self.num_checks += 1
                else:
                    self.requests.append((head, body))
                    self.on_request()
                    if not self._play(connection):
                        return

    def _play(self, connection: socket.socket) -> bool:
        for part in list(self.script):
            if part == BREAK or (isinstance(part, threading.Event) and not part.wait(60)):
                return False
            if isinstance(part, float):
                connection.settimeout(part)
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1):
                        self.num_hung_up += 1
                        return False
                connection.settimeout(None)
            elif isinstance(part, bytes):
                connection.sendall(part)
        return True


def _head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (byte := connection.recv(1)):
            return b""
        head += byte
    first, _, rest = head.partition(b"\r\n")
    lines = [line.partition(b":") for line in rest.split(b"\r\n")]
    return b"\r\n".join([first, *(key.lower() + colon + value.lstrip() if colon else b"" for key, colon, value in lines)])


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        data += connection.recv(length - len(data))
    return data


@contextlib.contextmanager
def scripted() -> Iterator[Scripted]:
    """A server while the `with` lasts."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        server = Scripted(f"http://127.0.0.1:{listener.getsockname()[1]}")
        server.answer({"served by": server.url})

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)  # wakes the accept
