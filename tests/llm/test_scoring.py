"""`LLM.score` and prompt_logprobs, on a model whose logits can be written down (tests/alphabet_model.py)."""

import numpy as np
import pytest

from jaxserve import LLM, BucketPlan, Logprob, SamplingParams
from tests import alphabet_model
from tests.alphabet_model import ids

PLAN = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = alphabet_model.save(tmp_path_factory.mktemp("alphabet"))
    return LLM(folder, bucket_plan=PLAN, num_pages=64, page_size=4, compilation_cache_dir="")


def logprobs_of(text: str) -> np.ndarray:  # f64[len(text) - 1, VOCABULARY]
    x = np.array([alphabet_model.logits(token) for token in ids(text)], np.float64)[:-1]
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def expected(text: str, first: int = 1) -> np.ndarray:
    return logprobs_of(text)[np.arange(len(text) - 1), ids(text)[1:]][first - 1 :]


LONG = "the quick brown fox jumps over the lazy dog, twice, and then it goes home"


def test_score_of_texts_in_every_form(llm):
    texts = ["abc", {"prompt": "hello"}, ids("xyz"), {"prompt_token_ids": ids("no")}, LONG, "a", tuple(ids("ab"))]
    outputs = llm.score(texts, use_tqdm=False)
    for output, text in zip(outputs, ["abc", "hello", "xyz", "no", LONG, "a", "ab"], strict=True):
        assert output.token_ids == ids(text)[1:] and output.num_context_tokens == 1
        np.testing.assert_allclose(output.logprobs, expected(text), atol=1e-4)
        assert output.cumulative_logprob == pytest.approx(expected(text).sum(), abs=1e-2)
    assert [o.text for o in outputs] == ["abc", "hello", None, None, LONG, "a", None]
    (one,) = llm.score("abc", use_tqdm=False)
    assert one.logprobs.tolist() == outputs[0].logprobs.tolist()
    assert llm.score([], use_tqdm=False) == []


def test_score_of_completions(llm):
    context = "which letter comes next? a"
    pairs = [(context, c) for c in ("b", "bcd", "x", LONG)]
    outputs = llm.score(pairs, use_tqdm=False)
    for output, (_, completion) in zip(outputs, pairs, strict=True):
        assert output.token_ids == ids(completion) and output.num_context_tokens == len(context)
        np.testing.assert_allclose(output.logprobs, expected(context + completion, len(context)), atol=1e-4)
    assert np.argmax([o.logprobs[0] for o in outputs]) == 0, "b comes after a"
    (one,) = llm.score((context, "b"), use_tqdm=False)
    assert one.logprobs.tolist() == outputs[0].logprobs.tolist() and one.text == context + "b"


def test_completions_of_one_context_compute_it_once(llm):
    before = llm.engine.scheduler.stats().num_hit_tokens
    context = "a context of six pages.."
    llm.score([(context, c) for c in "abcdef"], use_tqdm=False)
    assert llm.engine.scheduler.stats().num_hit_tokens - before == 5 * ((len(context) - 1) // 4 * 4)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("", "b"), "empty context or completion"),
        (("a", ""), "empty context or completion"),
        (({"prompt": "a", "cache_salt": "x"}, {"prompt": "b", "cache_salt": "y"}), "cache_salt='y' differs from the context's 'x'"),
        (("a", {"prompt": "b", "cache_salt": "y"}), "cache_salt='y' differs from the context's None"),
        ("", "empty prompt"),
        ([None], "must be a text, or give"),
        ([("a", 5)], "is no prompt"),
        ("x" * 300, "max_model_len"),
    ],
)
def test_what_can_not_be_scored_is_refused(llm, texts, message):
    with pytest.raises(ValueError, match=message):
        llm.score(texts, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_a_model_of_nan_is_an_error(tmp_path):
    folder = alphabet_model.save(tmp_path / "model", tensors=alphabet_model.weights(poisoned="\x01"))
    poisoned = LLM(folder, bucket_plan=PLAN, num_pages=64, page_size=4, compilation_cache_dir="")
    with pytest.raises(RuntimeError, match="logits are NaN"):
        poisoned.score("ab\x01", use_tqdm=False)


def test_prompt_logprobs_as_vllm_gives_them(llm):
    prompt, params = LONG[:40], SamplingParams(temperature=0, max_tokens=3, n=2, prompt_logprobs=2)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    entries = output.prompt_logprobs
    assert entries is not None and len(entries) == 40 and entries[0] is None
    for token, x, entry in zip(ids(prompt)[1:], logprobs_of(prompt), entries[1:], strict=True):
        ranked = np.argsort(-x, stable=True).tolist()
        assert entry is not None and list(entry)[0] == token and set(entry) == {token, *ranked[:2]}
        for i, found in entry.items():
            assert isinstance(found, Logprob) and found.logprob == pytest.approx(x[i], abs=1e-4)
            assert (found.rank, found.decoded_token) == (ranked.index(i) + 1, llm.get_tokenizer().decode([i], False))
    (plain,) = llm.generate(prompt, params.with_(prompt_logprobs=None), use_tqdm=False)
    assert plain.prompt_logprobs is None and plain.outputs[0].token_ids == output.outputs[0].token_ids
    stream = llm.stream(prompt, params.with_(n=1))
    assert next(stream)[1].prompt_logprobs == entries, "there from the first output on"
    stream.close()
