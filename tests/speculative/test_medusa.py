"""Medusa heads in the engine: drafts are torch's, and outputs those without."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from jaxserve import LLM, Engine, EngineConfig
from jaxserve.models.medusa import MedusaHeads
from tests import dummy
from tests.goldens.golden import ATOL, HERE
from tests.models.test_eagle import target
from tests.models.test_medusa import FOLDER, load
from tests.selection import exhaustive_unless
from tests.speculative import test_engine_speculative as speculative_tests
from tests.speculative.drafts import medusa
from tests.speculative.test_eagle import SETTINGS, drafts_behind
from tests.speculative.test_engine_speculative import CONFIG, PLAN, SMALL_POOL, asks, serve

compiler, expected, tokenizer = speculative_tests.compiler, speculative_tests.expected, speculative_tests.tokenizer
SPECULATIVE = {"method": "medusa", "model": "given", "num_speculative_tokens": 3, "adaptive": False}


@functools.cache
def engine_of_goldens() -> Engine:
    speculative = SPECULATIVE | {"model": str(FOLDER)}
    options = {**SETTINGS, "max_model_len": 64, "speculative_config": speculative, "async_scheduling": False}
    return LLM(HERE / "llama", skip_tokenizer_init=True, **options).engine


@pytest.mark.slow
def test_drafts_are_torchs():
    """Behind a prompt, head k says the token k + 2 places on."""
    engine = engine_of_goldens()
    with np.load(FOLDER / "expected.npz") as golden:
        tokens, logits = golden["tokens"].tolist(), golden["logits"]
    best = np.sort(logits, -1)
    sure = (best[..., -1] - best[..., -2] > 2 * ATOL).all(0)
    assert sure.sum() > 20
    for last in np.flatnonzero(sure)[::4].tolist():
        engine.reset_prefix_cache()
        assert drafts_behind(engine, tokens[: last + 1], 9) == logits[:, last].argmax(-1).tolist(), last


@pytest.mark.slow
@pytest.mark.parametrize("pool_pages", exhaustive_unless(bool, [SMALL_POOL, None]), ids=["small_pool", "large_pool"])
def test_the_output_is_that_without_drafts(compiler, expected, pool_pages):
    settings = {"bucket_plan": PLAN, "pool_pages": pool_pages, "speculative_config": SPECULATIVE}
    on = dummy.make_engine(dummy.dummy_model(config=CONFIG), draft=medusa(CONFIG, 3), **settings)
    assert dummy.differences(serve(on, asks(compiler)), expected.answers) == []
    assert on.stats.num_draft_tokens > 100
    assert (on.scheduler.stats().num_preemptions > 0) == (pool_pages is not None)


def test_what_does_not_fit_is_refused():
    engine = functools.partial(dummy.make_engine, target(), **SETTINGS, max_model_len=64)
    with pytest.raises(ValueError, match="num_speculative_tokens=4 is more than the 3 Medusa heads of model='given'"):
        engine(draft=load(), speculative_config=SPECULATIVE | {"num_speculative_tokens": 4})
    with pytest.raises(ValueError, match="num_speculative_tokens=9 is more than the 3 Medusa heads"):
        speculative = SPECULATIVE | {"num_speculative_tokens": 9, "model": str(FOLDER)}
        LLM(HERE / "llama", skip_tokenizer_init=True, **SETTINGS, speculative_config=speculative)
    with pytest.raises(ValueError, match="method='eagle3' and draft= is Medusa heads: change one of them"):
        engine(draft=load(), speculative_config=SPECULATIVE | {"method": "eagle3"})
    with pytest.raises(ValueError, match="draft= is Medusa heads for another target: their vocab_size is 161, the target's 160"):
        config = replace(load().config, vocab_size=161)
        engine(draft=MedusaHeads.abstract(config, "float32"), speculative_config=SPECULATIVE)
    with pytest.raises(ValueError, match="the draft's weights are bfloat16, the target's float32"):
        engine(draft=load(dtype="bfloat16"), speculative_config=SPECULATIVE)
    assert EngineConfig(speculative_config=SPECULATIVE, kv_store="host:1GiB").speculative, "they keep no pages"
