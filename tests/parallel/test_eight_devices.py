"""The tests of eight_devices/ in processes of their own: JAX must be told of virtual devices before it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "eight_devices"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_on_eight_devices(name: str, request: pytest.FixtureRequest):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    marks = request.config.option.markexpr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / f"{name}.py")]
    done = subprocess.run([*command, "-m", marks] if marks else command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    request.node.user_properties.append(("counted", f"{name}: {done.stdout.strip().splitlines()[-1]}"))
