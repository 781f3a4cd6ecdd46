"""Memory that programs work in is asked for once, in a process of its own: malloc's settings are a process's."""

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = """
import ctypes, resource, sys
from jaxserve.execution import host_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes, libc.memset.argtypes = (ctypes.c_void_p,), (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

def faults(num_bytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(num_bytes)
    libc.memset(block, 1, num_bytes)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

size = 64 << 20
faults(size)
before = faults(size)
kept = host_memory.keep_freed()
faults(size)
after = faults(size)
host_memory.give_back()
print(kept, before, after, faults(size), size // resource.getpagesize())
"""

THREADS = """
import ctypes, resource, sys, threading
from jaxserve.execution import host_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes, libc.memset.argtypes = (ctypes.c_void_p,), (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

def take(found):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

size, found = 80 << 20, []  # more than a thread's own heap has
shares = host_memory.share_heap() if sys.argv[1] == "share" else False
host_memory.keep_freed()
thread = threading.Thread(target=lambda: [take(found) for _ in range(3)])
thread.start()
thread.join()
print(shares, min(found), size // resource.getpagesize())
"""


def told(script: str = FAULTS, *args: str, **env: str) -> list[str]:
    command = [sys.executable, "-c", script, *args]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))} | env
    return subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
def test_what_is_freed_is_used_again_until_it_is_given_back():
    kept, *counts = told()
    before, after, given_back, num_pages = map(int, counts)
    assert kept == "True" and before >= num_pages // 2 and after <= num_pages // 20 and given_back >= num_pages // 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
def test_what_the_environment_says_of_malloc_stands():
    kept, _, after, _, num_pages = told(MALLOC_MMAP_MAX_="1000")
    assert kept == "False" and int(after) >= int(num_pages) // 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
def test_a_thread_keeps_more_than_its_own_heap_would_hold():
    shares, least, num_pages = told(THREADS, "share", JAX_PLATFORMS="cpu")
    assert shares == "True" and int(least) <= int(num_pages) // 20
    shares, least, num_pages = told(THREADS, "own", JAX_PLATFORMS="cpu")
    assert shares == "False" and int(least) >= int(num_pages) // 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
@pytest.mark.parametrize(
    "env", [{"MALLOC_ARENA_MAX": "4"}, {"MALLOC_MMAP_MAX_": "1000"}, {"JAX_PLATFORMS": "cuda,cpu"}, {"JAX_PLATFORMS": "cpu,cuda"}]
)
def test_threads_keep_heaps_of_their_own_where_something_else_was_said(env):
    assert told(THREADS, "share", **{"JAX_PLATFORMS": "cpu"} | env)[0] == "False"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
def test_a_package_that_brings_jax_another_device_is_seen(tmp_path):
    has_none = not any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))  # where the tests run
    assert told(THREADS, "share", JAX_PLATFORMS="", PYTHONPATH=str(ROOT))[0] == str(has_none)
    (tmp_path / "jax_plugins").mkdir()
    assert told(THREADS, "share", JAX_PLATFORMS="", PYTHONPATH=f"{ROOT}:{tmp_path}")[0] == "False"
