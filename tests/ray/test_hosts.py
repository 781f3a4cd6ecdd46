"""The processes of a replica on Ray: one that ends before it joins ends the replica's start. Needs `jaxserve[ray]`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.hosts.joining import KEY

pytest.importorskip("ray", reason="Ray is not installed: pip install 'jaxserve[ray]'")


@pytest.mark.slow
def test_a_follower_that_ends_before_it_joins_ends_the_start():
    """With its error, and long before hosts must have come together."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop(KEY, None)
    command = [sys.executable, "-m", "tests.ray.starting"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["raises"] == r"host 1 has ended before it joined: ValueError('its libraries are\nothers')"
    assert said["dies"].startswith("host 1 has ended before it joined: The actor died") and "\n" not in said["dies"]
