"""Workloads by distribution and arrival against what they promise."""

import numpy as np
import pytest

from jaxserve.workloads.traffic import (
    LENGTH_FITS,
    NORMAL_P90,
    LengthFit,
    as_recorded,
    at_once,
    at_rate,
    describe,
    fitting,
    in_groups,
    log_normal,
    multi_turn,
    repeated,
    shared_prefix,
    stretches,
)
from jaxserve.workloads.workload import Workload, WorkloadRequest


@pytest.mark.parametrize("name", sorted(LENGTH_FITS))
def test_log_normal_quantiles(name):
    """Those of the requests that the cap on both together leaves are the published ones."""
    fit, work = LENGTH_FITS[name], log_normal(name, 20_000, seed=1)
    prompt, output = (np.array([getattr(r, f"num_{n}_tokens") for r in work.requests]) for n in ("prompt", "output"))
    assert (prompt + output).max() <= fit.max_total and len(prompt) == 20_000
    for lengths, published in ((prompt, fit.prompt), (output, fit.output)):
        assert np.quantile(lengths, [0.5, 0.9]) == pytest.approx(published, rel=0.05)
    assert log_normal(name, 50, 1) == log_normal(name, 50, 1) != log_normal(name, 50, 2)


def test_lengths_that_no_fit_has():
    """A prompt whose P90 is the cap itself; and where the cap is far away it changes nothing."""
    with pytest.raises(ValueError, match="no log-normal lengths of at most 1000 tokens"):
        LengthFit((500, 999), (400, 800), 1000).normals.any()
    far = LengthFit((100, 200), (50, 80), 100_000).normals
    assert far == pytest.approx(np.array([[np.log(100), np.log(2) / NORMAL_P90], [np.log(50), np.log(1.6) / NORMAL_P90]]), rel=1e-3)


def test_shared_prefix():
    work = shared_prefix(40, 4, 100, 10, 5, 1000, seed=0)
    prompts = [r.prompt_token_ids or () for r in work.requests]
    assert all(len(p) == 110 for p in prompts)
    assert len({p[:100] for p in prompts}) == 4 and len({p[100:] for p in prompts}) == 40


def test_requests_in_groups():
    work = Workload("some", tuple(WorkloadRequest(n, 2, float(n)) for n in (5, 9, 1, 9, 30) * 20))
    grouped = in_groups(work, 3, 8, 1)
    assert grouped.lengths == work.lengths and [r.arrived_at for r in grouped.requests] == [r.arrived_at for r in work.requests]
    prompts = [list(r.prompt_token_ids or ()) for r in grouped.requests]
    assert [len(prompt) for prompt in prompts] == [r.num_prompt_tokens for r in work.requests]
    starts = {tuple(prompt[:8]) for prompt in prompts if len(prompt) > 8}
    assert len(starts) == 3 and all(len(set(start)) == 1 for start in starts)
    for i, prompt in enumerate(prompts):
        rest = prompt[min(8, len(prompt) - 1) :]
        assert all(rest[0] not in other for j, other in enumerate(prompts) if j != i), "behind the prefix each is its own"
    (first, *_) = grouped.requests
    assert first.prompt_token_ids is not None
    assert [first.prompt_token_ids[i] for i in range(-5, 5)] == prompts[0] * 2 and first.prompt_token_ids[1:3] == prompts[0][1:3]
    assert in_groups(work, 3, 8, 1) == grouped != in_groups(work, 3, 8, 2)
    for wrong in ((0, 8), (3, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            in_groups(work, *wrong, 1)
    with pytest.raises(ValueError, match="token ids of their own"):
        in_groups(grouped, 3, 8, 1)


def test_multi_turn():
    work = multi_turn(3, 4, 10, 5, 1000, seed=0)
    turns = [work.requests[i::3] for i in range(3)]
    for conversation in turns:
        assert [r.num_prompt_tokens for r in conversation] == [10, 25, 40, 55]
        for before, after in zip(conversation, conversation[1:], strict=False):
            assert (after.prompt_token_ids or ())[: before.num_prompt_tokens] == before.prompt_token_ids


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_rate_and_burstiness(burstiness):
    """A Gamma of shape b has a coefficient of variation of 1 / sqrt(b); the rate is met exactly."""
    work = at_rate(Workload("x", (WorkloadRequest(5, 5),) * 20_001), 8.0, seed=3, burstiness=burstiness)
    times = np.array([r.arrived_at for r in work.requests])
    gaps = np.diff(times)
    assert times[0] == 0 and times[-1] == pytest.approx(20_000 / 8)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert work == at_rate(work, 8.0, 3, burstiness) != at_rate(work, 8.0, 4, burstiness)


def test_times():
    work = Workload("x", (WorkloadRequest(1, 1, 7.0), WorkloadRequest(2, 2, 5.0)))
    recorded = as_recorded(work)
    assert [(r.num_prompt_tokens, r.arrived_at) for r in recorded.requests] == [(2, 0.0), (1, 2.0)]
    assert [(r.num_prompt_tokens, r.arrived_at) for r in at_once(work).requests] == [(1, 0.0), (2, 0.0)]
    assert at_rate(Workload("x", work.requests[:1]), 2.0, 0).requests[0].arrived_at == 0
    assert "x: 2 requests, prompt 2/2/2 tokens (P50/P90/P99)" in describe(work)


def test_bad_input():
    work = Workload("x", (WorkloadRequest(1, 1), WorkloadRequest(5, 1)))
    assert fitting(work, 6) == (work, 0) and fitting(work, 5) == (Workload("x", work.requests[:1]), 1)
    with pytest.raises(
        ValueError, match="no request of x fits max_model_len=1: the shortest has 2 tokens, the longest 6; raise it"
    ):
        fitting(work, 1)
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="must be above 0"):
            at_rate(work, rate, 0, burstiness)
    with pytest.raises(ValueError, match="must be one of openchat_sharegpt4, arxiv_summarization"):
        log_normal("other", 1, 0)


def test_repeated():
    """Two of the same, a mean gap apart."""
    once = as_recorded(Workload("some", tuple(WorkloadRequest(4, 2, t) for t in (1.0, 2.0, 5.0))))
    twice = repeated(once, 2)
    assert [r.arrived_at for r in twice.requests] == [0.0, 1.0, 4.0, 6.0, 7.0, 10.0]
    assert repeated(once, 1) == once
    with pytest.raises(ValueError, match="times=0 must be at least 1"):
        repeated(once, 0)


def test_stretches():
    """Runs of neighbours from the beginning to the end, at the workload's own pace, also where one run follows another."""
    work = at_rate(log_normal("openchat_sharegpt4", 5000, 1), 3.0, 1)
    part = stretches(work, 1300, 400)
    rows = [*range(400), *range(2300, 2700), *range(4600, 5000)]
    assert part.lengths == [work.lengths[row] for row in rows] and part.name == work.name
    before = [0.0, *(r.arrived_at for r in work.requests)]
    arrivals, gaps = [r.arrived_at for r in part.requests], [before[row + 1] - before[row] for row in rows]
    assert np.diff(arrivals, prepend=0.0) == pytest.approx(gaps, abs=1e-9)
    assert arrivals[-1] / 1200 == pytest.approx(1 / 3, rel=0.1)
    whole = stretches(work, 5000)
    assert whole.lengths == work.lengths and arrivals[-1] < whole.requests[-1].arrived_at == pytest.approx(before[-1])
    for num_requests, length in ((6000, 500), (300, 500)):
        with pytest.raises(ValueError, match=f"num_requests={num_requests} of 5000 in runs of {length}"):
            stretches(work, num_requests, length)
