"""scripts.bench_engine's bare step is a real one: its tokens are the model's own greedy ones, and come one step late."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import json
import jax
import jax.numpy as jnp
import numpy as np
from jaxserve import BucketPlan, Engine, EngineConfig
from jaxserve.execution.device_state import replace_rows
from jaxserve.models.decoder import named_leaves
from jaxserve.models.loading import random_model
from scripts.bench import bare_step
from jaxserve.cli.common.bench_models import TINY_QWEN3

config = TINY_QWEN3 | {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 1000, "tie_word_embeddings": False}
module = random_model(config, dtype="float32")
plan = BucketPlan(decode=(2,), mixed=((64, 2),), head_rows=(2,))
engine = Engine(module, EngineConfig(bucket_plan=plan, max_num_seqs=2, max_model_len=128, num_pages=8), eos_token_ids=())
bare = bare_step.BareStep(engine, 2, 20)
start = {"num_computed": jnp.zeros(2, jnp.int32), "last_tokens": jnp.array([5, 7], jnp.int32)}  # nothing is computed yet
bare._state = replace_rows(bare._state, **start)
bare._unread = jnp.array([5, 7], jnp.int32)
drawn = [bare.run()[:2].tolist() for _ in range(6)]
follows = np.asarray(jax.jit(module)(jnp.array(drawn).T)).argmax(-1)  # of each token, given those before it
times = bare_step.compare_step(engine, 2, 20)
dense = sum(x.size for name, x in named_leaves(module).items() if "embed" not in name)
expected = 4 * (dense + 2 * 10 * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"])
sizes = [bare_step.step_bytes(engine, 2, 10), expected]
print(json.dumps({"drawn": drawn, "follows": follows.T.tolist(), "times": times, "sizes": sizes}))
"""


@pytest.mark.slow
def test_a_bare_step_decodes(tmp_path):
    environment = os.environ | {"JAXSERVE_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["drawn"][1:] == found["follows"][:-1] and len({tuple(row) for row in found["drawn"]}) == 6
    times = found["times"]
    assert found["sizes"][0] == found["sizes"][1]
    assert times["reading_ms"] == 1e3 * times["bytes"] / times["bytes_per_second"] > 0
    assert times["ratio"] == times["engine_ms"] / times["bare_ms"] > 0
