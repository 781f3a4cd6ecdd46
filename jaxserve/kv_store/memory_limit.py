"""How much of the host's memory this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its container's limit if that is less."""
    return min((os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits()))


def _limits() -> Iterator[int]:
    """The limits of this process's control groups and of those that they are in, of version 2 and of version 1."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # another system
        lines = []
    found = [(line.split(":", 2) + ["", ""])[1:3] for line in lines]
    for controllers, place in [("", "/"), ("memory", "/"), *found]:  # in a container its own group may be shown as the root
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        for folder in (root / place.strip("/"), *(root / place.strip("/")).parents):
            if not folder.is_relative_to(root):
                break
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():  # or "max"
                yield int(text)
