"""schemathesis, with all its default checks, against the published schema: what it allows is served, what it forbids is refused.

SCHEMA_EXAMPLES is the number of examples an operation; where it is not set, 5 random ones are tried, and the systematic phase,
which takes 20 s, is left out. `make fuzz-api` does everything, with 100.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import LLM, BucketPlan
from tests import alphabet_model
from tests.serving.http_server import serving

ROOT = Path(__file__).parents[2]
PLAN = BucketPlan(decode=(4,), mixed=((64, 4),), head_rows=(4,))

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "5"))
PHASES = () if "SCHEMA_EXAMPLES" in os.environ else ("--phases=fuzzing",)


@pytest.fixture
def model(tmp_path_factory):
    """One that is long enough for any prompt that is tried: a schema can't count tokens."""
    long = alphabet_model.save(tmp_path_factory.mktemp("long"), max_position_embeddings=1536)
    return LLM(long, bucket_plan=PLAN, num_pages=384, page_size=16, compilation_cache_dir="")


def test_schemathesis(model, tmp_path):
    with serving(model) as server:
        command = [
            Path(sys.executable).with_name("schemathesis"),
            "run",
            f"{server.url}/openapi.json",
            f"--max-examples={EXAMPLES}",
        ]
        seeded = [*command, *PHASES, "--seed=1", "--output-sanitize=false", "--request-timeout=60"]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.serving.schema_hooks", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            seeded, cwd=tmp_path, env=os.environ | hooks, capture_output=True, text=True, timeout=300 + 30 * EXAMPLES
        )
        assert done.returncode == 0, done.stdout[-6000:]
        assert "Tested: 9" in done.stdout
        server.wait_idle()
        assert server.engine.stats.num_failures == 0
