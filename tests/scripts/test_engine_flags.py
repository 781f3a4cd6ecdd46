"""What results say of the code that made them."""

import subprocess

import pytest

from scripts import engine_flags


@pytest.mark.parametrize("package", ["jaxserve", "kernels", "checkpoints", "scripts"])
def test_a_change_of_the_code_marks_the_revision(tmp_path, monkeypatch, package):
    """Of any of our packages, and of nothing else."""
    for name in ("jaxserve", "kernels", "checkpoints", "scripts", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(engine_flags, "__file__", str(tmp_path / "scripts" / "engine_flags.py"))
    (tmp_path / "benchmarks" / "a.py").write_text("changed")
    clean = engine_flags.revision()
    assert clean and not clean.endswith("+")
    (tmp_path / package / "a.py").write_text("changed")
    assert engine_flags.revision() == f"{clean}+"
