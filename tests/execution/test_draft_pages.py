"""The plan that all drafts of a step share, against the lengths of each; and which work lists a draft model's bodies have."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batching.layout import StepLayout
from jaxserve.buckets.plan import Bucket
from jaxserve.execution import programs
from jaxserve.execution.draft_pages import DraftPages
from kernels import gpu
from tests.engine.test_engine_mosaic import CONFIG
from tests.kernels.test_work_list import check

K, PAGE, P = 5, 16, 130
HEADS = replace(CONFIG, num_kv_heads=2, sliding_windows=(None, 70))


@pytest.mark.slow
def test_one_plan_serves_all_drafts():
    """Of rows whose drafts, or whose windows, come past the end of a block or of a chunk, and of padding."""
    positions = np.array([577, 63, 64, 509, 512, 2045, 0, 0, 0], np.int32)
    is_real = np.arange(9) < 7
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"):
        pages = DraftPages(9 * P, PAGE, 9, K, "mosaic_sm90", programs._row_planners("mosaic_sm90", HEADS))
        table = jnp.zeros((9, P), jnp.int32)
        work = pages.plan_drafts(table, jnp.asarray(is_real), jnp.asarray(positions))
    assert set(work) == {"None", "70"}
    for j in range(K):
        context = pages.of_drafts(table, jnp.asarray(is_real), jnp.asarray(np.where(is_real, positions + j, 0)), work)
        q_lens, kv_lens = np.diff(context.cu_q_lens), np.asarray(context.kv_lens)
        assert (q_lens == is_real).all() and (kv_lens == np.where(is_real, positions + j + 1, 0)).all()
        assert context.work is work and context.num_tokens == 7
        for plan in work.values():
            check(plan.planner.shape, q_lens, kv_lens, np.array(plan.packed))


@pytest.mark.parametrize(("heads", "own"), [(2, []), (1, ["draft_work_None", "draft_work_70"])])
def test_a_draft_model_has_work_lists_of_its_own_where_the_targets_are_others(heads, own):
    cache, limits = SimpleNamespace(page_size=PAGE), SimpleNamespace(num_groups=1)
    speculative = SimpleNamespace(method="draft_model", num_speculative_tokens=K)
    config: Any = SimpleNamespace(
        speculative=speculative, cache=cache, scheduler=limits, attention_backend="mosaic_sm90", max_pages_per_seq=P, local=HEADS
    )
    draft = SimpleNamespace(model_config=replace(HEADS, num_kv_heads=heads), dtype=jnp.bfloat16)
    functions: Any = SimpleNamespace(draft=draft)
    bucket = Bucket(64, 8, 57)
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"):
        target, of_draft = programs._planners(config, bucket), programs._draft_planners(config, functions, bucket)
        speculative.method = "eagle3"
        assert programs._draft_planners(config, functions, bucket) == {}
    layout = StepLayout(bucket, 8, PAGE, 8, target, draft_planners=of_draft)
    assert list(layout.lists) == ["work_None", "work_70", *own]
    fields = [name for name, _ in layout.draft_work.values()]
    assert fields == (own or ["work_None", "work_70"]) and set(layout.lists) <= set(layout.fields)
    assert list(layout.draft_work) == list(of_draft) == [None, 70]


def test_a_draft_that_the_kernel_lacks_attends_by_xla_and_says_so(caplog):
    programs._say_fallback.cache_clear()
    draft: Any = SimpleNamespace(model_config=replace(CONFIG, head_dim=80), dtype=jnp.bfloat16)
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"):
        assert [programs.draft_attention(draft, "mosaic_sm90", PAGE) for _ in range(2)] == ["xla"] * 2
        draft.model_config = CONFIG
        assert programs.draft_attention(draft, "mosaic_sm90", PAGE) == "mosaic_sm90"
        assert programs.draft_attention(draft, "mosaic_sm90", 24) == "xla"
    said = [record.message for record in caplog.records]
    assert [m for m in said if "head_dim=80" in m] == [
        "attention of the draft runs on xla: mosaic_sm90 can't do head_dim=80: it has 64 and 128"
    ]
