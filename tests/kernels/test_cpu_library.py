"""The library of the kernels for CPUs: its threads, its build, when it is loaded, and what sanitizers say of it."""

import functools
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.engine.kernel_choice import choose_kernels
from kernels.cpu import library
from kernels.fused_matmul import fused_matmul
from tests.dummy import CONFIG, dummy_model, make_engine
from tests.kernels.cpu_levels import AMX_MODEL, model_flags, needs_library, needs_sanitizer

ROOT = Path(__file__).parents[2]
build = importlib.import_module("kernels.cpu.build")


@functools.partial(jax.jit, static_argnames="backend")
def product(x, w, backend="cpu"):
    return fused_matmul(x, w, transposed=True, gated=True, backend=backend)


@functools.cache
def operands() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((40, 192)), jnp.float32), jnp.asarray(rng.standard_normal((640, 192)), jnp.float32)


@needs_library
def test_the_number_of_threads_changes_no_bit():
    x, w = operands()
    np.testing.assert_allclose(product(x, w), product(x, w, backend="xla"), rtol=2e-4, atol=2e-3)
    want = np.asarray(product(x, w))
    try:
        for count in (1, 3, 2, 5):
            library.set_num_threads(count)
            np.testing.assert_array_equal(product(x, w), want)
    finally:
        library.set_num_threads(None)


@needs_library
def test_engines_on_several_threads_share_the_pool():
    """Who finds the pool taken computes alone: nobody waits, nothing is computed twice."""
    x, w = operands()
    want, wrong = np.asarray(product(x, w)), []

    def run():
        for _ in range(200):
            if not np.array_equal(product(x, w), want):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_number_of_threads_below_one_is_refused():
    with pytest.raises(ValueError, match="num_threads=0 must be at least 1, or None"):
        library.set_num_threads(0)


V1 = "9:name=systemd:/\n4:cpu,cpuacct:/docker/a\n3:cpuset:/docker/a\n"


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 4),
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "900000 100000"}, 4),
        ("0::/\n", {}, 4),
        (None, {"cpu.max": "200000 100000"}, 2),  # no /proc
        # its own group, one around it, and one of another
        ("0::/a.slice/b\n", {"a.slice/b/cpu.max": "300000 100000", "a.slice/cpu.max": "max 100000"}, 3),
        ("0::/a.slice/b\n", {"a.slice/b/cpu.max": "300000 100000", "a.slice/cpu.max": "200000 100000"}, 2),
        ("0::/a.slice/b\n", {"a.slice/c/cpu.max": "100000 100000"}, 4),
        # version 1: the group as it is mounted, a container's mount that begins at its group, no limit, another controller's
        (V1, {"cpu,cpuacct/docker/a/cpu.cfs_quota_us": "150000", "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000"}, 2),
        (V1, {"cpu/docker/a/cpu.cfs_quota_us": "150000", "cpu/docker/a/cpu.cfs_period_us": "50000"}, 3),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 1),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"cpuset/docker/a/cpu.cfs_quota_us": "100000", "cpuset/docker/a/cpu.cfs_period_us": "100000"}, 4),
        # both versions at once
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000", "unified/cpu.max": "max 1"}, 2),
    ],
)
def test_threads_follow_the_control_groups(tmp_path, monkeypatch, groups, files, count):
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "mounts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(library, "OWN_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(library, "CGROUPS", tmp_path / "mounts")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert library.available_threads() == count


def test_importing_jaxserve_does_not_load_it():
    code = "import jaxserve; jaxserve.EngineConfig; print('libjaxserve_cpu' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("compiler", "said"), [(None, "a C++ compiler"), ("old", "g++ 11, clang++ 12 or newer")])
def test_without_a_compiler_nothing_is_built(tmp_path, monkeypatch, capsys, compiler, said):
    """Or with one that knows no AMX."""
    old = tmp_path / "c++"
    old.write_text("#!/bin/sh\necho \"g++: error: unrecognized command-line option '-mamx-tile'\" >&2\nexit 1\n")
    old.chmod(0o755)
    if not build.missing():
        monkeypatch.setattr(build, "compiler", lambda: compiler and str(old))
        assert build.build() is False
        assert f"that needs {said}" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", [None, "a C++ compiler"])
