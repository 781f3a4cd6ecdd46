import gzip
import json
import math
import random

import pytest

from jaxserve.workloads.workload import WORKLOADS, Workload, WorkloadRequest, fixed, nano_vllm, random_lengths, sharegpt, trace


def test_nano_vllm_is_the_published_one():
    """Its README gives 133,966 output tokens; the first ids are what its script draws after random.seed(0)."""
    workload = nano_vllm()
    assert len(workload.requests) == 256 and workload.num_output_tokens == 133_966 and workload.temperature == 0.6
    draws = random.Random(0)
    first = draws.randint(100, 1024)
    assert workload.requests[0].prompt_token_ids == tuple(draws.randint(0, 10_000) for _ in range(first))
    assert all(100 <= n <= 1024 for r in workload.requests for n in (r.num_prompt_tokens, r.num_output_tokens))
    assert nano_vllm(num_requests=3, seed=1) == nano_vllm(num_requests=3, seed=1) != nano_vllm(num_requests=3)


def test_prompts_are_spelled_out_or_drawn():
    given = Workload("x", (WorkloadRequest(3, 1, prompt_token_ids=(5, 12, 25)), WorkloadRequest(4, 2)))
    (first, second), (again, other) = given.prompts(10, seed=0), given.prompts(10, seed=1)
    assert first == again == [5, 2, 5]
    assert len(second) == 4 and second != other and set(second) <= set(range(10))
    assert given.prompts(10, seed=1) == [again, other]
    assert (given.num_prompt_tokens, given.num_output_tokens, given.max_len) == (7, 3, 6)


def test_fixed_and_random_lengths():
    for name, pairs in WORKLOADS.items():
        assert [(r.num_prompt_tokens, r.num_output_tokens) for r in fixed(name).requests] == pairs
    assert {(r.num_prompt_tokens, r.num_output_tokens) for r in random_lengths(20, 50, 7).requests} == {(50, 7)}
    varied = random_lengths(500, 100, 20, range_ratio=0.5, seed=3)
    lengths = {r.num_prompt_tokens for r in varied.requests}
    assert min(lengths) == 50 and max(lengths) == 150
    assert {r.num_output_tokens for r in varied.requests} == set(range(10, 31))
    assert varied == random_lengths(500, 100, 20, range_ratio=0.5, seed=3) != random_lengths(500, 100, 20, range_ratio=0.5)


def chat(question: int, answer: int) -> dict:
    return {"conversations": [{"from": "human", "value": "q" * question}, {"from": "gpt", "value": "a" * answer}]}


def test_sharegpt_is_filtered_as_by_vllm(tmp_path):
    """A letter is a token: what is too short either way, has no answer, or is too long alone or together, is left out."""
    fitting = [chat(4, 4), chat(1024, 1024), chat(10, 2038), chat(30, 5)]
    left_out = [chat(3, 50), chat(50, 3), chat(1025, 5), chat(11, 2038), {"conversations": [{"value": "alone, but long enough"}]}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(left_out + fitting))
    workload = sharegpt(path, lambda text: [ord(c) for c in text], 4)
    assert sorted((r.num_prompt_tokens, r.num_output_tokens) for r in workload.requests) == [
        (4, 4),
        (10, 2038),
        (30, 5),
        (1024, 1024),
    ]
    assert workload.requests[0].prompt_token_ids == (ord("q"),) * workload.requests[0].num_prompt_tokens
    orders = {tuple(r.num_prompt_tokens for r in sharegpt(path, list, 4, seed=seed).requests) for seed in range(6)}  # pyright: ignore
    assert len(orders) > 1
    same = sharegpt(path, list, 5, output_len=9)  # pyright: ignore  (the answer of 3 counts no more)
    assert {r.num_output_tokens for r in same.requests} == {9}
    with pytest.raises(ValueError, match="has 4 conversations of a fitting length, 5 were asked for"):
        sharegpt(path, list, 5)  # pyright: ignore
    path.write_text('{"conversations": []}')
    with pytest.raises(ValueError, match="is not ShareGPT's JSON"):
        sharegpt(path, list, 1)  # pyright: ignore


def test_traces_with_and_without_times_and_gzip(tmp_path):
    plain, zipped = tmp_path / "plain.csv", tmp_path / "chat_2023.csv.gz"
    plain.write_text("num_prefill_tokens,num_decode_tokens,other\n374,44,1.5\n396,109,\n5,6,x\n")
    with gzip.open(zipped, "wt") as file:
        file.write("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.25,396,109\n")
    want = WorkloadRequest(374, 44), WorkloadRequest(396, 109)
    assert trace(plain, 2).requests == want
    assert trace(zipped).requests == (want[0], WorkloadRequest(396, 109, 4.25)) and trace(zipped).name == "chat_2023"
    assert trace(plain, max_len=418).requests == (want[0], WorkloadRequest(5, 6))
    with pytest.raises(ValueError, match=r"plain\.csv has 3 requests, 9 were asked for; ask for fewer"):
        trace(plain, 9)
    with pytest.raises(ValueError, match=r"plain\.csv has no request of at most 5 tokens"):
        trace(plain, max_len=5)
    plain.write_text("num_prefill_tokens,num_decode_tokens\n")
    with pytest.raises(ValueError, match=r"plain\.csv has no request: give a file with a line for each"):
        trace(plain)
    plain.write_text("num_prefill_tokens,tokens\n1,2\n")
    with pytest.raises(ValueError, match="lacks the columns num_decode_tokens; found num_prefill_tokens, tokens"):
        trace(plain)
    plain.write_text("num_prefill_tokens,num_decode_tokens\n1,2\n3\n")
    with pytest.raises(ValueError, match=r"plain\.csv:3: num_decode_tokens is missing"):
        trace(plain)
    plain.write_text("num_prefill_tokens,num_decode_tokens,arrived_at\n1,2,0\n3,4,\n")
    with pytest.raises(ValueError, match=r"plain\.csv:3: arrived_at is missing"):
        trace(plain)
    for time in ("nan", "inf", "-inf"):
        plain.write_text(f"num_prefill_tokens,num_decode_tokens,arrived_at\n1,2,0\n3,4,{time}\n")
        with pytest.raises(ValueError, match=rf"plain\.csv:3: arrived_at={time} must be a finite number"):
            trace(plain)
    plain.write_text("num_prefill_tokens,num_decode_tokens\n0,2\n")
    with pytest.raises(ValueError, match="request 0 of workload plain needs at least 1 token each way"):
        trace(plain)


@pytest.mark.parametrize("damage", [lambda whole: whole[:-9], lambda whole: whole[:40] + b"\xff" * 40, lambda _: b"plain text"])
def test_a_damaged_gzip_is_named(tmp_path, damage):
    """Cut, overwritten, or no gzip at all."""
    rows = "".join(f"{10 + i * i % 97},{1 + i % 7}\n" for i in range(300))
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(damage(gzip.compress(b"num_prefill_tokens,num_decode_tokens\n" + rows.encode(), mtime=0)))
    with pytest.raises(ValueError, match=r"cut\.csv\.gz is no whole gzip file: "):
        trace(path)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="name='none' must be one of single"):
        fixed("none")
    with pytest.raises(ValueError, match="range_ratio=1.0 must be in"):
        random_lengths(1, 1, 1, 1.0)
    with pytest.raises(ValueError, match="workload empty has no requests"):
        Workload("empty", ())
    for time in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="request 0 of workload late needs at least 1 token each way and a time from 0 on"):
            Workload("late", (WorkloadRequest(1, 1, time),))
