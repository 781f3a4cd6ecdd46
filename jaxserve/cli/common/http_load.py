"""A load of streamed completions on a server, by a client that costs next to nothing, and servers in processes of their own.

Owns the client's side of a stream and its times. Knows nothing of engines; what is asked for is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from absl import app

from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import Workload

_TEXT = re.compile(rb'"text"\s*:\s*"')  # servers differ in their spaces
_NUM_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_OVERLAP = 64  # bytes of a read that the next is searched with: more than _TEXT matches

_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # no proxy of the environment comes between


@dataclass
class Stream:
    """What one request brought. started: on time.perf_counter's clock; other times in seconds from there, one a chunk with text."""

    started: float = 0.0
    status: int = 0
    seconds: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    complete: bool = False
    tail: bytes = b""  # the last bytes that came

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] if self.chunk_times else 0.0


class Target:
    """A server's address, perhaps with a path before the API's own (a /v1 at its end is the API's). ValueError if it is none.

    key: its API key. model: named in every request of a workload; None where a server has but one and does not ask.
    """

    def __init__(self, url: str, key: str | None = None):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url=} must be an address such as http://127.0.0.1:8000")
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url: str = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.model: str | None = None
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._authorization = f"Authorization: Bearer {key}\r\n" if key else ""

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port, limit=2**20, ssl=self._tls or None)

    async def ask(self, body: Mapping[str, Any]) -> Stream:
        """One streamed completion over a connection of its own."""
        stream = Stream(time.perf_counter())
        reader, writer = await self.connect()
        try:
            await self.read(stream, reader, writer, body)
        finally:
            writer.close()
        return stream

    async def read(
        self, stream: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Mapping[str, Any]
    ) -> None:
        """Asks over an open connection and reads the answer as raw bytes."""
        content = json.dumps(body).encode()
        head = f"POST {self._path}/v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += self._authorization
        writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
        rest = b""
        while data := await reader.read(2**16):
            now = time.perf_counter() - stream.started
            if not stream.status:
                stream.status = int(data.split(None, 2)[1])
            stream.chunk_times += [now] * (len(_TEXT.findall(rest + data)) - len(_TEXT.findall(rest)))
            rest, stream.tail = (rest + data)[-_OVERLAP:], (stream.tail + data)[-1024:]
            stream.complete = b"[DONE]" in stream.tail
            if stream.complete or (stream.status != 200 and b"}}" in stream.tail):
                break
        stream.seconds = time.perf_counter() - stream.started

    def get_json(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path)
        if self._authorization:
            request.add_header(*self._authorization.strip().split(": ", 1))
        with _open(request) as answer:
            return json.load(answer)


async def serve_at(
    target: Target, workload: Workload, vocab_size: int, seed: int, *, max_concurrency: int | None = None, progress: Any = None
) -> ServedTimes:
    """Has a server serve a workload to its end, each request at its time and to its full length, as open_loop.serve an engine.

    The times are the client's. RuntimeError if a request was refused, broke off or brought another number of tokens.
    """
    requests = workload.requests
    prompts = workload.prompts(vocab_size, seed)
    arrivals = np.array([r.arrived_at for r in requests])
    places = asyncio.Semaphore(max_concurrency or len(requests))
    begin = time.perf_counter()

    async def one(i: int) -> Stream:
        await asyncio.sleep(max(0.0, arrivals[i] - (time.perf_counter() - begin)))
        async with places:
            if max_concurrency and i >= max_concurrency:
                arrivals[i] = time.perf_counter() - begin
            body = {"prompt": prompts[i], "max_tokens": requests[i].num_output_tokens, "temperature": workload.temperature}
            body |= {"model": target.model} if target.model else {}
            body |= {"ignore_eos": True, "cache_salt": f"run {seed}", "stream": True, "stream_options": {"include_usage": True}}
            stream = await target.ask(body)
        if progress is not None:
            progress.update()
        return stream

    streams = await asyncio.gather(*(one(i) for i in range(len(requests))))
    for request, stream in zip(requests, streams, strict=True):
        tokens = _NUM_TOKENS.search(stream.tail)
        if not stream.complete or tokens is None or int(tokens[1]) != request.num_output_tokens or not stream.chunk_times:
            raise RuntimeError(
                f"{target.url} answered {stream.status}, not {request.num_output_tokens} tokens: {stream.tail!r:.300}"
            )
    return _times(streams, arrivals, begin, requests)


def _times(streams: Sequence[Stream], arrivals: np.ndarray, begin: float, requests: Sequence[Any]) -> ServedTimes:
    first = np.array([s.started + s.chunk_times[0] - begin for s in streams])
    last = np.array([s.started + s.chunk_times[-1] - begin for s in streams])
    gaps = np.concatenate([np.diff(s.chunk_times) for s in streams])
    num_prompt, num_output = np.array([(r.num_prompt_tokens, r.num_output_tokens) for r in requests]).T
    return ServedTimes(arrivals, first, last, num_prompt, num_output, gaps, np.ones(len(gaps), np.int64))


@contextlib.contextmanager
def server_process(
    module: str, *flags: str, python: str = sys.executable, env: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """(address, process id) of `python -m MODULE --port=... FLAGS`, from when it is healthy until the `with` ends. python: another
    environment's; env: its variables, by default this process's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([python, "-m", module, f"--port={port}", *flags], env=env)
    try:
        while True:
            if process.poll() is not None:
                raise app.UsageError(f"the server ({module}) did not start; what it said stands above")
            with contextlib.suppress(OSError), _open(f"{url}/health"):
                break
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()
