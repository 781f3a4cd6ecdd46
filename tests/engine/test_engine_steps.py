"""Steps of the engine as they are seen from outside: outputs one step late, stats, metrics, the demand log."""

import collections
import json

import jax
import pytest

from jaxserve import Request
from jaxserve.models import named_leaves
from kernels.cpu import library
from tests.dummy import (
    ONE_BUCKET,
    Answer,
    Ask,
    add,
    dummy_model,
    make_engine,
    serve,
    serve_alone,
)
from tests.engine.dummy_runs import GREEDY, finish_all
from tests.workload import requests


def test_first_step_returns_nothing_and_the_next_its_tokens(engine):
    """A step late when asynchronous, at once when not."""
    engine.add_request("x", [1, 2, 3], GREEDY)
    assert engine.step() == []
    (output,) = engine.step()
    assert len(output.new_token_ids) == 1 and not output.finished
    synchronous = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, async_scheduling=False)
    synchronous.add_request("x", [1, 2, 3], GREEDY)
    assert [o.new_token_ids for o in synchronous.step()] == [output.new_token_ids]


def test_drain_keeps_what_it_fetches_for_the_next_step(engine):
    expected = serve_alone(dummy_model(), [Ask([1, 2, 3], GREEDY)], bucket_plan=ONE_BUCKET)["0"]
    engine.add_request("x", [1, 2, 3], GREEDY)
    answers: dict[str, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers.setdefault("x", Answer()).take(output)
        engine.drain()
        assert not engine.pipeline.in_flight
    assert answers["x"] == expected


def test_stats_add_up():
    """Against the schedules and the answers themselves; no prompt is hit or preempted here, so that tokens are what was asked."""
    engine = make_engine(dummy_model(), enable_prefix_caching=False)
    run = serve(engine, requests(True, logprobs=True))
    stats, padding = engine.stats, engine.stats.padding
    asks = requests(True)
    page_size = engine.config.cache.page_size
    shared = [(ask.params.n - 1) * ((len(ask.prompt) - 1) // page_size * page_size) for ask in asks]  # with the first sample
    assert stats.prefill_tokens == sum(len(ask.prompt) * ask.params.n for ask in asks) - sum(shared)
    assert stats.generated_tokens == sum(len(answer.tokens) for answer in run.answers.values())
    assert stats.num_steps == padding.num_steps == len(run.schedules) == run.stats.num_steps
    select = engine.config.plan.select
    buckets = [select(s.num_tokens, s.num_seqs, int(max(s.q_lens))) for s in run.schedules]
    assert padding.steps == collections.Counter(buckets) and len(padding.steps) > 2
    tokens = sum(int(s.q_lens.sum()) for s in run.schedules)
    assert (padding.tokens, padding.tokens + padding.padded_tokens) == (tokens, sum(b.tokens for b in buckets))
    assert padding.samples == sum(int(s.samples.sum()) for s in run.schedules)
    assert padding.padding_share == pytest.approx(1 - tokens / sum(b.tokens for b in buckets))
    assert dict(padding.by_bucket()) == padding.steps


def test_demand_log_has_a_line_a_step(tmp_path):
    path = tmp_path / "demand.jsonl"
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, demand_log=str(path))
    run = serve(engine, requests(True))
    engine.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(run.schedules)
    for i, (line, s) in enumerate(zip(lines, run.schedules, strict=True), 1):
        assert line.pop("waiting") >= 0
        ends, d, page_size = s.starts + s.q_lens, s.num_decodes, engine.config.cache.page_size
        chunks = [range(start, end) for start, end in zip(s.starts[d:].tolist(), ends[d:].tolist(), strict=True)]
        assert line == {
            "step": i,
            "tokens": int(s.q_lens.sum()),
            "seqs": len(s.requests),
            "decodes": s.num_decodes,
            "max_q_len": int(max(s.q_lens)),
            "samples": int(sum(s.samples)),
            "kv_tokens": sum(-(-end // page_size) * page_size for end in ends[:d].tolist()),
            "pairs": sum(position + 1 for chunk in chunks for position in chunk),
            "bucket": [24, 6],
        }


def test_metrics_of_a_request(engine):
    groups: list[list[Request]] = [add(engine, str(i), ask) for i, ask in enumerate(requests(True))]
    finish_all(engine)
    for request in (r for group in groups for r in group):
        m = request.metrics
        assert m is not None and m.first_scheduled_time and m.first_token_time and m.finished_time
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
        assert m.ttft == m.first_token_time - m.arrival_time
        assert m.num_preemptions == request.num_preemptions


def test_state_is_donated_and_weights_are_not(engine):
    """A step reuses its state's buffers: KV pages are written in place, and the old arrays are gone."""
    engine.add_request("x", [1, 2, 3], GREEDY)
    runner = engine.runner
    for _ in range(3):
        state = jax.tree.leaves(runner.state)
        places = [x.unsafe_buffer_pointer() for x in runner.state.kv_pages]
        engine.step()
        assert all(x.is_deleted() for x in state)
        assert [x.unsafe_buffer_pointer() for x in runner.state.kv_pages] == places
    assert not any(x.is_deleted() for x in runner.programs.functions.weights)
    leaves = named_leaves(dummy_model()).values()
    assert {id(x) for x in (*runner.body_weights, *runner.head_weights)} == {id(x) for x in leaves}, "weights were copied"


def test_describe_says_what_was_decided(engine):
    said = engine.describe()
    kernel = "xla" if library.load() is None else "cpu"
    for part in (f"attention: {kernel}", "128 pages of 4 tokens", "24 tokens and 6 sequences", "up to 192 tokens", "5 programs"):
        assert part in said
