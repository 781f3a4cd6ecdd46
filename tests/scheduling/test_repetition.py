"""Outputs that end where they repeat themselves: found as by looking at every pattern, whatever the steps are."""

import random

import pytest

from jaxserve.request import Request
from jaxserve.sampling_params import RepetitionDetectionParams, SamplingParams
from jaxserve.scheduling.repetition import RepetitionWatch
from tests.scheduler_harness import Harness, repeats
from tests.scheduling.test_scheduler_drafts import PATTERNS, drain


def watched(prompt: list[int], **asked: int) -> tuple[Request, RepetitionWatch]:
    request = Request("r", prompt, SamplingParams(max_tokens=None, repetition_detection=RepetitionDetectionParams(**asked)))
    return request, RepetitionWatch(request)


@pytest.mark.parametrize("sizes", [(0, 1), (0, 3), (2, 4), (3, 3), (2, 9)], ids=str)
@pytest.mark.parametrize("min_count", [2, 3, 5])
def test_found_as_by_looking_at_every_pattern(sizes, min_count):
    """Outputs of few different tokens, read one by one or several at a time; the prompt, which repeats itself, does not count."""
    found = 0
    for seed in range(30):
        draw = random.Random(seed)
        request, watch = watched([1] * 20, max_pattern_size=sizes[1], min_pattern_size=sizes[0], min_count=min_count)
        for _ in range(60):
            request.token_ids += draw.choices([1, 2], [3, 1], k=draw.choice([1, 1, 3]))
            right = repeats(request.output_token_ids, request.params.repetition_detection)
            assert watch.repeats() == right and watch.repeats() == right, "asked again, it says the same"
            found += right
    assert found > 5


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("config", [{}, {"num_pages": 12}], ids=str)
def test_requests_end_where_they_repeat_themselves_as_alone(depth, num_drafts, config):
    """With and without drafts, results at once or late, with preemptions; beside requests that may repeat themselves."""
    harness = Harness(depth=depth, num_drafts=num_drafts, **config)
    asked = {"max_pattern_size": 2, "min_count": 2}
    requests = [harness.add(3 + i, max_tokens=30, ignore_eos=True, min_tokens=i, repetition_detection=asked) for i in range(12)]
    requests += [harness.add(20 + i, max_tokens=10) for i in range(4)]
    drain(harness, PATTERNS)
    harness.assert_solo(*requests)
    ends = [request.finish_reason for request in requests[:12]]
    assert ends.count("repetition") > 3 and not harness.scheduler.requests.repetitions
    assert {request.stop_reason for request in requests if request.finish_reason == "repetition"} == {"repetition_detected"}
