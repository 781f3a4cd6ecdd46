"""scripts/bootstrap.sh finds a Python, or says where it looked. Nothing is installed: each run ends before pip."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("cat", "cmp", "date", "dirname", "grep", "head", "ls", "rm", "tr")  # what it takes from PATH besides interpreters
# Says that it has another version; makes no environment.
INTERPRETER = """#!/bin/sh
[ "$1" = -m ] && {{ echo "asked for: $*"; exit 3; }}
exec {python} -c 'import sys; sys.version_info = {version}; code = sys.argv.pop(1); exec(code)' "$2"
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the set-up reads, beside an empty home and a PATH without a Python."""
    for name in ("scripts/bootstrap.sh", "pyproject.toml", "constraints/jax.txt"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    (tmp_path / "home").mkdir()
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path / "checkout"


def interpreter(path: Path, *version: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(INTERPRETER.format(python=sys.executable, version=version))
    path.chmod(0o755)
    return path


def set_up(checkout: Path, **environment: object) -> subprocess.CompletedProcess:
    work = checkout.parent
    given = {"PATH": str(work / "bin"), "HOME": str(work / "home")} | {name: str(value) for name, value in environment.items()}
    command = [str(shutil.which("sh")), "scripts/bootstrap.sh"]
    return subprocess.run(command, cwd=checkout, env=given, capture_output=True, text=True, timeout=60)


def test_says_where_it_looked_and_what_it_found(checkout):
    work = checkout.parent
    old = interpreter(work / "bin" / "python3", 3, 8, 2)
    (work / "home/.local/share/uv/python/cpython-3.11.9").mkdir(parents=True)
    done = set_up(checkout)
    assert done.returncode == 1
    first, *looked, advice = done.stderr.splitlines()
    assert first == "jaxserve: needs Python 3.12 or newer to make .venv, and found none:"
    assert [line.strip() for line in looked] == [
        "python3.12: not on PATH",
        "python3.13: not on PATH",
        "python3.14: not on PATH",
        f"python3 on PATH ({old}): Python 3.8.2, too old",
        "python: not on PATH",
        f"{work}/home/.pyenv/versions: not there",
        f"{work}/home/.local/share/uv/python: cpython-3.11.9",
    ]
    assert advice.endswith("make PYTHON=/path/to/python3.12")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("where", ["bin/python3.14", "bin/python", "home/.pyenv/versions/3.13.1/bin/python3"])
def test_takes_the_first_that_is_new_enough(checkout, where):
    """The default python3 is too old."""
    work = checkout.parent
    interpreter(work / "bin" / "python3", 3, 11, 9)
    new = interpreter(work / where, 3, 13, 1)
    done = set_up(checkout)
    assert f"making .venv with Python 3.13.1 ({new})" in done.stderr
    assert done.returncode == 3 and done.stdout == "asked for: -m venv .venv\n"


def test_a_python_that_is_named_is_taken(checkout):
    work = checkout.parent
    interpreter(work / "bin" / "python3.12", 3, 12, 0)
    named = interpreter(work / "elsewhere" / "python", 3, 14, 1)
    done = set_up(checkout, PYTHON=named)
    assert f"making .venv with Python 3.14.1 ({named})" in done.stderr and done.returncode == 3


@pytest.mark.parametrize(("name", "message"), [("none", "not found"), ("old", "Python 3.11.9, too old")])
def test_a_bad_python_that_is_named_is_refused_by_name(checkout, name, message):
    """And no other is taken in its place."""
    work = checkout.parent
    interpreter(work / "bin" / "python3.12", 3, 12, 0)
    interpreter(work / "old", 3, 11, 9)
    done = set_up(checkout, PYTHON=work / name)
    assert done.returncode == 1
    (looked,) = [line for line in done.stderr.splitlines() if line.startswith("  ")]
    assert looked.startswith(f"  PYTHON={work / name}: ") and message in looked
    assert not (checkout / ".venv").exists()
