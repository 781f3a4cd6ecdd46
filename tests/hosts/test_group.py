"""Groups of hosts in one process, over pipes: what is said arrives, what must agree does, and who is lost is named."""

import contextlib
import threading
import time
from multiprocessing import Pipe

import pytest

from jaxserve.hosts import group, pulse, watchdog
from jaxserve.hosts.group import HostGroup
from jaxserve.hosts.joining import KINDS
from jaxserve.hosts.pulse import HostLostError


class Hosts:
    """A group whose processes are objects of this one. ended: (host id, exit code) of those that would have ended themselves."""

    def __init__(self, num_hosts: int):
        self.pipes = {(kind, i): Pipe() for kind in KINDS for i in range(1, num_hosts)}
        commands, pulses, reports = ({i: self.pipes[kind, i][0] for i in range(1, num_hosts)} for kind in KINDS)
        self.all = [HostGroup(0, num_hosts, commands, pulses, reports)]
        for i in range(1, num_hosts):
            commands, pulses, reports = ({0: self.pipes[kind, i][1]} for kind in KINDS)
            self.all.append(HostGroup(i, num_hosts, commands, pulses, reports))

    def kill(self, host_id: int) -> None:
        """The others see its connections end, and it sees theirs."""
        for kind in KINDS:
            group._shut_down(self.pipes[kind, host_id][0])


@pytest.fixture
def ended(monkeypatch) -> list[int]:
    """Quick beats, and exit codes instead of ends."""
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(pulse, "SILENCE_SECONDS", 0.4)
    monkeypatch.setattr(group, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(group, "GRACE_SECONDS", 0.3)
    codes: list[int] = []
    monkeypatch.setattr(group, "end_process", codes.append)
    return codes


@pytest.fixture
def hosts(ended):
    made: list[Hosts] = []

    def make(num_hosts: int) -> list[HostGroup]:
        made.append(Hosts(num_hosts))
        make.kill = made[-1].kill
        return made[-1].all

    make.kill = lambda host_id: None
    yield make
    for each in made:
        for one in reversed(each.all):
            one.close()


def each(hosts: list[HostGroup], call) -> list:
    """What call(host) gives, or raises, on each host at once."""
    found: list = [None] * len(hosts)

    def run(i: int) -> None:
        try:
            found[i] = call(hosts[i])
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return found


def eventually(what) -> bool:
    deadline = time.monotonic() + 5
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def test_messages_come_in_order_and_a_dismissal_ends_them(hosts):
    first, second, third = hosts(3)
    for i in range(100):
        first.send(("step", i))
    first.dismiss()
    for host in (second, third):
        assert [host.receive() for _ in range(101)] == [("step", i) for i in range(100)] + [None]


def test_all_hosts_know_what_each_says(hosts):
    assert each(hosts(3), lambda host: host.exchange(10 * host.host_id)) == [[0, 10, 20]] * 3


def test_facts_that_differ_are_named_with_both_values_on_every_host(hosts):
    made = hosts(2)
    assert each(made, lambda host: host.agree({"dtype": "float32"})) == [None, None]
    errors = each(made, lambda host: host.agree({"dtype": "float32", "max_num_seqs": 8 + host.host_id}))
    for error in errors:
        assert isinstance(error, ValueError)
        assert "max_num_seqs is 8 on host 0 and 9 on host 1" in str(error) and "dtype" not in str(error)


def test_a_host_that_ended_is_named_everywhere(hosts, ended):
    first, second, third = hosts(3)
    told: list[HostLostError] = []
    first.on_lost(told.append)
    hosts.kill(2)
    for host in (first, second):
        assert eventually(lambda host=host: host.lost is not None)
        assert host.lost.host_id == 2 and host.lost.exit_code == 102 and "host 2 has ended" in str(host.lost)
        with pytest.raises(HostLostError, match="host 2"):
            host.check()
    with pytest.raises(HostLostError):
        first.send("step")
    with pytest.raises(HostLostError):
        second.receive()
    assert told == [first.lost]
    time.sleep(0.4)
    assert 102 not in ended  # neither was at work: they are told when they ask


def test_a_host_that_is_silent_is_lost(hosts, monkeypatch):
    first, second = hosts(2)
    time.sleep(0.6)
    assert first.lost is None  # beats count, not commands
    monkeypatch.setattr(second._pulse, "_say", lambda what: None)
    assert eventually(lambda: first.lost is not None)
    assert "host 1 was not heard" in str(first.lost)


def test_a_step_that_does_not_come_back_ends_the_process(hosts, ended):
    first, _ = hosts(2)
    with first.at_work():
        hosts.kill(1)
        assert eventually(lambda: 101 in ended)


def test_a_step_that_comes_back_does_not(hosts, ended):
    first, _ = hosts(2)
    with pytest.raises(HostLostError), first.at_work():
        hosts.kill(1)
        assert eventually(lambda: first.lost is not None)
        first.check()
    time.sleep(0.4)
    assert 101 not in ended


def test_a_failure_is_told_to_all(hosts):
    first, second, third = hosts(3)
    raised = second.fail("failed: out of memory")
    assert raised.host_id == 1
    for host in (first, third):
        assert eventually(lambda host=host: host.lost is not None)
        assert "host 1 failed: out of memory" in str(host.lost)
    error = RuntimeError("of a step")
    assert first.why_broken(error) is first.lost


def test_without_host_0_the_others_end_at_once(hosts, ended):
    first, second = hosts(2)
    with second.at_work():
        first.fail("broke off")
        assert eventually(lambda: 100 in ended)


@pytest.mark.parametrize(("done", "in_a_command", "late"), [((5, 3), False, 2), ((5, 5), False, 0), ((5, 4), True, 0)])
def test_a_step_that_does_not_end_is_the_fault_of_who_is_behind(hosts, ended, monkeypatch, done, in_a_command, late):
    """Whatever blocks the thread that waits: here it does not look at the group at all."""
    monkeypatch.setattr(watchdog, "STEP_SECONDS", 0.3)
    monkeypatch.setattr(pulse, "SILENCE_SECONDS", 10.0)  # on a busy machine beats are late
    first, second, third = hosts(3)
    for _ in range(5):
        first.send("step")
    second.num_commands, third.num_commands = done
    with contextlib.suppress(HostLostError), first.carrying_out(timed=True) if in_a_command else first.at_work(timed=True):
        assert eventually(lambda: 100 + late in ended)
    assert eventually(lambda: f"host {late} did not end a step in 0.3 s" in str(first.lost))
    assert all(eventually(lambda host=host: host.lost is not None) for host in (second, third))


def test_what_is_not_of_a_step_may_take_long(hosts, monkeypatch):
    monkeypatch.setattr(watchdog, "STEP_SECONDS", 0.1)
    first, _ = hosts(2)
    with first.carrying_out():
        time.sleep(0.5)
    first.check()


@pytest.mark.parametrize("compiling", [0, 1])
def test_a_step_may_wait_for_a_compile_but_not_for_ever(hosts, monkeypatch, compiling):
    monkeypatch.setattr(watchdog, "STEP_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "COMPILE_SECONDS", 1.0)
    made = hosts(2)
    with contextlib.suppress(HostLostError), made[0].at_work(timed=True):
        made[compiling].awaits_compile = lambda: True
        time.sleep(0.7)
        assert made[0].lost is None
        assert eventually(lambda: made[0].lost is not None)
    with made[0]._watchdog.timed():  # nothing that ended is timed on
        assert len(made[0]._watchdog._begun) == 1
