"""Latencies against numpy on every token's time."""

import numpy as np
import pytest

from jaxserve.workloads.latency import ServedTimes, parse_objectives


def served(n: int = 40, seed: int = 0) -> tuple[ServedTimes, list[np.ndarray]]:
    """Random token times on a coarse clock, and the same as a list of each request's."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.integers(0, 50, n)).astype(float)
    tokens = [a + np.cumsum(rng.integers(1, 4, rng.integers(1, 9))) for a in arrivals]
    gaps, counts = np.unique(np.concatenate([np.diff(t) for t in tokens]), return_counts=True)
    first, last = np.array([t[0] for t in tokens]), np.array([t[-1] for t in tokens])
    return ServedTimes(arrivals, first, last, np.full(n, 7), np.array([len(t) for t in tokens]), gaps, counts), tokens


def test_summary():
    times, tokens = served()
    summary = times.summary(percentiles=(50, 90, 99.9))
    arrivals = times.arrivals
    values = {
        "ttft": [t[0] - a for t, a in zip(tokens, arrivals, strict=True)],
        "tpot": [(t[-1] - t[0]) / (len(t) - 1) for t in tokens if len(t) > 1],
        "itl": np.concatenate([np.diff(t) for t in tokens]),
        "e2el": [t[-1] - a for t, a in zip(tokens, arrivals, strict=True)],
    }
    for metric, x in values.items():
        ms = 1e3 * np.asarray(x)
        expected = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
        expected |= {f"p{p:g}": np.percentile(ms, p) for p in (50, 90, 99.9)}
        for name, value in expected.items():
            assert summary[f"{name}_{metric}_ms"] == pytest.approx(value), (name, metric)
    duration = max(t[-1] for t in tokens) - arrivals.min()
    num_output = sum(map(len, tokens))
    assert summary["duration"] == duration and summary["completed"] == 40
    assert summary["output_throughput"] == pytest.approx(num_output / duration)
    assert summary["total_token_throughput"] == pytest.approx((num_output + 280) / duration)
    at = np.arange(0, 200, 0.5)
    running = [sum(a <= x < t[-1] for a, t in zip(arrivals, tokens, strict=True)) for x in at]
    assert summary["max_concurrent_requests"] == max(running)


def test_goodput():
    times, tokens = served(seed=1)
    good = [
        t[0] - a <= 2 and (len(t) == 1 or (t[-1] - t[0]) / (len(t) - 1) <= 2) for t, a in zip(tokens, times.arrivals, strict=True)
    ]
    summary = times.summary(objectives=parse_objectives(["ttft:2000", "tpot:2000"]))
    assert 0 < sum(good) < 40
    assert summary["request_goodput"] == pytest.approx(sum(good) / times.duration)
    assert times.summary()["request_goodput"] is None


def test_single_tokens_have_no_gaps():
    one = np.ones(1)
    summary = ServedTimes(0 * one, one, one, one, one, np.zeros(0), np.zeros(0, int)).summary()
    assert summary["mean_ttft_ms"] == 1e3 and summary["mean_itl_ms"] is None and summary["p99_tpot_ms"] is None


@pytest.mark.parametrize("item", ["itl:3", "ttft", "ttft:0", "tpot:x", "latency:5"])
def test_bad_objective(item):
    with pytest.raises(ValueError, match=f"goodput '{item}' must be"):
        parse_objectives([item])
