"""The memory that a process may use is its control groups' where that is less than the machine's."""

import os

import pytest

from jaxserve.kv_store import memory_limit

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 1 << 20
UNLIMITED = "9223372036854771712"  # as version 1 says it


@pytest.mark.parametrize(
    ("said", "files", "expected"),
    [
        ("0::/", {}, MACHINE),
        ("0::/", {"memory.max": "max"}, MACHINE),
        ("0::/", {"memory.max": f"{64 * MIB}"}, 64 * MIB),  # a container, shown as the root
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": f"{32 * MIB}"}, 32 * MIB),  # a service in a slice
        ("0::/a/b", {"a/b/memory.max": f"{16 * MIB}", "a/memory.max": f"{32 * MIB}"}, 16 * MIB),
        ("0::/a", {"b/memory.max": f"{MIB}"}, MACHINE),  # of others
        ("5:cpu,memory:/c\n0::/", {"memory/c/memory.limit_in_bytes": f"{8 * MIB}"}, 8 * MIB),  # version 1
        ("4:memory:/hidden\n1:cpu:/", {"memory/memory.limit_in_bytes": f"{4 * MIB}"}, 4 * MIB),  # in a container of version 1
        ("4:memory:/c\n1:cpu:/", {"memory/c/memory.limit_in_bytes": UNLIMITED}, MACHINE),
        (None, {}, MACHINE),
    ],
)
def test_the_least_limit_counts(tmp_path, monkeypatch, said, files, expected):
    own = tmp_path / "own"
    if said is not None:
        own.write_text(said + "\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(memory_limit, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory_limit, "OWN_CGROUPS", own)
    assert memory_limit.host_memory_bytes() == expected
