"""A dynamic budget in the engine; its choices, and a simulated engine with it, are tests/simulation/test_tuning.py's."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve import BucketPlan, SamplingParams
from jaxserve.engine.resolution import model_shape
from tests.dummy import Ask, dummy_model, make_engine, serve
from tests.simulation.machines import MODEL, PAGE

PLAN = BucketPlan(mixed=((8, 6), (16, 6), (24, 6)), head_rows=(6,))


@pytest.fixture
def steps(tmp_path):
    MODEL.save(tmp_path / "steps.json")
    return str(tmp_path / "steps.json")


def seconds(schedule) -> float:
    """What the profile says of a step."""
    d = schedule.num_decodes
    kv_tokens = sum(int(start) // PAGE + 1 for start in schedule.starts[:d]) * PAGE
    chunks = zip(schedule.starts[d:].tolist(), schedule.q_lens[d:].tolist(), strict=True)
    pairs = sum(n * start + n * (n + 1) // 2 for start, n in chunks)
    bucket = PLAN.select(schedule.num_tokens, schedule.num_seqs, schedule.max_q_len)
    return MODEL.seconds(bucket, PLAN.select_head_rows(max(1, int(schedule.samples.sum()))), kv_tokens, pairs)


def test_steps_with_decodes_meet_the_objective(steps):
    """Prompts that come while others decode are cut smaller, alone they are not; the answers are the same."""
    objective, rng = 20e-3, np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    asks = [Ask(rng.integers(1, 96, 50).tolist(), params, at=4 * i) for i in range(5)]
    free = serve(make_engine(dummy_model(), bucket_plan=PLAN), asks)
    held = serve(make_engine(dummy_model(), bucket_plan=PLAN, tbt_slo_ms=1e3 * objective, step_times=steps), asks)
    assert {name: a.tokens for name, a in held.answers.items()} == {name: a.tokens for name, a in free.answers.items()}
    both = [s for s in held.schedules if 0 < s.num_decodes < s.num_seqs]
    assert max(s.num_tokens for s in held.schedules if not s.num_decodes) == 24
    assert max(s.num_tokens for s in both) == 16 and max(map(seconds, both)) <= objective
    assert max(seconds(s) for s in free.schedules if 0 < s.num_decodes < s.num_seqs) > 1.1 * objective


def test_a_profile_of_another_model_is_refused(tmp_path):
    """By its model's shape, where it says that."""
    path = str(tmp_path / "steps.json")
    ours = model_shape(dummy_model().config)
    for about in ({}, {"model_shape": ours}):
        replace(MODEL, about=about).save(path)
        make_engine(dummy_model(), bucket_plan=PLAN, tbt_slo_ms=20, step_times=path).close()
    replace(MODEL, about={"model_shape": ours | {"num_layers": 28, "head_dim": 128}}).save(path)
    with pytest.raises(ValueError, match=r"of another model, with num_layers=28 \(here 2\), head_dim=128 \(here 8\): profile this"):
        make_engine(dummy_model(), bucket_plan=PLAN, tbt_slo_ms=20, step_times=path)


def test_a_profile_of_other_bits_is_refused(tmp_path):
    """By the `deterministic` that it was measured with, where it says that."""
    path = str(tmp_path / "steps.json")
    settings: dict[str, Any] = {"bucket_plan": PLAN, "tbt_slo_ms": 20, "step_times": path}
    replace(MODEL, about={"deterministic": "bucket"}).save(path)
    make_engine(dummy_model(), deterministic="bucket", **settings).close()
    with pytest.raises(ValueError, match="deterministic='bucket', not 'always': give deterministic='bucket', or profile again"):
        make_engine(dummy_model(), deterministic="always", **settings)
    replace(MODEL, about={"deterministic": "always"}).save(path)
    with pytest.raises(ValueError, match="deterministic='always', not 'bucket': give deterministic='always', or profile again"):
        make_engine(dummy_model(), deterministic="bucket", **settings)


def test_a_profile_of_other_devices_is_refused(tmp_path):
    """By their number and by what graphs hold; one that does not say is of one device."""
    path = str(tmp_path / "steps.json")
    for about, message in (
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2, not 1: give tensor_parallel_size=2, or profile again"),
        ({"tensor_parallel_size": 1, "graph_collectives": True}, "graph_collectives=True, not False: give graph_collectives=True"),
    ):
        replace(MODEL, about=about).save(path)
        with pytest.raises(ValueError, match=f"was measured with {message}"):
            make_engine(dummy_model(), bucket_plan=PLAN, tbt_slo_ms=20, step_times=path)
    with pytest.raises(ValueError, match="measured with tensor_parallel_size=1, not 4"):
        MODEL.check_devices({"tensor_parallel_size": 4})


def test_an_objective_that_no_step_meets_is_warned_of(steps, caplog):
    with caplog.at_level(logging.WARNING, logger="jaxserve"):
        make_engine(dummy_model(), bucket_plan=PLAN, tbt_slo_ms=20, step_times=steps).close()
        assert not caplog.records
        make_engine(dummy_model(), bucket_plan=PLAN, tbt_slo_ms=0.001, step_times=steps).close()
    (record,) = caplog.records
    alone = MODEL.seconds(PLAN.buckets[0], 6, PAGE, 7 * 8 // 2)  # a decode, and a chunk of 7
    assert f"tbt_slo_ms=0.001: the fastest step of a decode and a part of a prompt, of 8 tokens, takes {1e3 * alone:.3g} ms" in (
        record.getMessage()
    )
