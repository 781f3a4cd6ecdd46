"""Where a process takes its place from, and what it says when that is missing, wrong, or nobody answers."""

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import Client

import pytest

from jaxserve.hosts import joining
from jaxserve.hosts.joining import join_hosts


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    for name in os.environ:
        if name.startswith(("LWS_", "SLURM_", "OMPI_", "PMIX_")):
            monkeypatch.delenv(name)


def test_the_environment_of_a_leader_worker_set(monkeypatch):
    for name, value in {"LWS_LEADER_ADDRESS": "leader.svc", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}.items():
        monkeypatch.setenv(name, value)
    nothing = {"num_hosts": None, "host_id": None, "coordinator": None}
    assert joining._place(nothing, os.environ, 1) == joining._Place(4, 3, "leader.svc:9911")
    with pytest.raises(ValueError, match=r"host_id=3 must be in \[0, 1\], with num_hosts=2"):  # what is given wins
        join_hosts(num_hosts=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "num_hosts, host_id, coordinator must be given where neither SLURM"),
        ({"num_hosts": 2, "host_id": 0}, "^coordinator must be given"),
        ({"num_hosts": 1, "host_id": 0, "coordinator": "a:1"}, "num_hosts=1 must be at least 2"),
        ({"num_hosts": 2, "host_id": 2, "coordinator": "a:1"}, r"host_id=2 must be in \[0, 1\]"),
        ({"num_hosts": 2, "host_id": 1, "coordinator": "a"}, "coordinator='a' must be ADDRESS:PORT"),
    ],
)
def test_what_is_missing_or_wrong_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        join_hosts(**given)


def test_slurm_is_read_as_jax_reads_it(monkeypatch):
    said = {"JOB_ID": "7", "NTASKS": "4", "PROCID": "2", "LOCALID": "1", "STEP_NODELIST": "gpu[3-4]", "JOB_NUM_NODES": "2"}
    for name, value in said.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    place = joining._place({"num_hosts": None, "host_id": None, "coordinator": None}, os.environ, 1)
    assert (place.num_hosts, place.host_id, place.local_device_ids) == (4, 2, [1]) and place.coordinator.startswith("gpu3:")


OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_open_mpi_is_read_as_jax_reads_it(monkeypatch):
    """Before its version 5: the launcher's address is host 0's, and the job's number decides on the port."""
    for name, value in {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}.items():
        monkeypatch.setenv(name, value)
    nothing = {"num_hosts": None, "host_id": None, "coordinator": None}
    port = 1531576320 // 2**12 % 2**12 + 2**16 - 2**12
    assert joining._place(nothing, os.environ, 1) == joining._Place(4, 2, f"10.96.0.1:{port}", [1])
    given = joining._place(nothing | {"coordinator": "10.0.0.7:9911"}, os.environ, 1)  # what is given wins
    assert given == joining._Place(4, 2, "10.0.0.7:9911", [1])


def test_open_mpi_5_says_where_a_host_is_and_not_where_they_meet(monkeypatch):
    """JAX asks mpi4py for that, which need not be there."""
    for name, value in {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node-7@1", "OMPI_VERSION": "5.0.6"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining, "find_spec", lambda name: None)
    nothing = {"num_hosts": None, "host_id": None, "coordinator": None}
    with pytest.raises(ValueError, match="^coordinator must be given"):
        joining._place(nothing, os.environ, 1)
    given = joining._place(nothing | {"coordinator": "10.0.0.7:9911"}, os.environ, 1)
    assert given == joining._Place(4, 2, "10.0.0.7:9911", [1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_coordinator_that_does_not_answer_is_named():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(TimeoutError, match=f"host 1 of 2 found no host 0 at {address} in 0.3 s .*: is it started"):
        join_hosts(2, 1, address, timeout=0.3)


def test_hosts_that_do_not_come_are_named_and_a_stranger_is_not_taken_for_one():
    port = free_port()

    def knock() -> None:
        time.sleep(0.2)
        socket.create_connection(("127.0.0.1", port)).close()
        with contextlib.suppress(OSError, EOFError, multiprocessing.AuthenticationError):
            Client(("127.0.0.1", port), authkey=b"another key")
        silent.append(socket.create_connection(("127.0.0.1", port)))  # a health check, say

    silent: list[socket.socket] = []
    stranger = threading.Thread(target=knock)
    stranger.start()
    with pytest.raises(TimeoutError, match=r"host 0 waited 1 s at 127.0.0.1:\d+ for host 1, 2 of 3: are they started"):
        join_hosts(3, 0, f"127.0.0.1:{port}", timeout=1)
    stranger.join()
    silent[0].close()


def test_who_listens_and_says_nothing_is_not_host_0(monkeypatch):
    monkeypatch.setattr(joining, "HANDSHAKE_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=f"host 1 of 2 found no host 0 at {address} in 0.5 s"):
            join_hosts(2, 1, address, timeout=0.5)


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_second_host_of_one_id_and_one_of_another_group_are_refused(num_hosts):
    """Of three hosts two call themselves 1; or one that comes to two belongs to three."""
    port = free_port()
    place = joining._Place(3, 1, f"127.0.0.1:{port}")
    others = [threading.Thread(target=_quietly, args=(joining._reach_leader, place, 1.0)) for _ in range(2)]
    for other in others:
        other.start()
    with pytest.raises(ValueError, match=f"host 1 of 3 came to host 0 of {num_hosts}, where"):
        join_hosts(num_hosts, 0, f"127.0.0.1:{port}", timeout=5)
    for other in others:
        other.join()


def _quietly(call, *args) -> None:
    with contextlib.suppress(TimeoutError):
        call(*args)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"coordinator='{address}': host 0 can't listen there"):
            join_hosts(2, 0, address, timeout=1)
