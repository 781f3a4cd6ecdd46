"""The built wheel holds all of the three packages, data files too, and works from another folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "kernels", "checkpoints")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The path of the wheel, built without a network (hatchling is one of our tools)."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


def pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "-qq", *args]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
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


def test_works_from_another_folder(wheel, tmp_path):
    pip("install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel))
    code = """
import checkpoints, importlib.metadata, jaxserve, kernels
for package in (jaxserve, kernels, checkpoints):
    print(package.__file__)
print(importlib.metadata.version("jaxserve"))

from jaxserve.model_loader import random_model
config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
          "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32}
plan = jaxserve.BucketPlan(mixed=((4, 2),), head_rows=(2,))
llm = jaxserve.LLM.from_params(random_model(config), bucket_plan=plan, num_pages=2, page_size=16, compilation_cache_dir="")
(output,) = llm.generate([1, 2, 3], jaxserve.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
print(len(output.outputs[0].token_ids))
"""
    # -P and PYTHONPATH: the wheel's files come before the checkout's, which an editable install puts on the path.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *files, version, num_tokens = done.stdout.split()
    assert files == [str(tmp_path / "site" / package / "__init__.py") for package in PACKAGES]
    assert num_tokens == "5"
    assert not (0, 18, 2) <= tuple(map(int, version.split("."))) < (0, 19, 0)  # see pyproject.toml
