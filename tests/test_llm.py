"""`LLM` as a user of vLLM meets it, on a model whose greedy output can be written down (tests/alphabet_model.py)."""

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, BucketPlan, RequestOutput, SamplingParams
from jaxserve.engine.progress import ProgressBar
from jaxserve.models import named_leaves
from jaxserve.models.loading import adopt_model
from jaxserve.scheduling.lifecycle import RequestLifecycle
from tests import alphabet_model
from tests.alphabet_model import EOS, SPECIALS, VOCABULARY, after, ids
from tests.goldens.golden import load_golden
from tests.scheduler_state import has_unfinished

POISON = "\x01"  # its embedding is NaN
PLAN = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))  # few shapes, for the compiler's sake
OPTIONS = {"bucket_plan": PLAN, "num_pages": 64, "page_size": 4}
LONGEST = alphabet_model.CONFIG["max_position_embeddings"]
NO_PROMPT = "is no prompt|must be a text, or give"


def greedy(**params) -> SamplingParams:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 8} | params
    return SamplingParams(**given)


@pytest.fixture(scope="module")
def load():
    """load(folder, **options): an LLM of the shapes that all tests here share; equal programs are compiled once."""
    return lambda folder, **options: LLM(folder, compilation_cache_dir="", **OPTIONS | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tensors = alphabet_model.weights(poisoned=POISON)
    return alphabet_model.save(tmp_path_factory.mktemp("alphabet"), tensors=tensors)


@pytest.fixture(scope="module")
def shared(load, folder):
    return load(folder)


@pytest.fixture
def llm(shared):
    """The shared LLM, which a test must leave idle, with all pages free, and able to go on."""
    yield shared
    assert_idle(shared)


def assert_idle(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_unfinished_requests() and not has_unfinished(engine.scheduler)
    engine.scheduler.check_invariants()
    assert engine.pool.num_free_pages == engine.pool.num_pages
    assert not llm._grown and not llm._texts._groups


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def generate(llm: LLM, prompts, params=None, **given) -> list[RequestOutput]:
    return llm.generate(prompts, params or greedy(), use_tqdm=False, **given)


# ---- prompts and parameters


@pytest.mark.parametrize(
    "prompts",
    ["tea", {"prompt": "tea"}, {"prompt_token_ids": ids("tea")}, ids("tea"), np.array(ids("tea")), [*map(np.int32, ids("tea"))]],
    ids=["text", "dict", "dict of ids", "ids", "array", "numpy ids"],
)
def test_one_prompt(llm, prompts):
    (output,) = generate(llm, prompts)
    assert output.prompt_token_ids == ids("tea") and {type(i) for i in output.prompt_token_ids} == {int}
    assert output.outputs[0].text == after("a", 8)
    asked_as_text = isinstance(prompts, str) or (isinstance(prompts, dict) and "prompt" in prompts)
    assert output.prompt == ("tea" if asked_as_text else None)


def test_weights_lie_as_a_cpu_reads_them_fastest_and_a_second_engine_shares_them(llm):
    functions = llm.engine.runner.programs.functions
    assert "layers/0/attention/qkv_proj/weight" in functions.paths and "layers/0/mlp/down_proj/kernel" not in functions.paths
    held = dict(zip(functions.paths, functions.weights, strict=True))
    other = adopt_model(held, functions.model_config)
    assert all(x is held[path] for path, x in named_leaves(other.module).items())


def test_many_prompts_of_every_form_come_back_in_order(llm):
    prompts = [
        "a",
        {"prompt": "b"},
        ids("c"),
        {"prompt_token_ids": ids("d")},
        {"prompt": "shown", "prompt_token_ids": ids("e")},
        "f" * 40,
    ]
    outputs = generate(llm, prompts)
    assert texts(outputs) == [after(c, 8) for c in "abcdef"]
    assert outputs[4].prompt == "shown" and outputs[4].prompt_token_ids == ids("e")
    assert len({output.request_id for output in outputs}) == 6
    assert generate(llm, []) == []
    assert texts(generate(llm, [ids("a"), ids("b")])) == [after(c, 8) for c in "ab"]


def test_fields_of_an_output(llm):
    started = time.monotonic()
    (output,) = generate(llm, "a", greedy(max_tokens=3))
    (sample,) = output.outputs
    assert (sample.index, sample.text, sample.token_ids) == (0, "bcd", ids("bcd"))
    assert (sample.finish_reason, sample.stop_reason, sample.logprobs, sample.cumulative_logprob) == ("length", None, None, None)
    assert output.finished and output.prompt_logprobs is None and output.num_cached_tokens == 0
    m = output.metrics
    assert m is not None and m.ttft is not None and m.first_scheduled_time and m.first_token_time and m.finished_time
    assert started <= m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time <= time.monotonic()


def test_parameters_one_each(llm):
    outputs = generate(llm, ["a", "b"], [greedy(max_tokens=1), greedy(max_tokens=3)])
    assert texts(outputs) == ["b", "cde"]
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        generate(llm, ["a", "b"], [greedy()])
    with pytest.raises(ValueError, match="sampling_params has 0 entries for 1 prompts"):
        llm.generate("a", [], use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams.*found {'temperature': 0}"):
        generate(llm, "a", {"temperature": 0})
    with pytest.raises(ValueError, match="on_error='skip' must be 'raise' or 'return'"):
        generate(llm, "a", on_error="skip")


def test_the_models_own_defaults(load, folder, tmp_path, caplog):
    assert load(folder).get_default_sampling_params() == SamplingParams()
    said = {"do_sample": True, "temperature": 0.25, "top_k": 1, "top_p": 0.9, "max_new_tokens": 3, "repetition_penalty": 1.2}
    llm = load(alphabet_model.save(tmp_path / "model", generation_config=said | {"num_beams": 4}))
    with caplog.at_level(logging.WARNING, "jaxserve"):
        params = llm.get_default_sampling_params()
        assert texts(llm.generate(["a", "b"], use_tqdm=False)) == ["bcd", "cde"]  # top_k 1 is greedy
    assert params == SamplingParams(temperature=0.25, top_k=1, top_p=0.9, max_tokens=3, repetition_penalty=1.2)
    (warning,) = [record.getMessage() for record in caplog.records]  # once
    assert "num_beams" in warning and "repetition_penalty" not in warning


def test_the_models_defaults_may_be_bad(load, tmp_path):
    llm = load(alphabet_model.save(tmp_path / "model", generation_config={"temperature": -1}))
    with pytest.raises(ValueError, match="generation_config.json.*temperature=-1"):
        llm.generate("a", use_tqdm=False)


def test_max_tokens_none_goes_on_to_the_models_length(llm):
    (output,) = generate(llm, {"prompt": "A" * (LONGEST - 20)}, greedy(max_tokens=None))
    assert output.outputs[0].text == after("A", 20) and output.outputs[0].finish_reason == "length"


# ---- ends


def test_eos_ends_and_its_text_is_left_out(llm):
    (output,) = generate(llm, [[SPECIALS[EOS] - 2]])
    sample = output.outputs[0]
    assert sample.token_ids == [SPECIALS[EOS] - 1, SPECIALS[EOS]] and (sample.finish_reason, sample.stop_reason) == ("stop", None)
    assert sample.text == "\ufffd"  # byte 255 is no UTF-8
    (output,) = generate(llm, [[SPECIALS[EOS] - 2]], greedy(ignore_eos=True, max_tokens=4, skip_special_tokens=False))
    assert output.outputs[0].finish_reason == "length" and output.outputs[0].text == "\ufffd</s><s><|turn|>"


def test_min_tokens_holds_eos_and_stop_ids_back(llm):
    start, eos = SPECIALS[EOS] - 2, SPECIALS[EOS]
    (output,) = generate(llm, [[start]], greedy(min_tokens=3, max_tokens=6))
    tokens = output.outputs[0].token_ids
    assert tokens[0] == eos - 1 and eos not in tokens[:3], "the model's first choice after eos - 1 was forbidden"
    (output,) = generate(llm, "a", greedy(stop_token_ids=ids("c"), min_tokens=1))
    assert output.outputs[0].stop_reason == ord("c"), "the second token may be a stop: one other came before"
    (output,) = generate(llm, "a", greedy(stop_token_ids=ids("b"), min_tokens=1, max_tokens=2))
    assert ord("b") not in output.outputs[0].token_ids[:1]


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_ids(llm, include):
    (output,) = generate(llm, "a", greedy(stop_token_ids=[ord("e"), 7], include_stop_str_in_output=include))
    sample = output.outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", ord("e")) and sample.token_ids == ids("bcde")
    assert sample.text == ("bcde" if include else "bcd")


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_span_tokens_and_the_first_wins(llm, include):
    params = greedy(stop=["ghi", "de", "ab"], include_stop_str_in_output=include)
    (output,) = generate(llm, "a", params)
    sample = output.outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "de")
    assert sample.token_ids == ids("bcde") and sample.text == ("bcde" if include else "bc")


def test_a_stop_string_ends_one_sample_and_frees_its_place(llm):
    outputs = generate(llm, ["a", "A"] * 4, greedy(stop="ef", max_tokens=30))
    assert texts(outputs) == ["bcd", after("A", 30)] * 4


def test_stop_strings_and_min_tokens(llm):
    (output,) = generate(llm, "a", greedy(stop=["c", "fg"], min_tokens=2))
    assert output.outputs[0].text == "bcde", "'c' came with the second token, and two other tokens come before a stop"


# ---- samples, seeds, log-probabilities


def test_n_samples_differ_and_are_those_of_one_at_a_time(llm):
    params = SamplingParams(n=3, temperature=1.5, max_tokens=6, seed=5)
    outputs = llm.generate(["a", "b", "a"], params, use_tqdm=False)
    samples = [[tuple(o.token_ids) for o in output.outputs] for output in outputs]
    assert all([o.index for o in output.outputs] == [0, 1, 2] for output in outputs)
    assert all(len(set(three)) == 3 for three in samples)
    assert samples[0] == samples[2], "the same seed, the same prompt"
    alone = llm.generate("a", params.with_(n=2), use_tqdm=False)
    assert [tuple(o.token_ids) for o in alone[0].outputs] == samples[0][:2]
    other = llm.generate("a", params.with_(seed=6), use_tqdm=False)
    assert [tuple(o.token_ids) for o in other[0].outputs] != samples[0]


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them(load, folder, llm):
    params = SamplingParams(temperature=1.5, max_tokens=6)

    def twice(seed: int) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in load(folder, seed=seed).generate(["a", "a"], params, use_tqdm=False)]

    first, second = twice(1), twice(2)
    assert first[0] != first[1] and first == twice(1) and first != second


def test_logprobs_are_those_of_the_models_own_distribution(llm):
    (output,) = generate(llm, "a", SamplingParams(temperature=2.0, top_k=3, seed=1, max_tokens=5, logprobs=2))
    sample = output.outputs[0]
    assert sample.logprobs is not None and len(sample.logprobs) == 5
    total, token = 0.0, ord("a")
    for chosen, found in zip(sample.token_ids, sample.logprobs, strict=True):
        expected = jax.nn.log_softmax(alphabet_model.logits(token))
        ranked = np.argsort(-expected, stable=True).tolist()
        assert list(found)[0] == chosen and set(found) == {chosen, *ranked[:2]}
        for i, logprob in found.items():
            assert logprob.logprob == pytest.approx(float(expected[i]), abs=1e-4)
            assert logprob.rank == ranked.index(i) + 1
            assert logprob.decoded_token == llm.get_tokenizer().decode([i], skip_special_tokens=False)
        total += found[chosen].logprob
        token = chosen
    assert sample.cumulative_logprob == pytest.approx(total)


def test_logprobs_zero_and_requests_without_share_a_batch(llm):
    outputs = generate(llm, ["a", "b"], [greedy(logprobs=0, max_tokens=2), greedy(max_tokens=2)])
    assert [list(found) for found in outputs[0].outputs[0].logprobs or ()] == [ids("b"), ids("c")]
    assert outputs[1].outputs[0].logprobs is None


def test_detokenize_false(llm):
    (output,) = generate(llm, "a", greedy(detokenize=False, logprobs=0))
    assert output.outputs[0].text == "" and output.outputs[0].token_ids == ids(after("a", 8))
    assert [found[ord("b")].decoded_token for found in (output.outputs[0].logprobs or ())[:1]] == [None]


def test_equal_prefixes_are_cached_within_one_salt(llm):
    prompt = "cached prefix, four pages or so"
    cached = [generate(llm, {"prompt": prompt, "cache_salt": salt})[0].num_cached_tokens for salt in ("x", "y", "x")]
    assert cached == [0, 0, (len(prompt) - 1) // 4 * 4]


# ---- chat


def test_chat(llm):
    one = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(one, greedy(max_tokens=2), use_tqdm=False)
    assert output.prompt == "u:hi;A" and output.outputs[0].text == "BC"
    two = llm.chat([one, [*one, {"role": "assistant", "content": "ho"}]], greedy(max_tokens=2), use_tqdm=False)
    assert [o.prompt for o in two] == ["u:hi;A", "u:hi;a:ho;A"]
    (output,) = llm.chat(one, greedy(max_tokens=2), use_tqdm=False, add_generation_prompt=False)
    assert output.prompt == "u:hi;" and output.outputs[0].text == "<="
    (output,) = llm.chat(one, greedy(max_tokens=1), use_tqdm=False, chat_template_kwargs={"opening": "Q"})
    assert output.outputs[0].text == "R"
    (output,) = llm.chat(one, greedy(max_tokens=1), use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert output.prompt == "hi"
    assert llm.chat_prompts(one) == [{"prompt": "u:hi;A", "prompt_token_ids": ids("u:hi;A")}]


@pytest.mark.parametrize(
    ("messages", "given", "message"),
    [
        ([], {}, "messages is empty"),
        ([{"role": "user", "content": "hi"}], {"chat_template_kwargs": {"enable_thinking": True}}, "does not read enable_thinking"),
        ([{"role": "user", "content": "hi"}], {"tools": [{"name": "f"}]}, "does not read tools"),
        ([{"content": "hi"}], {}, "message 0 must be a dict with a string under 'role'"),
        ([{"role": "user", "content": "hi"}], {"chat_template": "{% for"}, "not valid Jinja"),
    ],
)
def test_bad_chats_are_refused(llm, messages, given, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, use_tqdm=False, **given)


def test_a_bad_conversation_may_be_returned_beside_good_ones(llm):
    good = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([good, [{"role": "user", "content": 3, "x": object()}], good], greedy(), use_tqdm=False, on_error="return")
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "message 0 must be made of JSON values" in str(outputs[1].outputs[0].stop_reason)


# ---- prompts that can't be run

BAD_PROMPTS: list[tuple[object, dict, str]] = [
    ("", {}, "empty prompt"),
    ([[]], {}, "empty prompt"),
    ("x" * LONGEST, {}, f"prompt of {LONGEST} tokens, but max_model_len={LONGEST} must hold it.*shorten"),
    ([[5, VOCABULARY]], {}, rf"prompt token id {VOCABULARY} is out of the vocabulary \[0, {VOCABULARY}\)"),
    ([[5, -1]], {}, "prompt token id -1 is out of the vocabulary"),
    ("a", {"stop_token_ids": [VOCABULARY]}, f"stop token id {VOCABULARY} is out of the vocabulary"),
    ("a", {"stop_token_ids": list(range(20)), "min_tokens": 1}, "can hold back at most 16 stop ids"),
    ("a", {"logit_bias": {VOCABULARY: 1.0}}, f"logit_bias token id {VOCABULARY} is out of the vocabulary"),
    ("a", {"allowed_token_ids": [1, VOCABULARY]}, f"allowed token id {VOCABULARY} is out of the vocabulary"),
    ("a", {"bad_words_token_ids": [[1, VOCABULARY]]}, f"bad word's token id {VOCABULARY} is out of the vocabulary"),
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
            {"tensor_parallel_size": 2, "quantization": "awq"},
            TypeError,
            "unknown option quantization, tensor_parallel_size; options are dtype",
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
    by_priority = load(folder, scheduling_policy="priority")
    prompts, priorities = ["a"] * 8, [7, 6, 5, 4, 3, 2, 1, -1]
    ended = [index for index, output in by_priority.stream(prompts, greedy(), priority=priorities) if output.finished]
    assert set(ended[:4]) == {4, 5, 6, 7}, "four at a time, the lowest numbers first"


# ---- streaming


def test_stream_yields_what_grew(llm):
    seen: dict[int, list[str]] = {0: [], 1: []}
    for index, output in llm.stream(["a", "m"], [greedy(max_tokens=3), greedy(max_tokens=5, stop=["qrs"])]):
        seen[index].append(output.outputs[0].text)
    assert seen == {0: ["b", "bc", "bcd"], 1: ["", "", "n", "no", "nopqr"]}


def test_stream_checks_its_arguments_at_once_and_closing_it_aborts(llm):
    with pytest.raises(ValueError, match="empty prompt"):
        llm.stream("")
    stream = llm.stream(["a", "b"], greedy(max_tokens=100))
    next(stream)
    assert llm.engine.has_unfinished_requests()
    stream.close()
    assert_idle(llm)
    llm.stream("a").close()  # never begun


def test_streams_may_be_read_by_turns(llm):
    first, second = llm.stream("a", greedy()), llm.stream(["b", "c"], greedy(max_tokens=20))
    next(first)
    next(second)
    assert texts(generate(llm, ["d"])) == [after("d", 8)]
    ended = {index: output for index, output in second if output.finished}
    assert texts([ended[0], ended[1]]) == [after("b", 20), after("c", 20)]
    *_, (_, last) = first
    assert last.finished and last.outputs[0].text == after("a", 8)


def test_aborting_a_streams_requests_behind_its_back_is_said(llm):
    stream = llm.stream("a", greedy(max_tokens=100))
    _, output = next(stream)
    llm.engine.abort(output.request_id)
    with pytest.raises(RuntimeError, match="aborted from elsewhere"):
        list(stream)


# ---- accidents


def test_nan_logits_end_one_request_and_nobody_else(llm):
    prompts = ["\x00", "a", POISON + "b", "b"]
    outputs = generate(llm, prompts)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "error", "length"]
    assert "NaN or infinite after 2 tokens" in str(outputs[0].outputs[0].stop_reason)
    assert outputs[0].outputs[0].text == POISON, "the token that led there"
    assert texts(outputs)[1::2] == [after("a", 8), after("b", 8)]
    again = generate(llm, prompts)
    assert texts(again) == texts(outputs) and [o.num_cached_tokens for o in again] == [0, 0, 0, 0]


class Interrupted(ProgressBar):
    def advance(self, output: RequestOutput) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_outside_a_step_aborts_the_call_and_keeps_other_requests(llm, monkeypatch):
    other = llm.stream("p", greedy())
    next(other)
    with monkeypatch.context() as patch:
        patch.setattr("jaxserve.llm.ProgressBar", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a"] * 6, [greedy(max_tokens=2 + i) for i in range(6)])
    *_, (_, output) = other
    assert output.outputs[0].text == after("p", 8)
    assert_idle(llm)
    assert texts(generate(llm, ["a"] * 6)) == [after("a", 8)] * 6


def interrupt(owner: object, name: str, call: int, after_it: bool) -> Callable:
    """owner.name, interrupted at its `call`-th call, before or after it does its work."""
    original, calls = getattr(owner, name), 0

    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs) if after_it or calls != call else None
        if calls == call:
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.fixture(scope="module")
def golden():
    return load_golden("qwen3_tied")


@pytest.fixture(scope="module")
def golden_llm(load, golden):
    """A model with random weights, whose output depends on all of its context. It has no tokenizer."""
    return load(golden.weights, skip_tokenizer_init=True, dtype="float32")


@pytest.mark.parametrize(
    ("where", "name", "call", "after_it"),
    [
        ("scheduler", "schedule", 2, True),
        ("runner", "dispatch_body", 1, False),  # the prompt's pages are known by their hash, and were never written
        ("runner", "dispatch_body", 1, True),
        ("runner", "dispatch_head", 1, True),
        ("runner", "dispatch_body", 3, False),
        ("runner", "dispatch_head", 3, False),
        ("runner", "fetch", 2, False),
        ("scheduler", "update", 2, False),
        ("scheduler", "update", 3, True),
    ],
)
def test_an_interrupt_inside_a_step_leaves_the_engine_usable(golden_llm, golden, monkeypatch, where, name, call, after_it):
    owner = getattr(golden_llm.engine, where)
    monkeypatch.setattr(owner, name, interrupt(owner, name, call, after_it))
    check_recovery(golden_llm, golden, monkeypatch)


def test_an_interrupt_that_loses_donated_buffers_leaves_the_engine_usable(golden_llm, golden, monkeypatch):
    programs = golden_llm.engine.runner.programs
    bodies = {bucket: programs.get(bucket) for bucket in PLAN.buckets}

    get = programs.get

    def get_body(key):
        def run(*args):
            bodies[key](*args)
            raise KeyboardInterrupt  # the old pages are consumed, and nobody took the new ones

        return run if key in bodies else get(key)

    monkeypatch.setattr(programs, "get", get_body)
    check_recovery(golden_llm, golden, monkeypatch)


def check_recovery(llm: LLM, golden, monkeypatch) -> None:
    """With the interrupt in place, a run ends; without it, two more bring the tokens that transformers found."""
    prompts, expected = [p.tolist() for p in golden.prompts], golden.greedy.tolist()
    params = greedy(max_tokens=len(expected[0]), ignore_eos=True)
    assert llm.engine.reset_prefix_cache()
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, params)
    monkeypatch.undo()
    assert_idle(llm)
    for _ in range(2):  # the second time from the prefix cache
        outputs = generate(llm, prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == expected
    assert outputs[-1].num_cached_tokens == (len(prompts[-1]) - 1) // 4 * 4 > 0
    assert_idle(llm)


# ---- what is loaded


def test_without_a_tokenizer(load, tmp_path):
    bare = alphabet_model.save(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ValueError, match=r"no tokenizer.json.*skip_tokenizer_init=True"):
        load(bare)
    llm = load(bare, skip_tokenizer_init=True)
    (output,) = generate(llm, ids("a"), greedy(logprobs=0))
    assert output.outputs[0].token_ids == ids(after("a", 8)) and output.outputs[0].text == ""
    for refused, params in (("a text", {}), (ids("a"), {"stop": "x"})):
        with pytest.raises(ValueError, match="no tokenizer was loaded|needs a tokenizer, and none was loaded"):
            generate(llm, refused, greedy(**params))
    with pytest.raises(ValueError, match="no tokenizer was loaded"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="no tokenizer was loaded"):
        llm.get_tokenizer()


def test_a_tokenizer_from_elsewhere(load, tmp_path, shared, folder):
    bare = alphabet_model.save(tmp_path / "bare", tokenizer=False)
    for tokenizer in (shared.get_tokenizer(), folder, str(folder)):
        assert load(bare, tokenizer=tokenizer).get_tokenizer().encode("ab") == ids("ab")


def test_each_sample_is_checked_once(llm, monkeypatch):
    """From a prompt to the queue a request is one object, whose limits are looked at once."""
    checked, added = [], []
    check, add = RequestLifecycle.check, RequestLifecycle.add
    monkeypatch.setattr(RequestLifecycle, "check", lambda self, request: checked.append(request) or check(self, request))
    monkeypatch.setattr(RequestLifecycle, "add", lambda self, request: added.append(request) or add(self, request))
    llm.generate(["a", "b"], greedy(n=2), use_tqdm=False)
    assert len(checked) == 4
    assert [id(request) for request in checked] == [id(request) for request in added]


def test_what_was_prepared_waits_for_nothing_that_came_between(llm):
    """Another request of the same id, added since, is found where it matters: at `add`."""
    engine = llm.engine
    first, second = engine.prepare("same", ids("a"), greedy()), engine.prepare("same", ids("b"), greedy())
    engine.add(first)
    with pytest.raises(ValueError, match="'same' is already in use"):
        engine.add(second)
    engine.abort("same")
    engine.drain()
