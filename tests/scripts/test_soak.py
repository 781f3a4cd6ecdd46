"""What scripts.soak asks of a server, and what it takes for a leak; that it runs is tests/serving/test_load.py's."""

import random
from collections import Counter

import pydantic
import pytest

from jaxserve.serving.chat_protocol import ChatRequest
from jaxserve.serving.protocol import CompletionRequest
from scripts.bench.soak_load import Reading, faults, request

FLAT = [Reading(500 * (i + 1), 650 + i % 3, 12 + i % 2, 40) for i in range(9)]


def changed(at: int, **values) -> list[Reading]:
    """FLAT, but from one reading on."""
    return [Reading(**{**vars_of(r), **(values if i >= at else {})}) for i, r in enumerate(FLAT)]


def vars_of(reading: Reading) -> dict:
    return {name: getattr(reading, name) for name in Reading.__dataclass_fields__}


@pytest.mark.parametrize(
    "readings, held, statuses, said",
    [
        (FLAT, 0.0, {"200": 5, "400": 2, "429": 1, "left": 1}, []),
        (changed(2, rss_mb=900), 0.0, {}, []),  # it settles in the first third
        (changed(8, rss_mb=714), 0.0, {}, []),
        (changed(8, rss_mb=715), 0.0, {}, ["memory grew from 650 to 715 MB"]),
        (changed(8, files=44), 0.0, {}, []),
        (changed(8, files=45), 0.0, {}, ["open files grew from 40 to 45"]),
        (changed(8, threads=18), 0.0, {}, ["threads grew from 13 to 18"]),
        (FLAT, 0.25, {}, ["requests or pages stayed behind (0.25)"]),
        (FLAT, 0.0, {"500": 2, "503": 1}, ["2 answers with status 500", "1 answers with status 503"]),
        (FLAT, 0.0, {"ReadError": 3}, ["3 times ReadError"]),
        ([Reading(500, None, None, None)], 0.0, {}, []),  # no process is known
    ],
)
def test_faults(readings, held, statuses, said):
    assert faults(readings, held, Counter(statuses), 64) == said


def test_the_load_has_every_kind_of_request():
    rng, fields, prompts, valid = random.Random(0), set[str](), set[str](), 0
    for _ in range(1000):
        path, body, _ = request(rng)
        fields |= body.keys()
        kind = body.get("prompt")
        prompts.add(f"{type(kind).__name__} of {type(kind[0]).__name__}" if isinstance(kind, list) else type(kind).__name__)
        try:
            (ChatRequest if "chat" in path else CompletionRequest).model_validate(body)
            valid += 1
        except pydantic.ValidationError:
            pass
    assert prompts >= {"str", "list of str", "list of int", "list of list"}
    assert fields >= {"tools", "tool_choice", "response_format", "structured_outputs", "echo", "logprobs", "prompt_logprobs", "n"}
    assert 600 < valid < 950, "most are served, and some are refused"
