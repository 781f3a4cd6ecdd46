"""JAX's persistent compilation cache as engines set it up, in a process of its own: the setting is a process's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import json, os, sys
from jaxserve import Engine, EngineConfig
from jaxserve.execution.compilation import compile_counts
from tests.dummy import ONE_BUCKET, SETTINGS, dummy_model

found = []
for folder in sys.argv[1:]:
    engine = Engine(dummy_model(), EngineConfig(**SETTINGS | {"bucket_plan": ONE_BUCKET, "compilation_cache_dir": folder}))
    before = compile_counts()
    engine.runner.programs.get(ONE_BUCKET.buckets[0])
    after = compile_counts()
    files = {name: sorted(os.listdir(name)) if os.path.isdir(name) else [] for name in sys.argv[1:]}
    found.append({"programs": after.programs - before.programs, "hits": after.cache_hits - before.cache_hits, "files": files})
    engine.close()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_an_engine_made_again_finds_its_programs_and_another_folder_is_another_cache(tmp_path):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(tmp_path / "default")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"  # a body takes longer to compile than what is not worth keeping
    command = [sys.executable, "-c", RUN, one, one, other, one]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    first, again, elsewhere, back = json.loads(done.stdout)
    assert {run["programs"] for run in (first, again, elsewhere, back)} == {1}, "the body is asked of JAX each time"
    assert first["hits"] == 0 and first["files"][one] and not first["files"][other]
    assert again["hits"] == 1 and again["files"] == first["files"]
    assert elsewhere["hits"] == 0 and elsewhere["files"][other] and elsewhere["files"][one] == first["files"][one]
    assert back["hits"] == 1 and back["files"] == elsewhere["files"]
