"""`LLM` with penalties, bias, allowed ids and bad words, on a model whose greedy output can be written down."""

from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, BucketPlan, SamplingParams
from jaxserve.text.prompts import with_bad_words_tokenized
from tests import alphabet_model
from tests.alphabet_model import after, ids

PLAN = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = alphabet_model.save(tmp_path_factory.mktemp("alphabet"))
    return LLM(folder, bucket_plan=PLAN, num_pages=64, page_size=4, compilation_cache_dir="")


def text_of(llm: LLM, prompt: str, **params) -> str:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 8} | params
    (output,) = llm.generate(prompt, SamplingParams(**given), use_tqdm=False)
    return output.outputs[0].text


def test_a_bad_word_is_never_completed(llm):
    assert text_of(llm, "a") == "bcdefghi"
    text = text_of(llm, "a", bad_words=["def", "x"], max_tokens=40)
    assert text.startswith("bcde") and text[4] != "f" and "def" not in text and "x" not in text
    assert text_of(llm, "cd", bad_words=["def"]) == after("d", 8), "the prompt's tokens complete no bad word"
    assert text_of(llm, "a", bad_words=["cdf", "bd"]) == after("a", 8)


def test_bad_words_are_held_back_after_a_space_too(llm):
    params = with_bad_words_tokenized(SamplingParams(bad_words=["de"], bad_words_token_ids=[[7]]), llm.tokenizer)
    assert params.bad_words is None and params.bad_words_token_ids == (tuple(ids("de")), tuple(ids(" de")), (7,))


def test_bad_words_need_a_tokenizer(llm, tmp_path):
    folder = alphabet_model.save(tmp_path / "model")
    without = LLM(folder, skip_tokenizer_init=True, bucket_plan=PLAN, num_pages=64, page_size=4, compilation_cache_dir="")
    with pytest.raises(ValueError, match=r"bad_words=\('b',\) needs a tokenizer.*use bad_words_token_ids"):
        without.generate(ids("a"), SamplingParams(bad_words=["b"]), use_tqdm=False)
    with pytest.raises(ValueError, match="the engine has no tokenizer: give bad_words_token_ids"):
        llm.engine.add_request("x", ids("a"), SamplingParams(bad_words=["b"]))


def test_bias_allowed_ids_and_penalties(llm):
    assert text_of(llm, "a", logit_bias={ord("z"): 100.0}) == "zzzzzzzz"
    assert text_of(llm, "a", logit_bias={ord("c"): -100.0}).startswith("b")
    assert set(text_of(llm, "a", allowed_token_ids=ids("xyz"))) <= set("xyz")
    towards = {"logit_bias": {ord("z"): 9.0}}
    assert text_of(llm, "a", **towards, presence_penalty=2.0) == "z" * 8
    repeated = text_of(llm, "a", **towards, frequency_penalty=2.0)
    logits, expected, token = alphabet_model.logits, "", ord("a")
    for _ in range(8):
        x = logits(token).astype(np.float64)
        x[ord("z")] += 9.0
        for seen in expected:
            x[ord(seen)] -= 2.0
        token = int(x.argmax())
        expected += chr(token)
    assert repeated == expected and 1 < repeated.count("z") < 8
    assert text_of(llm, "bcd a", repetition_penalty=50.0)[0] not in "bcda ", "the prompt's tokens count"


def test_nothing_left_to_sample_is_refused(llm):
    params = SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[5]], max_tokens=4)
    with pytest.raises(ValueError, match="prompt 0: allowed_token_ids and bad_words together forbid every token at the beginning"):
        llm.generate(["a", "a"], [params, SamplingParams()], use_tqdm=False)
    good = SamplingParams(temperature=0, max_tokens=4)
    bad, other = llm.generate(["a", "a"], [params, good], use_tqdm=False, on_error="return")
    assert bad.outputs[0].finish_reason == "error" and "together forbid every token" in str(bad.outputs[0].stop_reason)
    assert other.outputs[0].text == "bcde"


def test_nothing_left_after_some_tokens_ends_one_request(llm):
    params = SamplingParams(allowed_token_ids=ids("b"), bad_words=["bb"], max_tokens=4)
    bad, good = llm.generate(["a", "a"], [params, SamplingParams(temperature=0, max_tokens=4)], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].text == "b" and llm.engine.stats.bad_rows == 0
    assert "together forbid every token after 1 tokens of the output" in str(bad.outputs[0].stop_reason)
    assert good.outputs[0].text == "bcde"


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_a_form_that_cannot_begin_is_refused(llm, on_error):
    params = SamplingParams(structured_outputs={"choice": ["yes"]}, allowed_token_ids=ids("es"))
    if on_error == "raise":
        with pytest.raises(ValueError, match="allowed_token_ids and structured_outputs together .* token ids 121 could follow"):
            llm.generate("a", params, use_tqdm=False)
        return
    (output,) = llm.generate("a", params, use_tqdm=False, on_error="return")
    assert output.outputs[0].finish_reason == "error" and "could follow" in str(output.outputs[0].stop_reason)
