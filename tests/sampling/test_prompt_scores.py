"""Log-probabilities of prompts: against transformers' logits, whatever the chunks, the cache and preemption; and their packing."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.models.loading import load_model
from jaxserve.sampling import prompt_scores as ps
from jaxserve.sampling.rows import ScoredRows
from jaxserve.sampling.scoring import SCORED_AT_ONCE
from tests.dummy import (
    CONFIG,
    ONE_BUCKET,
    SEQS,
    TOKENS,
    VOCAB,
    Ask,
    add,
    assert_empty,
    differences,
    dummy_model,
    make_engine,
    serve,
)
from tests.goldens.golden import ATOL, HERE, load_golden
from tests.sampling.test_sampling import likeliest_first
from tests.selection import slow_unless


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "qwen3_tied", ["qwen3_tied", "mistral"]))
@pytest.mark.parametrize("budget", [7, TOKENS])
def test_prompts_are_worth_what_transformers_says(name, budget):
    """All prompts twice, in chunks, some beside decodes, in a pool too small for all: the second time, everything is cached."""
    golden = load_golden(name)
    model = load_model(HERE / name, skip_tokenizer_init=True, dtype="float32").module
    longest = max(map(len, golden.prompts)) + 9
    config = EngineConfig(
        page_size=4,
        max_model_len=longest,
        max_num_seqs=SEQS,
        max_num_batched_tokens=budget,
        num_pages=-(-longest // 4) + 6,
        bucket_plan=ONE_BUCKET,
        compilation_cache_dir="",
    )
    engine = Engine(model, config)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=3)
    run = serve(engine, [Ask(prompt.tolist(), params) for prompt in (*golden.prompts, *golden.prompts)])
    assert run.stats.num_preemptions and run.num_chunks
    for i, answer in enumerate(run.answers.values()):
        prompt, logits = golden.prompts[i % len(golden.prompts)], golden.logits[i % len(golden.prompts)].astype(np.float64)
        want = (
            logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
        )
        entries = answer.prompt_logprobs
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        for token, x, entry in zip(prompt[1:].tolist(), want, entries[1:], strict=False):
            assert entry is not None and list(entry)[0] == token
            assert set(entry) == {token, *likeliest_first(x)[:3].tolist()}
            for other, (logprob, rank) in entry.items():
                assert abs(logprob - x[other]) < 2 * ATOL
                assert likeliest_first(x)[(rank or 0) - 1] == other


@pytest.mark.slow
def test_the_same_under_cache_chunks_and_preemption_to_the_last_bit():
    """With a vocabulary that is scored in two blocks."""
    model = dummy_model("float32", replace(CONFIG, vocab_size=SCORED_AT_ONCE + 50))
    rng = np.random.default_rng(5)
    shared = rng.integers(1, VOCAB, 21).tolist()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=2)
    asks = [
        Ask(shared[:n] + rng.integers(1, VOCAB, m).tolist(), params, at=n % 4)
        for n, m in ((21, 0), (9, 9), (21, 30), (4, 50), (21, 0))
    ]
    base = serve(make_engine(model, bucket_plan=ONE_BUCKET, enable_prefix_caching=False), asks)
    assert base.stats.num_preemptions == 0
    small = make_engine(model, bucket_plan=ONE_BUCKET, pool_pages=20)
    run = serve(small, asks)
    assert run.stats.num_preemptions > 1
    assert differences(run.answers, base.answers) == []
    again = serve(small, asks)
    assert differences(again.answers, base.answers) == []
    for budget in (6, 7):
        engine = make_engine(model, bucket_plan=ONE_BUCKET, max_num_batched_tokens=budget, pool_pages=24)
        assert differences(serve(engine, asks).answers, base.answers) == []


@pytest.mark.slow
def test_a_scored_prompt_is_written_to_the_cache_and_not_read():
    prompt = list(range(1, 14))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET)
    scored = params.with_(prompt_logprobs=0)
    cached = []
    for asked in (scored, scored, params):
        (request,) = add(engine, "x", Ask(prompt, asked))
        while engine.has_unfinished_requests():
            engine.step()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 12]


def test_scores_from_a_position_on_read_the_cache_before_it():
    prompt = list(range(1, 24))
    params = SamplingParams(max_tokens=1)
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET)
    whole = None
    for first in (1, 1, 2, 8, 9, 22, 23):
        (request,) = engine.add_request("x", prompt, params, score_from=first)
        while engine.has_unfinished_requests():
            engine.step()
        assert request.prompt_scores is not None
        got = request.prompt_scores.logprobs
        whole = got if whole is None else whole
        assert request.num_cached_tokens == (first - 1) // 4 * 4
        assert got.tolist() == whole[first - 1 :].tolist() and not np.isnan(got).any()
    assert_empty(engine)
    for bad in (0, 24):
        with pytest.raises(ValueError, match=f"score_from={bad} must be in"):
            engine.add_request("y", prompt, params, score_from=bad)


def test_spans_fill_batches_of_any_size_and_come_back_to_their_owners():
    rng = np.random.default_rng(0)
    for num_rows in (1, 4, 7, 64):
        spans, at = [], 0
        for n in (1, 5, 2, 9):
            owner = ps.PromptScores(rng.integers(0, 99, n + 3).tolist(), first=2, num_top=n % 3)
            spans.append(ps.ScoreSpan(owner, 3, at + 1, n))
            at += n + 2
        batches = ps.pack_spans(spans, num_rows)
        assert len(batches) == -(-17 // num_rows) and all(len(b) == 1 + 2 * num_rows and b[0] == 1 for b in batches)
        flat = np.concatenate([b[1:].reshape(2, num_rows) for b in batches], axis=1)
        rows, tokens = flat[:, :17]
        assert rows.tolist() == [s.row + i for s in spans for i in range(s.count)]
        assert tokens.tolist() == [t for s in spans for t in s.scores.token_ids[3 : 3 + s.count]]
        assert not flat[:, 17:].any()
        values = np.arange(flat.shape[1], dtype=np.float32)
        ps.deliver(spans, ScoredRows(values, flat[0], np.tile(values[:, None], 5).astype(np.int32), np.tile(values[:, None], 5)))
        done = 0
        for span in spans:
            assert np.isnan(span.scores.logprobs[0])
            assert span.scores.logprobs[1:].tolist() == values[done : done + span.count].tolist()
            assert span.scores.top_ids.shape == (span.count + 1, (span.count) % 3)
            done += span.count
