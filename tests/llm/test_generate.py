"""`LLM` as a user of vLLM meets it: prompts, parameters, ends, samples, chats, and what is loaded."""

import logging
import time

import jax
import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.models import named_leaves
from jaxserve.models.loading import adopt_model
from jaxserve.scheduling.lifecycle import RequestLifecycle
from tests import alphabet_model
from tests.alphabet_model import EOS, SPECIALS, after, ids
from tests.llm.alphabet_llm import LONGEST, generate, greedy, texts

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


def test_logprobs_of_given_ids(llm):
    """Beside the sampled token's, in the order in which they were given, with the bits that the likeliest would have."""
    (likeliest,) = generate(llm, "a", greedy(max_tokens=3, logprobs=20))
    second, third, *_ = list((likeliest.outputs[0].logprobs or [{}])[1])[1:]
    given = [third, ord("z"), 0, ord("b"), SPECIALS[EOS], ord("z"), second, ord("c")]
    asked = [greedy(max_tokens=3, logprob_token_ids=given), greedy(max_tokens=3, logprobs=20), greedy(max_tokens=3)]
    outputs = [output.outputs[0] for output in generate(llm, ["a", "a", "a"], asked)]
    num_shared = 0
    assert outputs[2].logprobs is None and outputs[0].token_ids == outputs[1].token_ids == ids("bcd")
    for chosen, found, top in zip(outputs[0].token_ids, outputs[0].logprobs or (), outputs[1].logprobs or (), strict=True):
        expected = jax.nn.log_softmax(alphabet_model.logits(chosen - 1))
        assert list(found) == list(dict.fromkeys([chosen, *given]))
        for i, logprob in found.items():
            assert logprob.logprob == pytest.approx(float(expected[i]), abs=1e-4)
            assert logprob.rank == (1 if i == chosen else None)
            assert logprob.decoded_token == llm.get_tokenizer().decode([i], skip_special_tokens=False)
        assert all(found[i].logprob == top[i].logprob for i in found.keys() & top.keys())
        num_shared += len(found.keys() & top.keys())
    assert num_shared > 4
    assert outputs[0].cumulative_logprob == outputs[1].cumulative_logprob


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


# ---- what is loaded


def test_without_a_tokenizer(load, tmp_path):
    bare = alphabet_model.save(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ValueError, match=r"no tokenizer.json.*skip_tokenizer_init=True"):
        load(bare)
    llm = load(bare, skip_tokenizer_init=True)
    (output,) = generate(llm, ids("a"), greedy(logprobs=0))
    assert output.outputs[0].token_ids == ids(after("a", 8)) and output.outputs[0].text == ""
    for refused, params in (("a text", {}), (ids("a"), {"stop": "x"})):
        with pytest.raises(ValueError, match="no tokenizer was loaded|needs a tokenizer"):
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
