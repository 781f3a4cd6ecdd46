"""Requests as no HTTP client would send them, made from a seed, and a reader of what a server answers to them."""

import contextlib
import json
import random
import socket
import time
from dataclasses import dataclass, field

PROMPT = {"prompt": "a", "temperature": 0, "max_tokens": 4}


@dataclass(frozen=True)
class RawCase:
    """parts: what is sent, and the seconds to wait after each. ending: what the client does then: it waits for the server to close,
    shuts its half down and waits, leaves, or resets the connection. read: whether it reads what comes."""

    seed: int
    parts: list[tuple[bytes, float]]
    ending: str
    read: bool = True


@dataclass
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False


METHODS = [b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"CONNECT", b"TRACE"]
BAD_METHODS = [b"G\x00T", b"get", b"", b"FOO BAR", b"\xff", b"POST" * 500, b"PRI"]
PATHS = [b"/health", b"/v1/completions", b"/v1/chat/completions", b"/v1/messages", b"/v1/responses", b"/inference/v1/generate"]
PATHS += [b"/tokenize", b"/v1/models", b"/metrics", b"/nothing", b"/"]
BAD_PATHS = [b"*", b"", b"x", b"//", b"/\x00", b"/%00%ff%", b"/\xc3\xa9", b"http://", b"http://h:99999/", b"/?" + b"a=b&" * 500]
BAD_PATHS += [b"/" + b"a" * 9000, b"/v1/models/%2e%2e%2f%0d%0aX:", b"/ HTTP/1.1\r\nX: y\r\n\r\nGET /", b"example.com:80"]
VERSIONS = [b"HTTP/1.1"] * 8 + [b"HTTP/1.0"] * 3
BAD_VERSIONS = [b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTP/1.1", b"", b"HTTP/1.1 x", b"HTTP/1.\x00"]
ODD_HEADERS = [
    b"X: " + b"a" * 9000,
    b"X\x00: y",
    b"X: \x00",
    b"X : y",
    b": y",
    b"no colon",
    b" folded: y",
    b"X: a\r\n folded",
    b"\xff\xfe: \xff",
    b"Content-Length: -1",
    b"Content-Length: 9999999999999999999999",
    b"Content-Length: 5, 5",
    b"Content-Length: 0x10",
    b"Content-Length: 100000000",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: \x0bchunked",
    b"Expect: 100-continue",
    b"Expect: nonsense",
    b"Connection: close",
    b"Connection: keep-alive, upgrade",
    b"Upgrade: websocket",
    b"Upgrade: h2c",
    b"Host: a\r\nHost: b",
    b"Content-Type: text/\x7f",
    b"Content-Encoding: gzip",
    b"Authorization: Bearer \xff",
    b"X-Request-Id: \xc3\xa9",
    b"X-Jaxserve-Prefill: 1",
    b"Endpoint-Load-Metrics-Format: TEXT",
    b"Range: bytes=0-1",
    b"Cookie: " + b"a=b; " * 100,
]
BODIES = [json.dumps(PROMPT).encode(), json.dumps(PROMPT | {"stream": True}).encode()]
BODIES += [b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}', b'{"input": "a", "max_output_tokens": 2}']
BODIES += [b'{"token_ids": [97], "sampling_params": {"max_tokens": 2, "temperature": 0}}']
BAD_BODIES = [
    b"",
    b"{",
    b"null",
    b"[" * 5000,
    b'{"prompt": ' + b"9" * 6000 + b"}",
    b"\xff\xfe\x00",
    b'{"prompt": "\\ud800"}',
    b"a" * 9000,
]
BAD_CHUNK_SIZES = [
    b"-1",
    b"FFFFFFFFFFFFFFFFFF",
    b"7fffffffffffffff",
    b"xyz",
    b"",
    b"0x5",
    b"5 ",
    b"5;" + b"e" * 5000,
    b"00000005",
    b"\x00",
]


def case(seed: int) -> RawCase:
    """The case of this seed: one to four requests, most of them wrong somewhere, in pieces or at once."""
    rng = random.Random(seed)
    sent = b"".join(_request(rng) for _ in range(rng.choice([1, 1, 1, 1, 1, 2, 4, 40])))
    for _ in range(rng.choice([0, 0, 0, 0, 0, 0, 1, 3])):  # bytes that are other bytes
        at = rng.randrange(len(sent))
        sent = sent[:at] + bytes([rng.randrange(256)]) + sent[at + rng.randrange(3) :]
    if rng.random() < 0.15:
        sent = sent[: rng.randrange(len(sent))] or b"\r\n"
    cuts = sorted(rng.randrange(len(sent) + 1) for _ in range(rng.choice([0, 0, 1, 2, 8])))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    if rng.random() < 0.1:  # byte by byte, at the beginning
        pieces = [sent[i : i + 1] for i in range(min(60, len(sent)))] + [sent[60:]]
    pause = rng.choice([0, 0, 0.001, 0.01])
    ending = rng.choices(["wait", "shut", "leave", "reset"], [2, 5, 2, 1])[0]
    return RawCase(seed, [(piece, pause) for piece in pieces], ending, rng.random() < 0.9)


def _request(rng: random.Random) -> bytes:
    if rng.random() < 0.03:
        return rng.randbytes(rng.choice([1, 50, 3000]))
    method = rng.choice(METHODS[:2] * 5 + METHODS) if rng.random() < 0.95 else rng.choice(BAD_METHODS)
    path = rng.choice(PATHS) if rng.random() < 0.93 else rng.choice(BAD_PATHS)
    version = rng.choice(VERSIONS) if rng.random() < 0.95 else rng.choice(BAD_VERSIONS)
    end = b"\n" if rng.random() < 0.05 else b"\r\n"
    lines = [b" ".join((method, path, version)), b"Host: x", b"Content-Type: application/json"]
    lines += rng.sample(ODD_HEADERS, rng.choice([0, 0, 0, 1, 2]))
    if rng.random() < 0.06:
        lines.append(ODD_HEADERS[0])
    body = b""
    if method == b"POST" or rng.random() < 0.1:
        body = rng.choice(BODIES) if rng.random() < 0.7 else rng.choice(BAD_BODIES)
        if rng.random() < 0.4:
            lines.append(b"Transfer-Encoding: chunked")
            body = _chunks(rng, body)
        else:
            wrong = rng.choice([1, -1, 100, 10**7]) if rng.random() < 0.15 else 0
            lines.append(b"Content-Length: %d" % max(0, len(body) + wrong))
    return end.join(lines) + end + end + body


def _chunks(rng: random.Random, body: bytes) -> bytes:
    made = b""
    while body:
        size = rng.choice([1, 3, 50, 9000])
        chunk, body = body[:size], body[size:]
        said = rng.choice(BAD_CHUNK_SIZES) if rng.random() < 0.05 else b"%x" % len(chunk)
        made += said + b"\r\n" + chunk + b"\r\n"
    end = rng.choice([b"0\r\n\r\n"] * 8 + [b"0\r\nX: y\r\n\r\n", b"0\r\n" + b"X: y\r\n" * 2000 + b"\r\n", b"", b"0"])
    return made + end


def play(address: tuple[str, int], given: RawCase, patience: float = 30) -> bytes | None:
    """Does what the case says. Returns what came until the server closed; None where the client left before. Raises TimeoutError if
    the server neither answers nor closes within `patience` seconds."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, timeout=patience))
        with contextlib.suppress(ConnectionError):  # the server may close before the end
            for piece, pause in given.parts:
                connection.sendall(piece)
                if pause:
                    time.sleep(pause)
        if given.ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        if given.ending in ("leave", "reset") or not given.read:
            return None
        if given.ending == "shut":
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(65536):
                received += data
        return received


def answers(received: bytes) -> list[Answer]:
    """The answers in what a server sent. ValueError where that is no HTTP. Only the last one may be incomplete. Answers to HEAD,
    which have no body, must not be among those that are followed by others."""
    found: list[Answer] = []
    while received:
        head, blank, received = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("ascii").split("\r\n")
        version, status, *_ = first.split(" ")
        if version != "HTTP/1.1" or not status.isdecimal():
            raise ValueError(f"{first!r} begins no answer")
        if status == "100" and blank:
            continue
        answer = Answer(int(status))
        found.append(answer)
        for line in lines if blank else []:
            name, colon, value = line.partition(": ")
            if not colon or name != name.strip():
                raise ValueError(f"{line!r} is no header")
            answer.headers[name.lower()] = value
        if not blank:
            return found
        received = _read_body(answer, received)
        if not answer.complete and received:
            raise ValueError(f"{received[:80]!r} follows an answer that is not complete")
    return found


def _read_body(answer: Answer, received: bytes) -> bytes:
    """Takes the answer's body from what was received, and returns the rest."""
    if answer.headers.get("transfer-encoding") != "chunked":
        length = int(answer.headers["content-length"])
        if received[:9] == b"HTTP/1.1 ":  # of HEAD: the next answer
            length = 0
        answer.body, answer.complete = received[:length], len(received) >= length
        return received[length:]
    while received:
        size, end, rest = received.partition(b"\r\n")
        if not end:
            break
        length = int(size, 16)
        if len(rest) < length + 2:
            break
        if rest[length : length + 2] != b"\r\n":
            raise ValueError(f"a chunk of {length} bytes does not end there")
        answer.body += rest[:length]
        received = rest[length + 2 :]
        if not length:
            answer.complete = True
            return received
    return b""
