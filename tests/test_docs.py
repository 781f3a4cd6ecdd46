"""docs/api.md: its examples run, in their order, and every public name has its place there and complete annotations."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"


def test_the_examples_run(tmp_path):
    """Under python -W error, as one program, its lines where they are on the page."""
    lines, inside = [], False
    for line in PAGE.read_text().splitlines():
        lines.append(line if inside and line != "```" else "")
        inside = line == "```python" or (inside and line != "```")
    (tmp_path / "api.py").write_text("\n".join(lines))
    assert "assert" in "\n".join(lines)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # a half-written entry of another process would be a warning
    command = [sys.executable, "-W", "error", str(tmp_path / "api.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


SECTIONS = {  # heading -> what stands under it
    heading: text for heading, _, text in (part.partition("\n") for part in PAGE.read_text().split("\n## ")[1:])
}


@pytest.mark.parametrize("name", (*jaxserve.__all__, "AsyncLLM", "ModelConfig", "Decoder"))
def test_every_public_class_has_a_section_with_an_example(name):
    (text,) = [text for heading, text in SECTIONS.items() if name in heading.split(", ")]
    (example, *_) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert "assert" in example


@pytest.mark.parametrize("name", jaxserve.__all__)
def test_public_methods_are_annotated_and_described(name):
    cls = getattr(jaxserve, name)
    assert inspect.getdoc(cls)
    bare = []
    for attribute, value in vars(cls).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if not inspect.isfunction(function) or (attribute.startswith("_") and attribute != "__init__"):
            continue
        if function.__qualname__.startswith("__create_fn__"):
            continue  # made by dataclass
        signature = inspect.signature(function)
        arguments = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        if any(p.annotation is inspect.Parameter.empty for p in arguments):
            bare.append(attribute)
        if attribute != "__init__" and signature.return_annotation is inspect.Signature.empty:
            bare.append(attribute)
    assert not bare
