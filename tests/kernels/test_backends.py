"""A kernel's backends are the rows of its table: a new one is served once its row is there."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import config
from kernels.backends import ATTENTION, GROUPED_MATMUL, Backend, Backends
from kernels.grouped_matmul import gather_rows, grouped_matmul, plan_groups
from kernels.grouped_matmul import xla as grouped_xla
from kernels.ragged_paged_attention import host_planner, plan_work, ragged_paged_attention, resolve_backend, xla
from kernels.ragged_paged_attention.cases import CASES, build
from tests.kernels.cpu_levels import AUTO

ROOT = Path(__file__).parents[2]
MODEL = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": jnp.float32}


def doubled(lacks: str | None = None) -> SimpleNamespace:
    """Functions of an attention backend: twice what "xla" gives."""
    return SimpleNamespace(
        lacks=lambda **_: lacks,
        plan_work=lambda *args, **options: ("planned", xla.plan_work(*args, **options)),
        attend=lambda *arrays, work, **options: 2 * xla.attend(*arrays, work=work and work[1], **options),
    )


def test_the_config_offers_every_row():
    assert config.BACKENDS == ATTENTION.names == ("auto", "reference", "xla", "cpu", "mosaic_portable", "mosaic_sm90")
    assert config.MOE_BACKENDS == GROUPED_MATMUL.names == ("auto", "reference", "xla", "cpu", "mosaic_portable", "mosaic_sm90")


def test_a_row_is_all_that_a_new_attention_needs(monkeypatch):
    monkeypatch.setitem(ATTENTION.rows, "doubled", Backend("doubled", doubled(), automatic=True))
    batch = build(CASES[0])
    _, _, _, cu_q_lens, kv_lens = batch.arrays
    assert resolve_backend("doubled", **MODEL) == resolve_backend("auto", **MODEL) == "doubled"
    want = 2 * np.asarray(ragged_paged_attention(*batch.arrays, backend="xla", **CASES[0].options))
    max_q_len = CASES[0].options.get("max_q_len")
    work = plan_work(cu_q_lens, kv_lens, num_tokens=len(batch.q), max_q_len=max_q_len, backend="doubled")
    assert work[0] == "planned"
    for given in (None, work):
        got = ragged_paged_attention(*batch.arrays, backend="doubled", work=given, **CASES[0].options)
        chex.assert_trees_all_close(np.asarray(got), want)
    assert host_planner("doubled") is None


def test_a_row_that_lacks_something_is_passed_over_or_refused(monkeypatch):
    monkeypatch.setitem(ATTENTION.rows, "doubled", Backend("doubled", doubled("odd head_dims"), automatic=True))
    assert resolve_backend("auto", **MODEL) == AUTO
    with pytest.raises(NotImplementedError, match="doubled can't do odd head_dims; use backend='xla'"):
        resolve_backend("doubled", **MODEL)
    monkeypatch.setitem(ATTENTION.rows, "elsewhere", Backend("elsewhere", doubled(), automatic=True, platforms=("tpu",)))
    assert resolve_backend("auto", **MODEL) == AUTO


def test_a_row_that_plans_on_the_host_is_asked_for_its_planner(monkeypatch):
    functions = doubled()
    functions.make_planner = lambda **shapes: ("planner", shapes)
    monkeypatch.setitem(ATTENTION.rows, "doubled", Backend("doubled", functions, plans_on_host=True))
    make = host_planner("doubled")
    assert make is not None and make(num_tokens=8) == ("planner", {"num_tokens": 8})
    with pytest.raises(NotImplementedError, match="doubled can't plan on the device"):
        plan_work(jnp.zeros(2, jnp.int32), jnp.ones(1, jnp.int32), num_tokens=1, backend="doubled")
    with pytest.raises(
        ValueError, match="backend='tripled' must be one of auto, reference, xla, cpu, mosaic_portable, mosaic_sm90, doubled"
    ):
        host_planner("tripled")


def test_a_row_is_all_that_a_new_grouped_matmul_needs(monkeypatch):
    functions = SimpleNamespace(
        lacks=lambda w: None,
        block_rows=lambda *sizes: 16,
        matmul=lambda x, w, groups: 2 * grouped_xla.matmul(x, w, groups),
    )
    monkeypatch.setitem(GROUPED_MATMUL.rows, "doubled", Backend("doubled", functions))
    ids, w = jnp.asarray([[0, 1], [1, 2]], jnp.int32), jnp.ones((3, 8, 16))
    groups = plan_groups(ids, [w], backend="doubled")
    assert (groups.backend, groups.block_rows) == ("doubled", 16)
    y = grouped_matmul(gather_rows(jnp.ones((2, 8)), groups), w, groups)
    assert (np.asarray(y)[np.asarray(groups.row)] == 16).all()


def test_auto_prefers_the_last_row_that_is_for_the_platform():
    rows = [
        Backend(name, None, automatic=name != "spec", platforms=("gpu",) if name == "fast" else None)
        for name in ("spec", "slow", "fast")
    ]
    table = Backends(*rows)
    assert [row.name for row in table.automatic("gpu")] == ["fast", "slow"]
    assert [row.name for row in table.automatic("cpu")] == ["slow"]


# A fresh interpreter, in which the row is there from the start, as one that is written in the table would be.
SERVED = """
from types import SimpleNamespace
from kernels.backends import ATTENTION, Backend
from kernels.ragged_paged_attention import xla
calls = []
def attend(*arrays, **options):
    calls.append(len(arrays))
    return xla.attend(*arrays, **options)
functions = SimpleNamespace(lacks=xla.lacks, plan_work=xla.plan_work, attend=attend)
ATTENTION.rows["counting"] = Backend("counting", functions)
from jaxserve import Engine, EngineConfig, SamplingParams
from tests.dummy import ONE_BUCKET, SETTINGS, dummy_model
config = EngineConfig(**SETTINGS, bucket_plan=ONE_BUCKET, attention_backend="counting")
engine = Engine(dummy_model(), config, eos_token_ids=())
engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3))
tokens = []
while engine.has_unfinished_requests():
    for output in engine.step():
        tokens += output.new_token_ids
print(engine.config.attention_backend, len(tokens), len(calls))
"""


@pytest.mark.slow
def test_the_engine_serves_a_new_row():
    done = subprocess.run([sys.executable, "-c", SERVED], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    name, num_tokens, num_calls = done.stdout.split()[-3:]
    assert (name, num_tokens) == ("counting", "3")
    assert int(num_calls) >= 2, "once for each layer that is traced: one with a window, one without"
