"""What results say of the code that made them."""

import os
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from jaxserve.cli.common import provenance

PACKAGES = ("jaxserve", "kernels", "checkpoints", "scripts")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of our packages and results, in place of ours; and a function that runs git in it."""
    for name in (*PACKAGES, "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(name)

    def git(*command: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *command], check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "jaxserve" / "cli" / "common" / "provenance.py"))
    return tmp_path, git


@pytest.mark.parametrize("package", PACKAGES)
def test_a_change_of_the_code_marks_the_revision(checkout, package):
    """Of any of our packages, and of nothing else."""
    folder, _ = checkout
    (folder / "benchmarks" / "a.py").write_text("changed")
    clean = provenance.revision()
    assert clean and not clean.endswith("+")
    (folder / package / "a.py").write_text("changed")
    assert provenance.revision() == f"{clean}+"


@pytest.mark.parametrize("package", PACKAGES)
def test_code_is_known_by_its_content(checkout, package):
    """A commit of results changes the revision and not the code; two changes of a file are two codes, committed or not; taken back,
    it is the code of before."""
    folder, git = checkout
    code, revision, file = provenance.code_id(), provenance.revision(), folder / package / "a.py"
    (folder / "benchmarks" / "a.py").write_text("changed")
    git("commit", "-q", "-a", "-m", "results")
    assert provenance.code_id() == code and provenance.revision() != revision and "+" not in code
    changed = []
    for text in ("one", "two"):
        file.write_text(text)
        changed.append(provenance.code_id())
    git("add", ".")
    assert provenance.code_id() == changed[1], "what is staged is a change as well"
    git("commit", "-q", "-m", "two")
    assert len({code, *changed, provenance.code_id()}) == 4 and "+" not in provenance.code_id()
    file.write_text(package)
    git("commit", "-q", "-a", "-m", "as before")
    assert provenance.code_id() == code


def test_code_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "jaxserve" / "cli" / "common" / "provenance.py"))
    assert provenance.code_id() == f"version {metadata.version('jaxserve')}" and provenance.revision() is None


def test_the_machine_is_named():
    """A CPU is one of many: jax calls them all cpu."""
    found = provenance.versions()
    assert found["cpu_cores"] == os.cpu_count() and len(found["cpu"]) > 3
    lines = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert "model name" not in lines or found["cpu"] in lines


def test_files_out_of_the_checkout_are_shown_by_name():
    values = {"a": "/home/me/trace.csv.gz", "b": "../x/steps.json", "c": "benchmarks/a.json", "d": ["/x/y", 3], "e": 0.5}
    values["f"] = str(Path(provenance.__file__).parents[3] / "benchmarks" / "a.json")
    shown = {name: provenance._shown(value) for name, value in values.items()}
    assert shown == {"a": "trace.csv.gz", "b": "steps.json", "c": values["c"], "d": ["y", 3], "e": 0.5, "f": values["c"]}
