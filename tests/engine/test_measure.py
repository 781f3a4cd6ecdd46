"""What is measured, and that a profile is fitted from it: on a machine whose steps take what a formula says."""

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.engine.measure import StepMeasurer, grid_plan
from jaxserve.step_times.fitted import refit

PAGE, SEQS, TOKENS = 16, 16, 256


class Formula(StepMeasurer):
    """Steps are not run: `seconds` says what they take, 1 ms a head and 10 us of its row."""

    def __init__(self, curved: bool):
        plan, self.levels = grid_plan(SEQS, TOKENS, 2)
        limits = SimpleNamespace(max_model_len=512, max_num_seqs=SEQS, max_num_batched_tokens=TOKENS)
        self.config: Any = SimpleNamespace(plan=plan, scheduler=limits, cache=SimpleNamespace(num_pages=256, page_size=PAGE))
        self.programs: Any = SimpleNamespace(get=lambda key: SimpleNamespace(memory_analysis=lambda: None))
        self.compile_seconds = collections.defaultdict(lambda: 2.0)
        self.curved = curved
        self._visits = {}

    def visit(self, shape, head_rows=0):
        kv_tokens, pairs = shape.demand(PAGE)
        tokens = shape.bucket.tokens
        base = (1 + tokens // 8 % 2) * 1e-3 if self.curved else 1e-3 + tokens * 1e-5
        seconds = base + kv_tokens * 1e-7 + pairs * 1e-8 + (1e-3 + 1e-5 * head_rows) * (head_rows > 0)
        self._visits.setdefault((shape, head_rows), []).append(seconds)


def test_held_out_steps_have_their_heads():
    """Linear in everything, so that the fit predicts every other step; each samples every sequence of it."""
    measurer = Formula(curved=False)
    model, points = measurer.run()
    held_out = measurer.held_out(40, 1)
    assert {p.head_rows for p in points} == {0, *measurer.plan.head_rows}
    assert all(0 < p.head_rows <= SEQS for p in held_out) and len({p.head_rows for p in held_out}) > 2
    assert model.error(held_out)["max"] < 1e-6 and model.error(points)["max"] < 1e-6
    assert model.heads == tuple((rows, pytest.approx(1e-3 + 1e-5 * rows)) for rows in measurer.plan.head_rows)
    worse = dataclasses.replace(model, heads=tuple((rows, 3 * s) for rows, s in model.heads))
    assert worse.error(held_out)["median"] > 0.2, "heads are not held out"


@pytest.mark.parametrize("max_buckets", [20, 26])
def test_no_more_buckets_than_allowed(max_buckets):
    """Where no bucket is what lies between two others, as many as may be are measured, and not one more."""
    model, _ = Formula(curved=True).run(max_buckets=max_buckets, rounds=1)
    assert len(model.times) == max_buckets
    with pytest.raises(ValueError, match="max_buckets=5 is too few: the fit begins with"):
        Formula(curved=True).run(max_buckets=5)


def test_kept_points_are_fitted_as_measured_ones():
    measurer = Formula(curved=False)
    model, points = measurer.run()
    about = {"points": [vars(p) for p in points], "held_out": [vars(p) for p in measurer.held_out(9, 1)], "date": "then"}
    spoilt = dataclasses.replace(
        model,
        times=tuple(dataclasses.replace(t, base=9.0) for t in model.times),
        heads=((4, 1.0), (16, 2.0)),
        host_seconds=0.5,
        about=about,
    )
    again = refit(spoilt)
    assert again == dataclasses.replace(model, host_seconds=0.5)
    assert again.about["date"] == "then" and again.about["held_out_error"]["max"] < 1e-6 < spoilt.error(points)["median"]
    # A profile without points of heads keeps what it says of them, made to rise.
    bodies = [p for p in about["points"] if not p["head_rows"]]
    headless = dataclasses.replace(spoilt, heads=((4, 3.0), (16, 1.0)), about=about | {"points": bodies})
    assert refit(headless).heads == ((4, 2.0), (16, 2.0)) and refit(headless).times == model.times
    with pytest.raises(ValueError, match="does not keep the points it was fitted to"):
        refit(dataclasses.replace(spoilt, about={}))
