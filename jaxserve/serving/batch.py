"""Files of requests in OpenAI's batch format: each line is asked of the server's application, in this process.

Owns the format of the lines, both ways, and the order in which results are written. Knows nothing of what a request asks for.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import ASGIApp

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WINDOW = 16  # lines that may be done and not written, as a multiple of those that are asked for at a time


@dataclass(frozen=True)
class BatchLine:
    """A line of the input. error: why it is no request; then nothing else but number and custom_id counts."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: str | None = None


def read_lines(lines: Iterable[str]) -> Iterator[BatchLine]:
    """The requests of an input file. A line that is malformed, or whose custom_id another had, has an error."""
    known: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        made = _read_line(number, line)
        if made.custom_id is not None:
            if made.custom_id in known:
                made = BatchLine(number, made.custom_id, error=f"line {number}: custom_id {made.custom_id!r} is an earlier line's")
            known.add(str(made.custom_id))
        yield made


def _read_line(number: int, line: str) -> BatchLine:
    try:
        given = json.loads(line)
    except ValueError as error:
        return BatchLine(number, None, error=f"line {number}: not JSON: {error}")
    if not isinstance(given, dict):
        return BatchLine(number, None, error=f"line {number}: must be an object")
    custom_id, url, body = given.get("custom_id"), given.get("url"), given.get("body")
    mistakes = {
        f"custom_id must be a text, found {custom_id!r}": isinstance(custom_id, str) and custom_id,
        f"method must be POST, found {given.get('method')!r}": given.get("method") == "POST",
        f"url must be one of {', '.join(URLS)}, found {url!r}": url in URLS,
        "body must be an object": isinstance(body, dict),
        f"unknown fields {sorted(set(given) - _FIELDS)}": set(given) <= _FIELDS,
    }
    mistakes |= {
        f"body.{name} must be false: a batch has whole answers": not _asks(body, name) for name in ("stream", "background")
    }
    said = [mistake for mistake, fine in mistakes.items() if not fine]
    custom_id = custom_id if isinstance(custom_id, str) else None
    if said:
        return BatchLine(number, custom_id, error=f"line {number}: {'; '.join(said)}")
    return BatchLine(number, custom_id, str(url), json.dumps(body).encode())


_FIELDS = {"custom_id", "method", "url", "body"}


def _asks(body: Any, name: str) -> bool:
    return isinstance(body, dict) and bool(body.get(name))


def count_results(results: Iterable[bytes], lines: Iterator[BatchLine]) -> tuple[int, int, int]:
    """(results, failed ones among them, bytes) of the whole lines of an output file that an earlier run began.

    Their requests are taken from `lines`. ValueError if they are not those requests' results."""
    num_done = num_failed = num_bytes = 0
    for result in results:
        if not result.endswith(b"\n"):
            break  # cut short
        line = next(lines, None)
        try:
            given = json.loads(result)
            custom_id, failed = given["custom_id"], given["error"] is not None
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"its line {num_done + 1} is not a result of a batch: nothing to resume") from None
        if line is None or custom_id != line.custom_id:
            raise ValueError(f"its line {num_done + 1} is not the result of that request: resume the batch that broke off")
        num_done, num_failed, num_bytes = num_done + 1, num_failed + failed, num_bytes + len(result)
    return num_done, num_failed, num_bytes


async def run_batch(app: ASGIApp, lines: Iterable[BatchLine], max_concurrency: int) -> AsyncGenerator[dict[str, Any]]:
    """The result of each line, in their order: OpenAI's object of a batch's output file.

    A request that is refused for lack of room is asked again. error is None where the status is 200.

    Args:
      app: the server's application; its lifespan has begun.
      max_concurrency: requests that run or wait at a time.
    """
    room, tasks = asyncio.Semaphore(max_concurrency), deque[asyncio.Task[dict[str, Any]]]()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
        try:
            for line in lines:
                tasks.append(asyncio.create_task(_result(client, line, room)))
                while tasks and (tasks[0].done() or len(tasks) >= WINDOW * max_concurrency):
                    yield await tasks.popleft()
                await asyncio.sleep(0)  # lets the tasks begin while lines are read
            while tasks:
                yield await tasks.popleft()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _result(client: httpx.AsyncClient, line: BatchLine, room: asyncio.Semaphore) -> dict[str, Any]:
    result: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": None, "error": None}
    if line.error is not None:
        return result | {"error": {"code": "invalid_line", "message": line.error}}
    request_id = uuid.uuid4().hex
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    async with room:
        while (answer := await client.post(line.url, content=line.body, headers=headers)).status_code == 429:
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    body = answer.json()
    result["response"] = {"status_code": answer.status_code, "request_id": request_id, "body": body}
    if answer.status_code != 200:
        result["error"] = {"code": body["error"]["code"], "message": body["error"]["message"]}
    return result
