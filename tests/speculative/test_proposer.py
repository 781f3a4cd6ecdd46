"""What a proposer is told: by a body, of every token that has run; by a head, of what it has sampled."""

import functools
import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve import BucketPlan, Engine, SamplingParams
from jaxserve.execution import programs
from tests import dummy
from tests.engine.test_engine_compiles import num_compiled
from tests.speculative.proposers import Reader

VOCAB, DRAFTS = 32, 2
CONFIG = replace(dummy.CONFIG, vocab_size=VOCAB)
PLAN = BucketPlan(decode=(6,), mixed=((dummy.TOKENS, dummy.SEQS),), head_rows=(dummy.TOKENS,), draft=((2, DRAFTS),))
SPECULATIVE = {"num_speculative_tokens": DRAFTS, "adaptive": False, "acceptance": "rejection"}


def make_engine(monkeypatch, **settings) -> Engine:
    pages, page_size = dummy.SETTINGS["num_pages"], dummy.SETTINGS["page_size"]
    matrix = np.random.default_rng(0).dirichlet([0.2] * VOCAB, VOCAB)
    reader = Reader(DRAFTS, matrix, pages * page_size, dummy.SEQS, dummy.SETTINGS["max_model_len"] // page_size, CONFIG.hidden_size)
    monkeypatch.setattr(programs, "make_proposer", lambda *_: reader)
    settings = {"bucket_plan": PLAN, "speculative_config": SPECULATIVE, **settings}
    return dummy.make_engine(dummy.dummy_model(config=CONFIG), compile_anew="all", **settings)


def add_all(engine: Engine) -> None:
    """More than the pool holds, in chunks, with a beginning that all share."""
    rng = np.random.default_rng(1)
    shared = rng.integers(1, VOCAB, 14).tolist()
    for i in range(12):
        prompt = shared + rng.integers(1, VOCAB, rng.integers(1, 40)).tolist()
        params = SamplingParams(temperature=i % 3 / 2, seed=i, n=1 + i % 2, max_tokens=24, ignore_eos=True)
        engine.add_request(str(i), prompt, params)


@functools.cache
def _logprobs(config):
    model = dummy.dummy_model(config=config)
    return jax.jit(lambda hidden: jax.nn.log_softmax(model.logits(model.final_norm(hidden))))


def check_what_was_read(engine: Engine) -> int:
    """The reader has, where the target has its KV, the hidden row and the id of each token that was computed: by the module's own
    forward over the whole sequence. Returns how many."""
    drafts = dummy.stages(engine)[0].state.rows.drafts
    assert drafts is not None
    state, rows = drafts.proposer, engine.scheduler.rows
    page_size, num_checked = engine.config.cache.page_size, 0
    for request in (r for r in engine._requests if r.row >= 0):
        n, pages = int(rows.num_computed[request.row]), np.array(rows.pages(request.row))
        position = np.arange(n)
        slots = pages[position // page_size] * page_size + position % page_size
        used = -(-n // page_size)
        assert np.array_equal(np.asarray(state["pages"])[request.row, :used], pages[:used])
        assert np.asarray(state["tokens"])[slots].tolist() == request.token_ids[:n]
        padded = np.zeros((dummy.SETTINGS["max_model_len"], CONFIG.hidden_size), np.float32)
        padded[:n] = np.asarray(state["hidden"])[slots]
        np.testing.assert_allclose(
            _logprobs(CONFIG)(padded)[:n], dummy.plain_logprobs(request.token_ids[:n], config=CONFIG), atol=2e-4, rtol=0
        )
        num_checked += n
    return num_checked


@pytest.mark.slow
def test_a_body_shows_every_token_that_it_runs(monkeypatch):
    """And nothing compiles after warm-up, with a state that both programs change and probabilities in it; nor after a sleep."""
    engine = make_engine(monkeypatch, pool_pages=44)
    jax.clear_caches()  # of eager operations, which an engine before this one may have filled
    engine.runner.warm_up()
    held = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(dummy.stages(engine)[0].state.rows.drafts))
    assert engine.runner.programs.draft_bytes == held, "what a pool beside it must leave room for"
    add_all(engine)
    before = num_compiled()
    while engine.has_unfinished_requests():
        engine.step()
    assert num_compiled() == before
    assert set(engine.stats.padding.steps) == set(PLAN.buckets)
    engine.sleep()
    engine.wake_up()
    add_all(engine)
    num_checked, before = 0, num_compiled()
    for step in itertools.count():
        if not engine.has_unfinished_requests():
            break
        engine.step()
        if step % 5 == 0:
            assert num_compiled() == before
            engine.drain()
            num_checked += check_what_was_read(engine)
            before = num_compiled()
    stats = engine.scheduler.stats()
    assert num_checked > 1000 and stats.num_preemptions and stats.num_hit_tokens
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
