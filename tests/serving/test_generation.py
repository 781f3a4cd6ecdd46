"""What `until_done` sends as one: events that nothing is waited for between."""

import asyncio
import socket
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import pytest

from jaxserve.serving.generation import MAX_JOINED_BYTES, until_done

MESSAGES = [{"role": "user", "content": "x"}]


class Ending:
    """A stream that has ended when `num_waited` chunks have been read."""

    def __init__(self, num_waited: int):
        self.num_left = num_waited

    @property
    def finished(self) -> bool:
        return self.num_left <= 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


def sent(num_waited: int, texts: list[str], error: Exception | None = None) -> list[bytes]:
    stream = Ending(num_waited)

    async def chunks():
        for text in texts:
            stream.num_left -= 1
            yield {"text": text}
        if error is not None:
            raise error

    async def read() -> list[bytes]:
        return [part async for part in until_done(chunks(), cast("Any", stream))]

    return asyncio.run(read())


def test_the_last_chunk_and_the_end_are_sent_as_one():
    parts = [f'data: {{"text":"{text}"}}\n\n'.encode() for text in "abc"]
    end = b"data: [DONE]\n\n"
    assert sent(9, list("abc")) == [*parts, end]  # something is waited for behind each
    assert sent(2, list("abc")) == [parts[0], parts[1] + parts[2] + end]
    assert sent(0, []) == [end]


def test_an_error_is_sent_with_what_came_before_it():
    first, last = sent(2, list("ab"), ValueError("no"))
    assert first == b'data: {"text":"a"}\n\n'
    assert last.startswith(b'data: {"text":"b"}\n\ndata: {"error":') and last.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("size", [200, MAX_JOINED_BYTES, 3 * MAX_JOINED_BYTES])
def test_no_more_is_held_than_a_little(size):
    text = "x" * size
    parts = sent(0, [text] * 50)
    assert max(map(len, parts)) < MAX_JOINED_BYTES + size + 50
    assert b"".join(parts).count(text.encode()) == 50


@pytest.mark.parametrize("path, prompt", [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})])
def test_a_servers_stream_ends_in_one_part(server, path, prompt):
    """By the parts of HTTP's chunked encoding: the reason of the end, the usage and the end mark are in the last one."""
    asked = {"model": "alphabet", "max_tokens": 5, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    parts = parts_of(server.url, path, msgspec.json.encode(asked | prompt))
    *_, last, usage, done = parts[-1].removesuffix(b"\n\n").split(b"\n\n")
    assert b'"finish_reason":"length"' in last and b'"completion_tokens":5' in usage and done == b"data: [DONE]"


def parts_of(url: str, path: str, body: bytes) -> list[bytes]:
    """The parts that a server sends an answer in."""
    address = urlsplit(url)
    fields = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", "", "")
    with (
        socket.create_connection((address.hostname, address.port), timeout=60) as connection,
        connection.makefile("rb") as answer,
    ):
        connection.sendall("\r\n".join(fields).encode() + body)
        assert b" 200 " in answer.readline()
        while (line := answer.readline()) != b"\r\n":
            assert line, "the answer ends in its headers"
        parts = []
        while size := int(answer.readline(), 16):
            parts.append(answer.read(size))
            assert answer.readline() == b"\r\n"
        return parts
