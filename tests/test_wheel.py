"""The built wheel holds all of the three packages, data files too, and works from another folder, in an environment that has what
the wheel asks for and nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxserve.cli.main import COMMANDS
from kernels.cpu import build, library
from tests import alphabet_model
from tests.alphabet_model import after
from tests.base_install import IMPORT_THE_OTHERS
from tests.kernels.cpu_levels import AUTO

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "kernels", "checkpoints")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The path of the wheel, built without a network (hatchling is one of our tools)."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


def run_pip(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "pip", *args], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def pip(*args: str) -> None:
    done = run_pip("-qq", *args)
    assert done.returncode == 0, done.stderr


def test_holds_every_file_of_the_packages(wheel):
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_has_the_kernels_for_cpus_where_they_can_be_compiled(wheel):
    """Then it is one of this platform, its library what the sources beside it say."""
    if build.missing():
        pytest.skip(f"needs {build.missing()}")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    content = zipfile.ZipFile(wheel).read(f"kernels/cpu/{library.PATH.name}")
    assert build.fingerprint().encode() in content


def build_checkout(folder: Path, kind: str, **environment: str) -> tuple[str, Path, str]:
    """What pip calls for `pip wheel` ("wheel") and `pip install -e` ("editable"), in a short form of a checkout without a library:
    the wheel's name, where the library would be, and stderr."""
    names = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "kernels/cpu/build.py", "kernels/cpu/pool.cc")
    for name in (*names, *(f"{package}/__init__.py" for package in PACKAGES)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    code = f"from hatchling.build import build_{kind} as build; print(build('dist'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1], folder / "kernels/cpu" / library.PATH.name, done.stderr


def test_is_pure_without_a_compiler(tmp_path):
    name, built, said = build_checkout(tmp_path, "wheel", PATH=str(tmp_path), CXX="")
    assert name.endswith("-py3-none-any.whl") and not built.exists()
    assert "no kernels for CPUs are built: that needs" in said


@pytest.mark.parametrize("works", [True, False])
def test_an_editable_install_compiles_them_and_does_not_fail_if_that_does(tmp_path, works):
    if build.missing():
        pytest.skip(f"needs {build.missing()}")
    compiler = tmp_path / "c++"  # its last argument is the output
    compiler.write_text(
        f'#!/bin/sh\nfor last; do :; done\n[ $# = 1 ] || : > "$last"\necho no space left >&2\n{"true" if works else "[ $# = 1 ]"}\n'
    )
    compiler.chmod(0o755)
    name, built, said = build_checkout(tmp_path / "checkout", "editable", CXX=str(compiler))
    assert name.endswith("-py3-none-any.whl") and built.exists() == works
    assert ("no space left" in said) != works


# argv: a model folder. The version, then an answer of each kind of thing that a model needs.
ANSWERS = """
import importlib.metadata, sys
print(importlib.metadata.version("jaxserve"))

plan = jaxserve.BucketPlan(mixed=((16, 2),), head_rows=(2,))
llm = jaxserve.LLM(sys.argv[1], bucket_plan=plan, num_pages=4, page_size=16, compilation_cache_dir="")
greedy = jaxserve.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
(chat,) = llm.chat([{"role": "user", "content": "hi"}], greedy)
(form,) = llm.generate("a", greedy.with_(structured_outputs={"choice": ["no"]}))
kernels = llm.engine.kernels
print(chat.outputs[0].text, form.outputs[0].text, kernels.attention, kernels.layer.rotary, kernels.layer.matmul)
"""


def check_works(python: Path | str, site: Path, folder: Path, **environment: str) -> None:
    """Imports what needs no extra and asks for ANSWERS, outside of the checkout, with the packages that lie in `site`. The
    engine has the backends that "auto" has here."""
    model = alphabet_model.save(folder / "model")
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(python), "-P", "-c", IMPORT_THE_OTHERS + ANSWERS, str(model)]
    done = subprocess.run(
        command, cwd=folder, env={**inherited, "JAX_PLATFORMS": "cpu", **environment}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    *files, version, chat, form, attention, rotary, matmul = done.stdout.split()
    assert files == [str(site / package / "__init__.py") for package in PACKAGES]
    assert (chat, form) == (after("A", 5), "no")
    assert {attention, rotary, matmul} == {AUTO}
    assert not (0, 18, 2) <= tuple(map(int, version.split("."))) < (0, 19, 0)  # see pyproject.toml


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder that pip put the wheel's files in, beside what is installed here."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


@pytest.mark.slow
def test_works_from_another_folder(site, tmp_path):
    """Its files come before the checkout's, which an editable install puts on the path."""
    check_works(sys.executable, site, tmp_path, PYTHONPATH=str(site))


@pytest.mark.slow
def test_the_jaxserve_command(site, tmp_path):
    """What pip makes of the entry point: the list of commands, each one's help, the version, completions of a model."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**inherited, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(site)}

    def command(*args: str) -> str:
        line = [sys.executable, "-P", str(site / "bin" / "jaxserve"), *args]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert all(f"  {name} " in command("--help") for name in ("serve", "generate", "tune profile"))
    for name in COMMANDS.keys() - {"version"}:
        assert command(*name.split(), "--help").startswith(f"usage: jaxserve {name}")
    assert command("version").startswith("jaxserve ")
    model = alphabet_model.save(tmp_path / "model")
    limits = ("--max-model-len=16", "--max-num-seqs=2", "--max-num-batched-tokens=8", "--block-size=16")
    assert command("generate", str(model), "--prompt=A", "--max-tokens=3", "--temperature=0", *limits) == (
        f"\n--- A [length]\n{after('A', 3)}\n"
    )


OFFLINE = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError")  # of urllib3, which pip passes on


@pytest.mark.slow
def test_works_in_an_environment_of_its_own(wheel, tmp_path):
    """A new environment into which pip installs the wheel and what it requires: nothing that the tests or scripts need."""
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=100)
        constraints = ("-c", str(ROOT / "constraints" / "jax.txt"))
        installed = run_pip("--python", str(python), "--retries=1", "install", "--no-compile", *constraints, str(wheel))
        said = installed.stdout + installed.stderr
        if installed.returncode and any(name in said for name in OFFLINE):
            pytest.skip("needs a package index: a network, or pip configured with a mirror (pip config set global.index-url)")
        assert installed.returncode == 0, said
        (site,) = environment.glob("lib/python*/site-packages")
        check_works(python, site, tmp_path, PYTHONDONTWRITEBYTECODE="1")
    finally:
        shutil.rmtree(environment)  # 700 MB
