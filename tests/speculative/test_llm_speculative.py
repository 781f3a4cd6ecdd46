"""Speculation as a user meets it: the texts are those without it, stop strings and all, and the counts say what it did."""

import pytest

from jaxserve import LLM, BucketPlan, SamplingParams
from jaxserve.serving.messages import LoopStats
from jaxserve.serving.metrics import Metrics
from tests import alphabet_model
from tests.alphabet_model import after

PLAN = BucketPlan(mixed=((24, 4),), head_rows=(24,))
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
PROMPT = "abcdefghijklmnopqrstuvwxyz abcde"  # the model says the alphabet


@pytest.fixture(scope="module")
def llms(tmp_path_factory):
    """(with speculation, without)."""
    folder = alphabet_model.save(tmp_path_factory.mktemp("alphabet"))
    options = {"bucket_plan": PLAN, "num_pages": 64, "page_size": 4, "compilation_cache_dir": ""}
    return LLM(folder, speculative_config=SPECULATIVE, **options), LLM(folder, **options)


@pytest.mark.slow  # a server's texts are compared in tests/serving/test_speculation.py
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"stop": ["kl", "m"]},
        {"stop": ["ijk"], "include_stop_str_in_output": True, "logprobs": 2},
        {"stop": ["j"], "min_tokens": 9, "n": 2, "temperature": 0.01, "seed": 1},
        {"stop": [after("e", 40)[-3:]]},
        {"logprobs": 0, "max_tokens": 1},
    ],
)
def test_texts_are_those_without(llms, params):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, **params})
    (on,), (off,) = (llm.generate([PROMPT], params, use_tqdm=False) for llm in llms)
    for sample, expected in zip(on.outputs, off.outputs, strict=True):
        assert (sample.text, sample.token_ids) == (expected.text, expected.token_ids)
        assert (sample.finish_reason, sample.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert sample.logprobs == expected.logprobs and sample.cumulative_logprob == expected.cumulative_logprob


def test_the_counts_say_what_it_did(llms):
    on, off = llms
    before, steps = on.engine.stats.num_accepted_tokens, on.engine.stats.num_steps
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)  # to the end of the alphabet
    (output,) = on.generate([PROMPT], params, use_tqdm=False)
    metrics, stats = output.metrics, on.engine.stats
    assert metrics.num_accepted_tokens == stats.num_accepted_tokens - before > 14
    assert metrics.num_accepted_tokens <= metrics.num_draft_tokens <= 5 * metrics.num_drafts
    assert stats.num_steps - steps < 8, "six tokens a step"
    assert "% of" in stats.draft_summary and off.engine.stats.draft_summary == "" and not off.engine.stats.steps_by_num_drafts
    assert set(stats.steps_by_num_drafts) <= set(range(6)) and stats.steps_by_num_drafts[5] >= 2
    assert f"{stats.steps_by_num_drafts[5]} with 5" in stats.draft_summary


@pytest.mark.slow
def test_rejection_sampling_is_greedy_where_rows_are(llms, tmp_path):
    """And draws as well as ever where they are not (tests/speculative/test_rejection.py has the statistics)."""
    folder = alphabet_model.save(tmp_path)
    options = {"bucket_plan": PLAN, "num_pages": 64, "page_size": 4, "compilation_cache_dir": ""}
    llm = LLM(folder, speculative_config={**SPECULATIVE, "acceptance": "rejection"}, **options)
    greedy, drawn = SamplingParams(temperature=0, max_tokens=30), SamplingParams(temperature=0.3, seed=4, max_tokens=30)
    on, off = (x.generate([PROMPT, PROMPT], [greedy, drawn], use_tqdm=False) for x in (llm, llms[1]))
    assert on[0].outputs[0].text == off[0].outputs[0].text
    assert on[1].outputs[0].text[:4] == off[1].outputs[0].text[:4], "of a distribution with one likely token"
    assert llm.engine.stats.num_accepted_tokens > 30
    again = llm.generate([PROMPT], drawn, use_tqdm=False)
    assert again[0].outputs[0].token_ids == on[1].outputs[0].token_ids, "whoever shares the batch"


def test_a_wrong_option_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="unknown fields draft"):
        LLM("nowhere", speculative_config={"num_speculative_tokens": 2, "draft": 1})


def test_metrics_have_the_counts_under_vllms_names():
    stats = LoopStats(num_drafts=3, num_draft_tokens=9, num_accepted_tokens=5, num_accepted_tokens_per_pos=(3, 2))
    lines = Metrics("m", stats).render().decode().splitlines()
    for name, value in (("drafts", 3), ("draft_tokens", 9), ("accepted_tokens", 5)):
        assert f'jaxserve:spec_decode_num_{name}_total{{model_name="m"}} {value}.0' in lines
    for position, value in enumerate((3, 2)):
        labels = f'{{model_name="m",position="{position}"}}'
        assert f"jaxserve:spec_decode_num_accepted_tokens_per_pos_total{labels} {value}.0" in lines
