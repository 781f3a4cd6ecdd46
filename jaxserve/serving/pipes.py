"""One engine loop for several processes that speak HTTP: the messages of messages.py, over a pipe to each.

Owns the pipes and their two ends: `EngineHub` beside the engine, and `RemoteLoop`, which stands in for the engine's loop elsewhere.
A pipe is a pair of sockets that only a server's own processes hold, so what crosses it is pickled. What a process asked for ends
when it is gone, and what it asks for fails when the engine's process is. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve.serving.engine_loop import MAX_COMPILING, EngineLoop
from jaxserve.serving.interfaces import ServedLLM
from jaxserve.serving.messages import (
    Abort,
    Add,
    Call,
    Command,
    Delta,
    Event,
    Failed,
    FailedError,
    HTTPAnswered,
    LoopStats,
    QueueFullError,
    Ready,
    Reply,
    Report,
    Stop,
    UnavailableError,
)
from jaxserve.serving.metrics import Metrics

logger: logging.Logger = logging.getLogger("jaxserve")

ENGINE_GONE = "the engine's process has ended"
_LENGTH = 8  # bytes of a message's length, before the message


class Pipe:
    """One end of a pair of sockets.

    take: called with each message that comes, on a thread of the pipe's own. lost: called there once, when the other end is gone.
    spoilt: called on another thread with each message that cannot be pickled, and why; returns what goes instead, or None.
    """

    def __init__(
        self, end: socket.socket, take: Callable[[Any], None], lost: Callable[[], None], spoilt: Callable[[Any, str], object]
    ):
        self._socket, self._take, self._lost, self._spoilt = end, take, lost, spoilt
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="jaxserve-pipe-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="jaxserve-pipe-writer", daemon=True)

    def start(self) -> None:
        self._writer.start()
        self._reader.start()

    def put(self, message: object) -> None:
        """Queues a message. It never waits, however busy the other end is; a message to an end that is gone is dropped."""
        self._outbox.put(message)

    def close(self) -> None:
        """Ends the pipe, behind what was put. `lost` is called at both ends."""
        self._outbox.put(None)

    def _write(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while (message := self._outbox.get()) is not None:
                    self._socket.sendall(self._framed(message))
        finally:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _framed(self, message: object) -> bytes:
        try:
            return framed(message)
        except Exception as error:
            logger.exception("a message of the type %s cannot be pickled; what it is about fails", type(message).__name__)
            instead = self._spoilt(message, f"a message cannot be pickled: {error!r}")
            return b"" if instead is None else framed(instead)

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError), self._socket.makefile("rb") as file:
                while len(head := file.read(_LENGTH)) == _LENGTH:
                    body = file.read(size := int.from_bytes(head))
                    if len(body) < size:
                        break
                    self._take(pickle.loads(body))
        finally:
            self.close()
            self._writer.join()  # soon: the other end takes nothing any more
            self._socket.close()
            self._lost()


def framed(message: object) -> bytes:
    """A message as it crosses a pipe."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH) + data


def is_picklable(message: object) -> bool:
    """Whether it can cross a pipe."""
    try:
        framed(message)
    except Exception:
        return False
    return True


def read_one(end: socket.socket) -> Any:
    """The first message of a pipe that nobody reads yet. EOFError where the other end is gone."""

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (part := end.recv(size - len(data))):
                raise EOFError(ENGINE_GONE)
            data += part
        return data

    return pickle.loads(exactly(int.from_bytes(exactly(_LENGTH))))


class Peer:
    """A process at the other end of a hub's pipe. is_ready: whether it has begun to serve. num_refused: calls that it has refused,
    since too many samples waited."""

    def __init__(self) -> None:
        self.is_ready: bool = False
        self.num_refused: int = 0
        self.pipe: Pipe


