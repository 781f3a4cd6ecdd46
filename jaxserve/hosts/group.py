"""The processes of one engine, as each of them sees the group: what host 0 tells the others, what all agree on, who is lost.

Owns the connections and what a lost host means for this process: every wait of the group's ends with a HostLostError, and where
one does not come back in time, the process ends. Knows nothing of JAX.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from jaxserve.hosts import watchdog
from jaxserve.hosts.guard import Guard
from jaxserve.hosts.pulse import SILENCE_SECONDS, Beat, HostLostError, Pulse

logger: logging.Logger = logging.getLogger("jaxserve")

POLL_SECONDS = 0.25  # between two looks at who is lost, while this process waits for a message
LEAVE_SECONDS = 10.0  # that host 0 waits for the others at its end
_COLLECTIVES = ("Gloo", "NCCL")  # in errors of XLA's that tell of a connection
GRACE_SECONDS = 3.0  # that a step has to come back when a host is lost, before the process is ended


class HostGroup:
    """One process of a group: `host_id` of `num_hosts`. `join_hosts` makes it. Host 0 leads.

    Messages are Python values that pickle takes; both ends of a connection have shown that they know the group's key.
    """

    def __init__(
        self,
        host_id: int,
        num_hosts: int,
        commands: Mapping[int, Connection],
        pulses: Mapping[int, Connection],
        reports: Mapping[int, Connection],
        *,
        leave: Callable[[], None] = lambda: None,
    ):
        """commands, pulses, reports: a connection of each kind to each other host that this one speaks to. leave: called where the
        process ends in good order."""
        self.host_id: int = host_id
        self.num_hosts: int = num_hosts
        self.lost: HostLostError | None = None  # who, once somebody is
        self.num_commands: int = 0  # sent by host 0; carried out by the others
        self.awaits_compile: Callable[[], bool] = lambda: False  # whether what this process runs waits for a program
        self._commands = dict(commands)
        self._reports = dict(reports)
        self._reporting = threading.Lock()
        self._watchdog = watchdog.Watchdog()
        self._carrying_out = 0  # of host 0: commands that were sent and have not ended here
        self._inside = 0  # how many do what a lost host might never let end
        self._outside = threading.Condition()
        self._told: list[Callable[[HostLostError], None]] = []
        self._guard: Guard | None = None
        self._leave = leave
        self._speaking = threading.RLock()  # host 0: while it says something, and hears the answers if there are any
        self._dismissed = False
        self._losing = threading.Lock()
        beat = lambda: Beat(self.num_commands, self.awaits_compile())  # noqa: E731
        self._pulse = Pulse(host_id, pulses, beat, self._on_lost, self._look if host_id == 0 else lambda: None)
        self._pulse.start()
        atexit.register(self.close)

    @property
    def leads(self) -> bool:
        return self.host_id == 0

    # -- what is said

    def send(self, message: Any) -> None:
        """From host 0 to all others, in the order of calls; any thread may call it. Raises HostLostError."""
        self.check()
        self._dismissed = message is None
        payload = _dumps(message)
        try:
            with self._speaking:
                self.num_commands += 1
                for connection in self._commands.values():
                    connection.send_bytes(payload)
        except OSError as error:
            raise self._lost_within(error) from error

    def dismiss(self) -> None:
        """From host 0 to all others: there is nothing more to follow. More often than once does no harm."""
        if not self._dismissed:
            self.send(None)

    def receive(self) -> Any:
        """The next message of host 0's, waited for. Raises HostLostError."""
        return self._receive_from(0)

    def exchange(self, mine: Any) -> list[Any]:
        """Every host's value, in their order; all hosts call it, at the same place of what they do. Raises HostLostError."""
        if not self.leads:
            self._send_to(0, mine)
            values = self._receive_from(0)
            if values is None:  # dismissed
                raise HostLostError(0, "has ended")
            return values
        with self._speaking:
            values = [mine, *(self._receive_from(host_id) for host_id in range(1, self.num_hosts))]
            for host_id in self._commands:
                self._send_to(host_id, values)
            return values

    def ask(self, message: Any, mine: Any) -> list[Any]:
        """From host 0 to all others, who answer with an `exchange`: every host's value. Raises HostLostError."""
        with self._speaking:
            self.send(message)
            return self.exchange(mine)

    def report(self, message: Any) -> None:
        """From another host to host 0, beside what else they say; any thread may call it. Raises HostLostError."""
        self.check()
        try:
            with self._reporting:
                self._reports[0].send_bytes(_dumps(message))
        except OSError as error:
            raise self._lost_within(error) from error

    def on_reports(self, call: Callable[[Any], None]) -> None:
        """On host 0: calls this with what other hosts report, on a thread for each of them, from now on."""
        for connection in self._reports.values():
            threading.Thread(target=self._hear_reports, args=(connection, call), name="jaxserve-reports", daemon=True).start()

    def _hear_reports(self, connection: Connection, call: Callable[[Any], None]) -> None:
        with contextlib.suppress(EOFError, OSError):  # the pulse says why
            while True:
                call(connection.recv())

    def agree(self, facts: Mapping[str, Any]) -> None:
        """All hosts must have the same facts. ValueError, on every host, with each one that differs and whose value is which."""
        everybodys = self.exchange(dict(facts))
        first, differing = everybodys[0], []
        for host_id, theirs in enumerate(everybodys):
            for name in first.keys() | theirs.keys():
                if first.get(name) != theirs.get(name):
                    differing.append(f"{name} is {first.get(name)} on host 0 and {theirs.get(name)} on host {host_id}")
        if differing:
            raise ValueError(
                "hosts disagree: " + "; ".join(sorted(differing)) + ". Start them with the same versions, model and flags"
            )

    def _send_to(self, host_id: int, message: Any) -> None:
        self.check()
        try:
            self._commands[host_id].send_bytes(_dumps(message))
        except OSError as error:
            raise self._lost_within(error, host_id) from error

    def _receive_from(self, host_id: int) -> Any:
        connection = self._commands[host_id]
        try:
            while not connection.poll(POLL_SECONDS):
                self.check()
            return connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost_within(error, host_id) from error

    # -- who is lost

    def check(self) -> None:
        """Raises HostLostError if a host is lost."""
        if self.lost is not None:
            raise self.lost

    @contextlib.contextmanager
    def at_work(self, *, timed: bool = False) -> Iterator[None]:
        """Around what may never come back if a host is lost. If it does not, in GRACE_SECONDS from then, the process is ended.
        Raises HostLostError where one is lost already.

        timed: of host 0: a host is lost, too, if this takes longer than STEP_SECONDS (watchdog.py)."""
        with self._outside:
            self._inside += 1
        try:
            self.check()  # behind the count: who found the loss has seen it, or this sees the loss
            with self._watchdog.timed() if timed else contextlib.nullcontext():
                yield
        finally:
            with self._outside:
                self._inside -= 1
                self._outside.notify_all()

    @contextlib.contextmanager
    def carrying_out(self, *, timed: bool = False) -> Iterator[None]:
        """Of host 0, around a command that it has sent: as `at_work`. Until it ends, host 0 counts as behind."""
        self._carrying_out += 1
        try:
            with self.at_work(timed=timed):
                yield
        finally:
            self._carrying_out -= 1

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Around what all hosts prepare: an error that ends it here is told to the others, who wait for this one."""
        try:
            yield
        except HostLostError:
            raise
        except Exception as error:
            self.fail(f"failed: {error}")
            raise

    def guard(self) -> None:
        """From now on a process of its own ends this one if it stands still for as long as makes it lost to the others. For host 0
        of a server, whose clients have no other way to hear of it."""
        self._guard = self._guard or Guard(SILENCE_SECONDS)

    def _look(self) -> HostLostError | None:
        if self._guard is not None:
            self._guard.beat()
        return self._find_late()

    def _unguard(self) -> None:
        if self._guard is not None:
            self._guard.close()

    def _find_late(self) -> HostLostError | None:
        """Of host 0, on the pulse's thread: a step that does not end, as the fault of who has carried out fewest commands; of host
        0 where nobody is behind it."""
        beats = dict(self._pulse.beats)
        awaits_compile = self.awaits_compile() or any(beat.awaits_compile for beat in beats.values())
        if not self._watchdog.is_late(awaits_compile):
            return None
        done = {0: self.num_commands - self._carrying_out} | {host_id: beat.num_commands for host_id, beat in beats.items()}
        return HostLostError(min(done, key=done.__getitem__), f"did not end a step in {watchdog.STEP_SECONDS:g} s")

    def fail(self, why: str, host_id: int | None = None) -> HostLostError:
        """The group can't go on, for the fault of a host (None: this one). All hosts are told. Returns the error, to be raised."""
        error = self._lose(HostLostError(self.host_id if host_id is None else host_id, why))
        self._pulse.fail(error)
        return error

    def _lose(self, error: HostLostError) -> HostLostError:
        """The first error is the group's."""
        with self._losing:
            self.lost = self.lost or error
            return self.lost

    def on_lost(self, call: Callable[[HostLostError], None]) -> None:
        """Calls this when a host is lost, on a thread of the group's."""
        self._told.append(call)
        if self.lost is not None:
            call(self.lost)

    def _on_lost(self, error: HostLostError) -> None:
        error = self._lose(error)
        self._unguard()  # the pulse ends here, and with it the beats
        logger.error("%s", error)
        for connection in (*self._commands.values(), *self._reports.values()):  # a thread that sends or waits there goes on
            _shut_down(connection)
        for call in self._told:
            try:
                call(error)
            except Exception:
                logger.exception("host %d: who is told of a lost host fails", self.host_id)
        if error.host_id == 0 and not self.leads:  # JAX is about to abort this process: its coordinator was there
            end_process(error.exit_code)
        with self._outside:
            came_back = self._outside.wait_for(lambda: not self._inside, GRACE_SECONDS)
        if not came_back:
            logger.critical("host %d: a step does not come back since then, so that the process ends", self.host_id)
            end_process(error.exit_code)

    def why_broken(self, error: Exception) -> Exception:
        """The HostLostError behind an error of a step's, if a host is lost; else the error."""
        return self._await_lost() or error

    def broke_off(self, error: BaseException, why: str) -> HostLostError:
        """Of a command that failed here: the host whose loss made it fail, which a collective may notice before the beat does; else
        this one, and the others are told why."""
        if any(name in str(error) for name in _COLLECTIVES):
            self._await_lost()
        return self.lost or self.fail(why)

    def _lost_within(self, error: Exception, host_id: int | None = None) -> HostLostError:
        """Why a connection broke: the pulse knows in a moment."""
        return self._await_lost() or HostLostError(0 if host_id is None else host_id, f"has ended ({error!r})")

    def _await_lost(self) -> HostLostError | None:
        deadline = time.monotonic() + GRACE_SECONDS
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.lost

    def close(self) -> None:
        """Ends this process's part: what runs at its end if nobody called it before. Host 0 is the last to go, since JAX aborts the
        others without it."""
        atexit.unregister(self.close)
        if self.lost is not None:  # JAX's own farewell would wait
            end_process(self.lost.exit_code)
        if self.leads:
            self._unguard()
            with contextlib.suppress(HostLostError):
                self.dismiss()
            self._pulse.await_byes(LEAVE_SECONDS)
            self._pulse.close()
            self._leave()
        else:
            self._leave()
            self._pulse.close()


def _dumps(message: Any) -> bytes:
    import pickle

    return pickle.dumps(message, protocol=5)


def _shut_down(connection: Connection) -> None:
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as other:
            other.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def end_process(exit_code: int) -> None:
    """At once, whatever hangs: no farewell of JAX's, but with what was printed."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)