@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("missing", "has not been compiled; XLA computes"),
        ("stale", "was compiled from other sources than these; XLA computes"),
        ("later", "was compiled with a later jaxlib than this one; XLA computes"),
    ],
)
def test_a_library_that_must_be_compiled_is_said_once(tmp_path, monkeypatch, caplog, state, said, lacking):
    """A warning with the command where that can be run here. The engines run on XLA."""
    copy = tmp_path / library.PATH.name
    if state != "missing":
        if library.load() is None:
            pytest.skip("needs the library that kernels/cpu/build.py makes")
        sources = build.sources_fingerprint().encode()
        copy.write_bytes(library.PATH.read_bytes().replace(sources, sources if state == "later" else b"0" * len(sources)))
    if state == "later":
        monkeypatch.setattr(build, "ffi_minor", lambda: 0)
    monkeypatch.setattr(library, "PATH", copy)
    monkeypatch.setattr(build, "missing", lambda: lacking)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: pytest.fail("registered"))
    monkeypatch.setattr(library, "load", functools.cache(library.load.__wrapped__))
    caplog.set_level("INFO", "jaxserve")
    chosen = [choose_kernels(CONFIG, "float32", EngineConfig()) for _ in range(2)]
    assert {(choice.attention, choice.layer.matmul) for choice in chosen} == {("xla", "xla")}
    (record,) = [record for record in caplog.records if record.message.startswith("no kernels for CPUs: ")]
    assert said in record.message and f"`python {build.__file__}`" in record.message
    assert record.levelname == ("WARNING" if lacking is None else "INFO")


@needs_library
def test_an_engines_option_sets_the_number_of_threads():
    count = library.load().jaxserve_cpu_num_threads
    try:
        for num_threads, want in ((1, 1), (3, 3), (None, library.available_threads())):
            make_engine(dummy_model(), num_threads=num_threads)
            assert count() == want
    finally:
        library.set_num_threads(None)


@needs_library
def test_an_engine_says_which_instruction_set_it_uses():
    engine = make_engine(dummy_model())
    assert engine.description.instruction_set == library.level() and f"instruction set: {library.level()}; " in engine.describe()
    xla = make_engine(dummy_model(), attention_backend="xla", matmul_backend="xla")
    assert xla.description.instruction_set is None and "instruction set" not in xla.describe()


def test_the_library_is_what_its_sources_say(monkeypatch):
    """Built once: a second build finds it as it should be, and another source would be another library. A stale one, which the
    other tests skip, fails here."""
    if build.missing():
        pytest.skip(f"needs {build.missing()}")
    monkeypatch.setattr(build, "compile_library", lambda *_: pytest.fail("built anew: run make setup"))
    assert build.build()
    before = build.fingerprint()
    monkeypatch.setattr(build, "sources", lambda: [ROOT / "BUILD.md"])
    assert build.fingerprint() != before


RUN_CASES = """
import dataclasses, sys
from pathlib import Path
from kernels.cpu import library
library.PATH = Path(sys.argv[1])
import jax, numpy as np
from tests.kernels import test_fused_matmul, test_grouped_matmul, test_ragged_paged_attention, test_rotary_write
from kernels.ragged_paged_attention.cases import CASES
for level in library.levels():
    for transposed in (False, True):
        test_fused_matmul.test_cpu_computes_what_the_reference_does(level, "bfloat16", transposed)
        test_fused_matmul.test_cpu_computes_what_the_reference_does(level, "float32", transposed)
    test_rotary_write.test_cpu_computes_what_the_reference_does(level, "bfloat16")
    with library.use_level(level):
        for case in CASES:
            if case.dtype != "float16":
                test_ragged_paged_attention.test_matches_unpaged_float64(case, "cpu")
        for case in test_grouped_matmul.CASES:
            if case.dtype != "float16":
                test_grouped_matmul.test_products_are_right_and_nothing_else_is_read(case, "cpu")
print("ran", *library.levels())
"""


@needs_library
@pytest.mark.slow
def test_the_cases_touch_no_memory_but_their_own(tmp_path):
    """AddressSanitizer and UndefinedBehaviorSanitizer over every kernel's cases, on each instruction set; AMX's in software."""
    runtime = f"{needs_sanitizer('libasan.so')} {needs_sanitizer('libstdc++.so.6')}"  # or it does not know how jaxlib throws
    sanitized = tmp_path / "libsanitized.so"
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1")
    build.compile_library(sanitized, *sanitizers, *AMX_MODEL, isas=build.ISAS | {"amx": model_flags()})
    options = "detect_leaks=0:detect_odr_violation=0"
    env = os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": options, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN_CASES, str(sanitized)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stdout.startswith("ran") and done.stdout.endswith("amx\n"), done.stderr[-3000:]


@pytest.mark.slow
def test_the_pool_has_no_races(tmp_path):
    """ThreadSanitizer over the pool: several callers, more and fewer threads, workers that park and wake; and over every kernel
    with four threads."""
    needs_sanitizer("libtsan.so")
    program, source = tmp_path / "pool_test", Path(__file__).with_name("cpu_pool_test.cc")
    flags = [*build.ISAS["avx2"], "-DJAXSERVE_ISA=avx2", "-Wno-psabi", "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    kernels = [str(path) for path in sorted(ROOT.glob("kernels/*/cpu.cc"))]
    command = ["g++", *flags, "-I", str(ROOT), str(source), str(ROOT / "kernels/cpu/pool.cc"), *kernels, "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "right\n", done.stderr[-3000:]
