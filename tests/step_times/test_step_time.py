"""The step-time model: its fit, its interpolation, its file."""

import dataclasses
import json

import numpy as np
import pytest

from jaxserve.buckets.plan import Bucket
from jaxserve.step_times.fitted import StepPoint, StepTimeModel, fit_bucket, fit_buckets, fit_model
from tests.simulation.machines import MODEL


def points(base: float, per_kv: float, per_pair: float, noise: float = 0.0) -> list[StepPoint]:
    rng = np.random.default_rng(0)
    loads = [(0, 0), (0, 5000), (800, 100), (4000, 100), (9000, 2000), (2000, 0)]
    factor = 1 + noise * rng.standard_normal(len(loads))
    return [StepPoint(64, 8, 64, 0, k, p, (base + per_kv * k + per_pair * p) * f) for (k, p), f in zip(loads, factor, strict=True)]


@pytest.mark.parametrize("truth", [(2e-3, 3e-7, 4e-7), (2e-3, 0.0, 4e-7), (1e-3, 3e-7, 0.0), (5e-3, 0.0, 0.0)])
def test_fit_finds_the_coefficients(truth):
    assert fit_bucket(points(*truth)) == pytest.approx(truth, abs=1e-12)


def test_fit_is_never_negative():
    """KV that seems to make a step faster is noise, and must not be extrapolated."""
    falling = [StepPoint(8, 8, 1, 0, kv, 0, 1e-3 - 1e-8 * kv) for kv in (0, 1000, 9000)]
    base, per_kv, per_pair = fit_bucket(falling)
    assert per_kv == per_pair == 0 and 0.91e-3 < base < 1e-3
    assert fit_bucket(points(2e-3, 3e-7, 4e-7, noise=0.02)) == pytest.approx((2e-3, 3e-7, 4e-7), rel=0.15)


def test_a_lucky_bucket_is_not_believed():
    """A bucket whose KV seems to cost half as much as its neighbours': its terms are theirs; another line has its own."""
    loads = [(0, 0), (0, 5000), (800, 100), (4000, 100), (9000, 2000), (2000, 0)]
    points = {}
    for tokens in (64, 128, 256, 512, 1024):
        lucky = 0.5 if tokens == 256 else 1.0
        seconds = [(tokens * 1e-5, 1e-6 * lucky, 2e-7 * lucky), (tokens * 2e-5, 3e-6, 4e-7)]
        for (base, per_kv, per_pair), seqs in zip(seconds, (8, 64), strict=True):
            times = [(k, p, base + per_kv * k + per_pair * p) for k, p in loads]
            points[Bucket(tokens, seqs, tokens)] = [StepPoint(tokens, seqs, tokens, 0, *t) for t in times]
    fitted = fit_buckets(points, levels=[8, 64])
    for bucket, (base, per_kv, per_pair) in fitted.items():
        assert (per_kv, per_pair) == pytest.approx((1e-6, 2e-7) if bucket.seqs == 8 else (3e-6, 4e-7))
        if bucket.tokens != 256:
            assert base == pytest.approx(bucket.tokens * (1e-5 if bucket.seqs == 8 else 2e-5))
    assert fitted[Bucket(256, 8, 256)][0] < 256e-5, "its base makes up for it, within what was measured"


def test_between_measured_buckets():
    """Tokens first, then sequences; a bucket with as many sequences as tokens belongs to the levels above it too."""
    assert MODEL.body_seconds(Bucket(64, 8, 64), 10, 100) == pytest.approx(70e-3 + 10 * 3e-6 + 100e-6)
    assert MODEL.body_seconds(Bucket(64, 6, 64)) == pytest.approx(65e-3)
    assert MODEL.body_seconds(Bucket(36, 8, 36)) == pytest.approx((5e-3 + 70e-3) / 2)
    # (6, 6): of the curve for 4 sequences at 6 tokens, and of the curve for 8, where 6 tokens have 6 sequences.
    four, eight = 4e-3 + 56e-3 * 2 / 60, 4e-3 + 1e-3 * 2 / 4
    assert MODEL.body_seconds(Bucket(6, 6, 6)) == pytest.approx(eight)
    assert MODEL.body_seconds(Bucket(6, 5, 6)) == pytest.approx((four + eight) / 2)
    assert MODEL.body_seconds(Bucket(4, 4, 4)) == pytest.approx(4e-3)
    assert MODEL.body_seconds(Bucket(2, 2, 1)) == pytest.approx(1e-3 + 2e-3 / 7)
    assert MODEL.head_seconds(0) == 0 and MODEL.head_seconds(5) == pytest.approx(1.5e-3)
    assert MODEL.temp_bytes(Bucket(36, 8, 36)) == 900


def test_beyond_what_was_profiled():
    for bucket in (Bucket(66, 8, 66), Bucket(10, 10, 1)):
        with pytest.raises(ValueError, match=r"larger than any that was profiled .*`jaxserve tune profile`"):
            MODEL.body_seconds(bucket)


def test_a_busy_machine_is_slower_than_its_quiet_moments(tmp_path):
    """Times are longer by one factor, the points' median spread; what the fit is judged by stays the quiet moments."""
    points = [
        StepPoint(n, 8, n, 0, k, p, n * 1e-4 + 1e-6 * k + 1e-7 * p) for n in (32, 64) for k, p in ((0, 0), (500, 9), (90, 800))
    ]
    busy = [dataclasses.replace(p, spread=spread) for p, spread in zip(points, (0.1, 0.2, 0.2, 0.2, 0.3, 0.9), strict=True)]
    heads, programs = [(8, 1e-3)], {p.bucket: (1.5, 900) for p in points}
    quiet, typical = (fit_model(some, programs, [8], 16, heads) for some in (points, busy))
    assert quiet.slowdown == 1 and typical.slowdown == pytest.approx(1.2)
    step = (Bucket(48, 8, 48), 8, 100, 200)
    assert typical.seconds(*step) == pytest.approx(1.2 * quiet.seconds(*step)) and quiet.seconds(*step) == pytest.approx(5.92e-3)
    assert typical.compile_seconds(step[0]) == 1.5 and typical.temp_bytes(step[0]) == 900
    typical.save(tmp_path / "steps.json")
    assert typical.error(busy)["max"] < 1e-9 and StepTimeModel.load(tmp_path / "steps.json").seconds(*step) == typical.seconds(
        *step
    )


def test_error_is_relative():
    measured = [StepPoint(64, 8, 64, 0, 0, 0, s) for s in (70e-3, 140e-3, 35e-3)]
    error = MODEL.error(measured)
    assert error["median"] == pytest.approx(0.5) and error["max"] == pytest.approx(1.0) and error["num_points"] == 3


def test_file(tmp_path):
    path = tmp_path / "sub" / "steps.json"
    dataclasses.replace(MODEL, about={"device": "x"}).save(path)
    loaded = StepTimeModel.load(path)
    assert dataclasses.asdict(loaded) | {"about": {}} == dataclasses.asdict(MODEL) and loaded.about == {"device": "x"}


@pytest.mark.parametrize("change", [{"format": "x"}, {"times": []}, {"times": [{"tokens": 1}]}, {"levels": None}, {"more": 1}])
def test_bad_file(tmp_path, change):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(json.loads(MODEL.to_json()) | change))
    with pytest.raises(ValueError, match=r"steps\.json.* cannot be used.*`jaxserve tune profile`"):
        StepTimeModel.load(path)
    with pytest.raises(ValueError, match="cannot be used"):
        StepTimeModel.load(tmp_path / "none.json")
