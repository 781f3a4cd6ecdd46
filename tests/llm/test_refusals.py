"""Prompts, conversations and options that `LLM` refuses."""

import pytest

from tests.alphabet_model import VOCABULARY, after, ids
from tests.llm.alphabet_llm import LONGEST, generate, greedy, texts

NO_PROMPT = "is no prompt|must be a text, or give"

BAD_PROMPTS: list[tuple[object, dict, str]] = [
    ("", {}, "empty prompt"),
    ([[]], {}, "empty prompt"),
    ("x" * LONGEST, {}, f"prompt of {LONGEST} tokens, but max_model_len={LONGEST} must hold it.*shorten"),
    ([[5, VOCABULARY]], {}, rf"prompt token id {VOCABULARY} is out of vocabulary \[0, {VOCABULARY}\)"),
    ([[5, -1]], {}, "prompt token id -1 is out of vocabulary"),
    ("a", {"stop_token_ids": [VOCABULARY]}, f"stop token id {VOCABULARY} is out of vocabulary"),
    ("a", {"stop_token_ids": list(range(20)), "min_tokens": 1}, "can hold back at most 16 stop ids"),
    ("a", {"logit_bias": {VOCABULARY: 1.0}}, f"logit_bias token id {VOCABULARY} is out of vocabulary"),
    ("a", {"logprob_token_ids": [1, VOCABULARY]}, f"logprob token id {VOCABULARY} is out of vocabulary"),
    ("a", {"allowed_token_ids": [1, VOCABULARY]}, f"allowed token id {VOCABULARY} is out of vocabulary"),
    ("a", {"bad_words_token_ids": [[1, VOCABULARY]]}, f"bad word's token id {VOCABULARY} is out of vocabulary"),
    ("a", {"bad_words": ["x" * 33]}, "longest of 34 tokens.*at most 128 of at most 32"),
    ([[1.5]], {}, NO_PROMPT),
    ([[True]], {}, NO_PROMPT),
    ([["a"]], {}, NO_PROMPT),
    ([[[1]]], {}, NO_PROMPT),
    ([7, "a"], {}, NO_PROMPT),
    ([None], {}, NO_PROMPT),
    ({"prompt": None}, {}, NO_PROMPT),
    ({"prompt": 5}, {}, NO_PROMPT),
    ({"prompt_token_ids": "abc"}, {}, NO_PROMPT),
    ({"prompt": "a", "multi_modal_data": {}}, {}, r"unknown fields \['multi_modal_data'\]; known are prompt, "),
    ({"prompt": "a", "cache_salt": 3}, {}, "cache_salt=3 must be a string"),
    ([b"abc"], {}, NO_PROMPT),
    ({"prompt_token_ids": b"abc"}, {}, NO_PROMPT),
    ("a\ud800", {}, r"has '\\ud800' at 1: half of a surrogate pair"),
    ("a", {"bad_words": ["\udfff"]}, r"has '\\udfff' at 0: half of a surrogate pair"),
]


@pytest.mark.parametrize("prompts", [5, None, b"abc", iter(["a"])], ids=lambda x: type(x).__name__)
def test_what_is_no_list_of_prompts_is_refused(llm, prompts):
    with pytest.raises(TypeError, match="prompts must be a text, a dict, a list of token ids, or a list of these"):
        llm.generate(prompts)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "a"}, "hi", 5], ids=repr)
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(TypeError, match="messages must be a list of messages"):
        llm.chat(messages)


def test_a_text_that_is_none_fails_alone(llm):
    good, bad = generate(llm, ["a", "\ud800"], greedy(), on_error="return")
    assert good.outputs[0].text == after("a", 8) and bad.outputs[0].finish_reason == "error"


@pytest.mark.parametrize(("prompt", "params", "message"), BAD_PROMPTS, ids=lambda x: repr(x)[:30])
def test_a_bad_prompt_is_refused_before_anything_runs(llm, prompt, params, message):
    steps = llm.engine.stats.num_steps
    with pytest.raises(ValueError, match=message):
        generate(llm, prompt, greedy(**params))
    assert llm.engine.stats.num_steps == steps
    assert texts(generate(llm, "a")) == [after("a", 8)]


def test_all_bad_prompts_are_named_at_once(llm):
    with pytest.raises(ValueError, match="^prompt 1: .*empty prompt.*; prompt 3: prompt token id 999"):
        generate(llm, ["a", "", "b", [999]])


def test_bad_prompts_may_be_returned_beside_good_ones(llm):
    outputs = generate(llm, ["a", "", "b", [999], {"prompt": "x" * 300}, [2.5]], on_error="return")
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length", "error", "error", "error"]
    assert [o.outputs[0].text for o in outputs] == [after("a", 8), "", after("b", 8), "", "", ""]
    assert "empty prompt" in str(outputs[1].outputs[0].stop_reason) and "999" in str(outputs[3].outputs[0].stop_reason)
    assert outputs[4].prompt == "x" * 300 and len(outputs[4].prompt_token_ids) == 300
    assert all(o.finished for o in outputs)


def test_a_request_that_can_never_fit_the_pool_is_refused(load, folder):
    llm = load(folder, num_pages=8)
    assert llm.engine.config.scheduler.max_model_len == 32, "what the pool holds"
    with pytest.raises(ValueError, match="prompt of 32 tokens, but max_model_len=32"):
        generate(llm, "a" * 32)


def test_a_duplicate_id_is_refused(llm):
    engine = llm.engine
    engine.add_request("mine", ids("a"), greedy(n=2))
    with pytest.raises(ValueError, match="request id 'mine' is already in use"):
        engine.add_request("mine", ids("b"), greedy())
    assert texts(generate(llm, "c")) == [after("c", 8)], "beside another's request"
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request.request_id, []).extend(output.new_token_ids)
    engine.add_request("mine", ids("b"), greedy())  # free again
    engine.abort("mine")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"data_parallel_size": 2, "quantization": "awq"},
            TypeError,
            "unknown option data_parallel_size, quantization; options are dtype",
        ),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            ValueError,
            "max_num_seqs=64 must not exceed max_num_batched_tokens=32",
        ),
        ({"max_model_len": 300}, ValueError, "max_model_len=300 must not exceed the model's max_position_embeddings=256"),
        ({"max_model_len": 256, "num_pages": 63}, ValueError, "needs 64 pages of 4 tokens, the pool has 63"),
        ({"dtype": "float8"}, ValueError, "dtype='float8' must be one of auto, bfloat16"),
        ({"bucket_plan": "nowhere.json"}, ValueError, "bucket_plan='nowhere.json'.*No such file"),
        ({"page_size": 5}, ValueError, "page_size=5 must be a power of two"),
    ],
)
def test_bad_options_are_refused(load, folder, options, kind, message):
    with pytest.raises(kind, match=message):
        load(folder, **options)


def test_priority(load, folder, llm):
    with pytest.raises(ValueError, match="priority=3 means nothing here.*scheduling_policy='priority'"):
        generate(llm, "a", priority=3)
    with pytest.raises(TypeError, match="priority must be Integral.*found 'high'"):
        generate(llm, "a", priority="high")
    assert len(generate(llm, ["a", "b"], priority=None)) == len(generate(llm, ["a", "b"], priority=[None, 0])) == 2
    by_priority = load(folder, scheduling_policy="priority")
    prompts, priorities = ["a"] * 8, [7, 6, 5, 4, 3, 2, 1, -1]
    ended = [index for index, output in by_priority.stream(prompts, greedy(), priority=priorities) if output.finished]
    assert set(ended[:4]) == {4, 5, 6, 7}, "four at a time, the lowest numbers first"