class EngineHub:
    """An engine, its loop, and the pipes to the processes that use it.

    Args:
      llm: the model, loaded; from here on nothing else may use it.
      max_waiting: samples of all processes together that may wait beyond the engine's max_num_seqs.
      max_failures: as `EngineLoop`'s.
      make_metrics: makes the server's metrics of (counts to begin with, what returns how many calls were refused).
    """

    def __init__(
        self,
        llm: ServedLLM,
        *,
        max_waiting: int,
        max_failures: int,
        make_metrics: Callable[[LoopStats, Callable[[], int]], Metrics],
    ):
        llm.grammars.prepare()
        grammars = llm.grammars.beside(max_waiting=MAX_COMPILING)
        self._loop = EngineLoop(llm.engine, llm.tokenizer, grammars, self._deliver, max_failures=max_failures)
        self.stats: LoopStats = self._loop.stats()
        self.metrics: Metrics = make_metrics(self.stats, lambda: self.num_refused)
        self._limit = llm.engine.config.scheduler.max_num_seqs + max_waiting
        self._lock = threading.Lock()  # of what follows
        self._peers: list[Peer] = []
        self._owners: dict[str, tuple[Peer, int]] = {}  # of requests that have not ended: who asked, and how many samples they have
        self._num_samples = 0
        self._num_refused = 0  # by processes that are gone

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        """Ends the engine and every request."""
        self._loop.send(Stop())
        self._loop.join()
        with self._lock:
            for peer in self._peers:
                peer.pipe.close()

    def attach(self, end: socket.socket) -> Peer:
        """Begins to serve the process at the other end."""
        peer = Peer()
        peer.pipe = Pipe(end, lambda message: self._take(peer, message), lambda: self._lose(peer), self._without_spoilt)
        with self._lock:
            self._peers.append(peer)
        peer.pipe.start()
        return peer

    @property
    def num_refused(self) -> int:
        """Calls that were refused, since too many samples waited, as the processes have told with their answers."""
        with self._lock:
            return self._num_refused + sum(peer.num_refused for peer in self._peers)

    def _take(self, peer: Peer, message: Any) -> None:
        if isinstance(message, Add):
            self._add(peer, message)
        elif isinstance(message, Abort):
            self._forget(message.request_ids)
            self._loop.send(message)
        elif isinstance(message, Call):
            peer.pipe.put(Report([self._answer(message)], self.stats))
        elif isinstance(message, HTTPAnswered):
            self.metrics.count_http(message.path, message.status)
            peer.num_refused = message.num_refused
        elif isinstance(message, Ready):
            peer.is_ready = True

    def _add(self, peer: Peer, add: Add) -> None:
        with self._lock:
            held = self._num_samples
            has_room = held + add.params.n <= self._limit
            if has_room:
                self._owners[add.request_id] = peer, add.params.n
                self._num_samples += add.params.n
        if has_room:
            self._loop.send(add)
            return
        full = QueueFullError(f"{held} samples are running or waiting, of at most {self._limit}; try again in 1 s", retry_after=1)
        peer.pipe.put(Report([Failed(add.request_id, full)], self.stats))

    def _answer(self, call: Call) -> Reply:
        try:
            if call.method == "metrics":
                return Reply(call.call_id, self.metrics.render())
            if call.method == "num_requests":
                return Reply(call.call_id, len(self._owners))
            raise ValueError(f"method={call.method!r} must be metrics or num_requests")
        except Exception as error:
            return Reply(call.call_id, error=error)

    def _without_spoilt(self, report: Report, why: str) -> Report:
        """A report whose events that cannot be pickled have become failures. Their requests end."""
        events, failed = list[Event](), list[str]()
        for event in report.events:
            if is_picklable(event):
                events.append(event)
            elif isinstance(event, Reply):
                events.append(Reply(event.call_id, error=FailedError(why)))
            else:
                events.append(Failed(event.request_id, FailedError(why)))
                failed.append(event.request_id)
        if failed:
            self._forget(failed)
            self._loop.send(Abort(failed))
        return replace(report, events=events)

    def _forget(self, request_ids: list[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._num_samples -= self._owners.pop(request_id, (None, 0))[1]

    def _lose(self, peer: Peer) -> None:
        """Its process is gone: so is who waits for its requests."""
        with self._lock:
            self._peers.remove(peer)
            self._num_refused += peer.num_refused
            left = [request_id for request_id, (owner, _) in self._owners.items() if owner is peer]
        self._forget(left)
        if left:
            self._loop.send(Abort(left))

    def _deliver(self, report: Report) -> None:
        """On the engine's thread. Each process gets what is its own, and all hear that the engine is broken."""
        parts: dict[Peer, list[Event]] = {}
        is_news = report.stats.broken != self.stats.broken
        self.stats = report.stats
        self.metrics.take(report)  # who reads of an end finds it counted
        with self._lock:
            for event in report.events:
                assert not isinstance(event, Reply), "the loop is sent no calls"
                owner, _ = self._owners.get(event.request_id, (None, 0))
                if owner is not None:
                    parts.setdefault(owner, []).append(event)
            peers = list(self._peers) if is_news else list(parts)
        ended = [event for part in parts.values() for event in part if isinstance(event, Delta | Failed) and ends(event)]
        self._forget([event.request_id for event in ended])
        for peer in peers:
            peer.pipe.put(Report(parts.get(peer, []), report.stats))


def ends(event: Event) -> bool:
    """Whether it is the last of its request."""
    return isinstance(event, Failed) or isinstance(event, Delta) and event.last


class RemoteLoop:
    """The loop of an engine in another process, at the other end of a pipe: it is sent what an `EngineLoop` is, and delivers what
    that would, on a thread of its own.

    stats: counts to begin with. deliver: as `EngineLoop`'s. on_lost: called when the other process is gone, after all that was
      asked of it has failed.
    """

    def __init__(self, end: socket.socket, stats: LoopStats, deliver: Callable[[Report], None], on_lost: Callable[[], None]):
        self._pipe = Pipe(end, self._take, self._lose, self._fail)
        self._stats, self._deliver, self._on_lost = stats, deliver, on_lost
        self._lock = threading.Lock()  # of what follows
        self._open: set[str] = set()  # requests that have not ended
        self._calls: set[int] = set()  # without a Reply
        self._is_lost = self._is_closed = False

    def start(self) -> None:
        self._pipe.start()

    def send(self, command: Command | HTTPAnswered | Ready) -> None:
        """As `EngineLoop.send`. A Stop is not passed on: others use the engine too."""
        with self._lock:
            if isinstance(command, Add):
                self._open.add(command.request_id)
            elif isinstance(command, Abort):
                self._open.difference_update(command.request_ids)
            elif isinstance(command, Call):
                self._calls.add(command.call_id)
            is_lost = self._is_lost
        if is_lost:
            self._fail_all()
        elif not isinstance(command, Stop):
            self._pipe.put(command)

    def stats(self) -> LoopStats:
        """The counts of the last report."""
        return self._stats

    def join(self, timeout: float | None = None) -> bool:
        """Closes the pipe."""
        del timeout
        self._is_closed = True
        self._pipe.close()
        return True

    def _take(self, report: Report) -> None:
        self._stats = report.stats
        with self._lock:
            for event in report.events:
                if isinstance(event, Reply):
                    self._calls.discard(event.call_id)
                elif ends(event):
                    self._open.discard(event.request_id)
        self._deliver(report)

    def _lose(self) -> None:
        if self._is_closed:
            return
        self._stats = replace(self._stats, broken=ENGINE_GONE)
        with self._lock:
            self._is_lost = True
        self._fail_all()
        self._on_lost()

    def _fail(self, command: object, why: str) -> None:
        """Ends what was asked for."""
        if isinstance(command, Add):
            self._take(Report([Failed(command.request_id, FailedError(why))], self._stats))
        elif isinstance(command, Call):
            self._take(Report([Reply(command.call_id, error=FailedError(why))], self._stats))

    def _fail_all(self) -> None:
        with self._lock:
            events: list[Event] = [Failed(request_id, FailedError(ENGINE_GONE)) for request_id in self._open]
            events += [Reply(call_id, error=UnavailableError(ENGINE_GONE)) for call_id in self._calls]
            self._open.clear()
            self._calls.clear()
        self._deliver(Report(events, self._stats))
