"""EAGLE heads in the engine: drafts are torch's, by whatever way a sequence came to where it is, and outputs those without."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, BucketPlan, Engine, SamplingParams
from jaxserve.batching.context import StepContext
from jaxserve.execution.draft_pages import DraftPages
from jaxserve.execution.eagle import _pairs, _single_pairs
from tests import dummy
from tests.goldens.golden import ATOL, HERE
from tests.models.test_eagle import VERSIONS, load, target
from tests.selection import chosen, slow_unless
from tests.speculative import test_engine_speculative as speculative_tests
from tests.speculative.drafts import eagle
from tests.speculative.test_engine_speculative import CONFIG, PLAN, SMALL_POOL, asks, serve

compiler, expected, tokenizer = speculative_tests.compiler, speculative_tests.expected, speculative_tests.tokenizer
SMALL = BucketPlan(mixed=((12, 4),), head_rows=(12,))
SETTINGS = {"bucket_plan": SMALL, "page_size": 4, "num_pages": 64, "max_num_seqs": 4, "compilation_cache_dir": ""}


def method(name: str) -> str:
    return "eagle3" if VERSIONS[name] == 3 else "eagle"


@functools.cache
def engine_of(name: str) -> Engine:
    speculative = {"method": method(name), "model": str(HERE / name), "num_speculative_tokens": 5, "adaptive": False}
    options = {**SETTINGS, "max_model_len": 64, "speculative_config": speculative, "async_scheduling": False}
    return LLM(HERE / "llama", skip_tokenizer_init=True, **options).engine


def drafts_behind(engine: Engine, prompt: list[int], token: int) -> list[int]:
    """What is proposed when `token` has been sampled behind the prompt."""
    params = SamplingParams(temperature=0, allowed_token_ids=[token], max_tokens=9, ignore_eos=True)
    (request,) = engine.add_request("probe", prompt, params)
    while request.num_output_tokens == 0:
        engine.step()
    assert engine.draft_lengths is not None and request.output_token_ids == [token]
    found = engine.draft_lengths.proposed[request.row].tolist()
    engine.abort("probe")
    return found


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "eagle3", list(VERSIONS)))
def test_drafts_are_torchs(name):
    """From prompts in one piece and in chunks; nothing of one is left in the pages of the next, nor do hits of the cache matter."""
    engine = engine_of(name)
    with np.load(HERE / name / "expected.npz") as file:
        golden = dict(file)
    assert golden["gaps"].min() > 2 * ATOL
    tokens = golden["tokens"].tolist()
    for start, drafts in zip(golden["starts"].tolist(), golden["drafts"].tolist(), strict=True):
        engine.reset_prefix_cache()
        assert drafts_behind(engine, tokens[:start], tokens[start]) == drafts, start


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "eagle3", list(VERSIONS)))
def test_drafts_do_not_depend_on_how_a_sequence_came_there(name):
    """Tokens decoded one by one, several at a time and with refused drafts, against the same ones as a prompt."""
    engine, rng = engine_of(name), np.random.default_rng(0)
    engine.reset_prefix_cache()
    prompt = rng.integers(8, 160, 9).tolist()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=0.5)
    (request,) = engine.add_request("0", prompt, params)
    assert engine.draft_lengths is not None
    seen = {}
    while not request.finished:
        engine.step()
        if request.num_output_tokens and not request.finished:
            seen[len(request.token_ids)] = engine.draft_lengths.proposed[request.row].tolist()
    tokens = request.token_ids
    assert len(seen) > 5
    same = 0
    for length, drafts in seen.items():
        engine.reset_prefix_cache()
        same += drafts_behind(engine, tokens[: length - 1], tokens[length - 1]) == drafts
    assert same >= len(seen) - 1, "but for a near tie"


def test_pairs_of_decodes_alone_are_those_of_any_step():
    """The short way of steps of one token each, against the way of all others: the same slots get the same pairs."""
    rng, pages = np.random.default_rng(0), DraftPages(num_pages=24, page_size=4, max_num_seqs=6, num_drafts=3, backend="xla")
    kv_lens = np.array([5, 1, 16, 9, 0, 0], np.int32)  # four sequences, one of which has a single token, and padding
    cu_q_lens = np.array([0, 1, 2, 3, 4, 4, 4], np.int32)
    table = rng.permutation(24).reshape(6, 4).astype(np.int32)
    nowhere = np.zeros(6, np.int32)
    given = map(jnp.asarray, (nowhere, nowhere, table, cu_q_lens, kv_lens, np.int32(4)))
    context = StepContext(*given, work=None, max_q_len=1, backend="xla")
    kept_at = np.array([3, -1, 14, 2, -1, -1], np.int32)  # that of the fourth is not the one before its token
    pairs = [make(context, jnp.asarray(kept_at), pages) for make in (_single_pairs, _pairs)]
    written = []
    for found in pairs:
        slots = np.asarray(found.slots)
        (at,) = (slots < pages.total * pages.page_size).nonzero()
        assert np.asarray(found.from_before)[at].all()
        of_slot = zip(*(np.asarray(x)[at].tolist() for x in (found.seq, found.token, found.positions)), strict=True)
        written.append(dict(zip(slots[at].tolist(), of_slot, strict=True)))
    assert written[0] == written[1] == {table[0, 0] * 4 + 3: (0, 0, 3), table[2, 3] * 4 + 2: (2, 2, 14)}


@pytest.mark.parametrize(
    ("pool", "version"),
    chosen(
        itertools.product(("small_pool", "large_pool"), (1, 3)),
        quick=lambda *_: False,
        in_ci=lambda pool, version: (pool == "small_pool") == (version == 3),
    ),
)
def test_the_output_is_that_without_drafts(compiler, expected, pool, version):
    pool_pages = SMALL_POOL if pool == "small_pool" else None
    speculative = {
        "method": "eagle3" if version == 3 else "eagle",
        "model": "given",
        "num_speculative_tokens": 3,
        "adaptive": False,
    }
    settings = {"bucket_plan": PLAN, "pool_pages": pool_pages, "speculative_config": speculative}
    on = dummy.make_engine(dummy.dummy_model(config=CONFIG), draft=eagle(CONFIG, version), **settings)
    assert dummy.differences(serve(on, asks(compiler)), expected.answers) == []
    assert on.stats.num_draft_tokens > 100
    assert (on.scheduler.stats().num_preemptions > 0) == (pool_pages is not None)


def test_a_head_of_another_method_is_refused():
    speculative = {"method": "eagle", "model": "given", "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="method='eagle' and draft= is an EAGLE-3 head: change one of them"):
        dummy.make_engine(target(), draft=load("eagle3"), speculative_config=speculative, **SETTINGS, max_model_len=64)
    with pytest.raises(ValueError, match="method='eagle' and draft= is a decoder"):
        dummy.make_engine(target(), draft=target(), speculative_config=speculative, **SETTINGS, max_model_len=64)
    with pytest.raises(ValueError, match="draft= is an EAGLE-1 head for another target: its vocab_size is 260"):
        dummy.make_engine(target(), draft=eagle(CONFIG, 1), speculative_config=speculative, **SETTINGS, max_model_len=64)
