"""Who of a group of processes still lives: a beat from each to host 0 and back, on connections of their own.

Owns the thread that sends and hears the beats, what it hears of the others' progress, and the verdict that one is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

logger: logging.Logger = logging.getLogger("jaxserve")

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 8.0  # a host that was not heard for so long is lost
EXIT_CODE = 100  # of a process that ends because host 0 was lost; 101 for host 1, and so on


class HostLostError(RuntimeError):
    """A process of the group is gone, stands still or has failed; the group can run no more steps.

    host_id: whose fault it is. exit_code: with which commands end then.
    """

    def __init__(self, host_id: int, why: str):
        super().__init__(f"host {host_id} {why}; no step can run without it: start all hosts again")
        self.host_id: int = host_id
        self.why: str = why

    @property
    def exit_code(self) -> int:
        return min(EXIT_CODE + self.host_id, 255)


@dataclass(frozen=True, slots=True)
class Beat:
    """What a host says of itself. num_commands: that it has carried out. awaits_compile: whether what it runs waits for a
    program."""

    num_commands: int
    awaits_compile: bool


@dataclass(frozen=True, slots=True)
class _Lost:
    """From a peer: it knows that a host is lost."""

    host_id: int
    why: str


class Pulse:
    """Beats to and from `peers`: of host 0 all others, of the others host 0 alone.

    Args:
      me: this host.
      peers: a connection to each, used by this object's thread alone.
      beat: what to say of this process; called on the thread.
      on_lost: called on the thread, once, with what was found.
      look: called on the thread, some times a second: what this process finds by itself.
    """

    def __init__(
        self,
        me: int,
        peers: Mapping[int, Connection],
        beat: Callable[[], Beat],
        on_lost: Callable[[HostLostError], None],
        look: Callable[[], HostLostError | None] = lambda: None,
    ):
        self._me = me
        self._peers = dict(peers)
        self._beat, self._on_lost, self._look = beat, on_lost, look
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._ending = threading.Event()
        self._to_say: list[HostLostError] = []  # of this process itself
        self.beats: dict[int, Beat] = {peer: Beat(0, False) for peer in peers}  # the last of each
        self._thread = threading.Thread(target=self._run, name="jaxserve-pulse", daemon=True)

    def start(self) -> None:
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        self._thread.start()

    def fail(self, error: HostLostError) -> None:
        """This process can't go on: the others are told, and `on_lost` is called here too. Any thread may call it."""
        self._to_say.append(error)

    def await_byes(self, timeout: float) -> None:
        """Waits until all peers have ended in good order, for `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        while self._peers and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """An orderly end, which the others hear of. Waits for the thread."""
        self._ending.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * BEAT_SECONDS)

    def _run(self) -> None:
        try:
            found = self._watch()
        except Exception as error:  # a message that can't be read, say: nobody would watch from here on
            logger.exception("the pulse of this host ends")
            found = HostLostError(self._me, f"can't hear the others ({error!r})")
        if found is None and self._to_say:
            found = self._to_say[0]
        if found is None:
            self._say("bye")
            return
        self._say(_Lost(found.host_id, found.why))
        self._on_lost(found)

    def _watch(self) -> HostLostError | None:
        """Until somebody is lost, or all is at its end."""
        found: HostLostError | None = None
        next_beat = 0.0
        while found is None and not self._ending.is_set() and self._peers:
            now = time.monotonic()
            if now >= next_beat:
                self._say(self._beat())
                next_beat = now + BEAT_SECONDS
            found = self._hear(BEAT_SECONDS / 4) or self._silent() or self._look()
            if self._to_say:
                found = self._to_say[0]
        return found

    def _say(self, what: object) -> None:
        for peer in self._peers.values():
            try:
                peer.send(what)
            except (OSError, ValueError):  # hearing finds out
                pass

    def _hear(self, timeout: float) -> HostLostError | None:
        names = {id(connection): peer for peer, connection in self._peers.items()}
        for ready in wait(list(self._peers.values()), timeout):
            assert isinstance(ready, Connection)
            peer = names[id(ready)]
            try:
                said = ready.recv()
            except (EOFError, OSError):
                return HostLostError(peer, "has ended")
            if isinstance(said, Beat):
                self._heard[peer], self.beats[peer] = time.monotonic(), said
            elif isinstance(said, _Lost):
                return HostLostError(said.host_id, said.why)
            else:  # a farewell
                del self._peers[peer]
        return None

    def _silent(self) -> HostLostError | None:
        """A process that was stopped itself, and went on, asks anew: the others may have spoken meanwhile."""
        now = time.monotonic()
        for peer in list(self._peers):
            if now - self._heard[peer] > SILENCE_SECONDS and not self._peers[peer].poll(0):
                return HostLostError(peer, f"was not heard for {SILENCE_SECONDS:.0f} s")
        return None
