"""Structured output through LLM: the text has the form, with every other parameter beside it, and what can't be is refused."""

import gc
import json
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.execution.programs import Programs
from jaxserve.execution.runner import Runner
from jaxserve.structured.grammars import GrammarCompiler
from tests import alphabet_model
from tests.selection import slow_unless

ENGINE: dict[str, Any] = {"page_size": 8, "num_pages": 64, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "number"],
    "additionalProperties": False,
}
JSON = {"json": SCHEMA, "disable_any_whitespace": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = alphabet_model.save(tmp_path_factory.mktemp("models") / "alphabet")
    return LLM(folder, dtype="float32", compilation_cache_dir="", **ENGINE)


def generate(llm: LLM, prompts, params) -> list:
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.slow
def test_the_text_is_whole(llm):
    """Its last character too, which is no stop token; a real one leaves no text."""
    (output,) = generate(llm, "a", SamplingParams(temperature=0, max_tokens=60, structured_outputs=JSON))
    sample = output.outputs[0]
    value = json.loads(sample.text)
    assert set(value) == {"name", "number"} and sample.finish_reason == "stop" and sample.stop_reason is None
    (output,) = generate(llm, "a", SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": "b(cd)?"}))
    assert output.outputs[0].text == "bcd", "the model's own continuation is allowed"


def test_greedy_follows_the_model_where_the_form_lets_it(llm):
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"choice": ["abd", "abc", "xyz"]})
    outputs = generate(llm, ["`", "w"], params)
    assert [output.outputs[0].text for output in outputs] == ["abc", "xyz"]


def test_given_ids_beside_forced_tokens(llm):
    """A token that must follow is certain, and any other impossible."""
    given = [ord("x"), ord("a"), ord("l")]
    text = "all of it is forced"
    params = SamplingParams(temperature=0, max_tokens=19, structured_outputs={"choice": [text]}, logprob_token_ids=given)
    (sample,) = generate(llm, "a", params)[0].outputs
    assert sample.text == text and len(sample.logprobs) == 19 and sample.cumulative_logprob == 0
    for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert {i: x.logprob for i, x in entry.items()} == dict.fromkeys(given, -np.inf) | {token: 0.0}


PARAMETERS = {
    "n": {"n": 3, "seed": 1},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bad_words": {"bad_words": ["9", "fg"]},
    "bias": {"logit_bias": {ord("7"): 20.0}},
    "filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "min_tokens": {"min_tokens": 12},
    "ignore_eos": {"ignore_eos": True},
    "cut": {"max_tokens": 5},
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("n", "penalties", "cut"), PARAMETERS))
def test_every_parameter_beside_a_form(llm, name):
    given = {"temperature": 1.0, "seed": 5, "max_tokens": 60, "structured_outputs": JSON} | PARAMETERS[name]
    alone = generate(llm, "a", SamplingParams(**given))[0]
    beside = [SamplingParams(**given), SamplingParams(temperature=0, max_tokens=30), SamplingParams(**given)]
    together = generate(llm, ["a", "0", "a"], beside)
    for output in (alone, together[0], together[2]):
        assert [sample.text for sample in output.outputs] == [sample.text for sample in alone.outputs]
        for sample in output.outputs:
            if name == "cut":
                assert sample.finish_reason == "length" and len(sample.token_ids) == 5
                continue
            value = json.loads(sample.text)
            assert sample.finish_reason == "stop" and isinstance(value["number"], int)
            if name == "bad_words":
                assert "9" not in sample.text and "fg" not in sample.text
            if name == "logprobs":
                assert len(sample.logprobs) == len(sample.token_ids)
                assert all(entry[token].logprob <= 0 for entry, token in zip(sample.logprobs, sample.token_ids, strict=True))
    assert together[1].outputs[0].text == alphabet_model.after("0", 30), "the unconstrained one is what it is alone"


@pytest.mark.parametrize(
    ("form", "max_tokens", "reason"),
    [
        ({"regex": "[a-c][a-c][a-c]"}, 3, "stop"),  # the last token was sampled
        ({"regex": "[a-c][a-c][a-c]"}, 2, "length"),
        ({"choice": ["all of it is forced"]}, 19, "stop"),
        ({"choice": ["all of it is forced"]}, 18, "length"),
        ({"regex": "[a-c]forced"}, 7, "stop"),
        ({"regex": "a{2,6}"}, 6, "stop"),
        ({"regex": "a{2,6}"}, 5, "length"),  # it may end there, and might have gone on
        (JSON, 60, "stop"),
    ],
)
def test_what_ends_with_the_last_token_has_stopped(llm, form, max_tokens, reason):
    bias = {ord("a"): 50.0}  # where it has a choice it goes on
    params = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=form, logit_bias=bias, n=2)
    streamed = {}
    for _, output in llm.stream(["x", "y"], params):
        streamed[output.prompt] = output
    for output in [*generate(llm, ["x", "y"], params), *streamed.values()]:
        for sample in output.outputs:
            assert (sample.finish_reason, sample.stop_reason) == (reason, None)
            assert len(sample.token_ids) == max_tokens or form is JSON


def test_min_tokens_hold_back_an_end_but_not_the_last(llm):
    """An output that may end goes on until min_tokens; one whose form lets nothing follow ends before."""
    bias = {alphabet_model.SPECIALS[alphabet_model.EOS]: 100.0}
    given = {"temperature": 0, "max_tokens": 20, "logit_bias": bias}
    for form, min_tokens, length in (("a{2,9}", 0, 2), ("a{2,9}", 5, 5), ("a{2,9}", 15, 9), ("abc", 15, 3), ("a(bc)?", 2, 3)):
        (output,) = generate(llm, "x", SamplingParams(structured_outputs={"regex": form}, min_tokens=min_tokens, **given))
        assert (len(output.outputs[0].text), output.outputs[0].finish_reason) == (length, "stop"), (form, min_tokens)


def test_refusals(llm):
    params = [SamplingParams(temperature=0, max_tokens=3), SamplingParams(structured_outputs={"regex": "(?=a)"})]
    with pytest.raises(ValueError, match="(?s)prompt 1: structured_outputs: regex: .*look-around"):
        generate(llm, ["a", "b"], params)
    fine, refused = llm.generate(["a", "b"], params, use_tqdm=False, on_error="return")
    assert len(fine.outputs[0].token_ids) == 3
    assert refused.outputs[0].finish_reason == "error" and "look-around" in refused.outputs[0].stop_reason
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.engine.add_request("x", [1], params[1])


@pytest.mark.parametrize("options", [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": "~", "preamble": ("<", ">")}])
def test_schemas_that_are_a_boolean(llm, options):
    """Any JSON, and none."""
    for begin, end, value in (("t", "e", True), ("n", "l", None), ('"', '"', ""), ("[", "]", [])):
        bias = {ord(begin): 50.0, ord(end): 60.0}
        params = SamplingParams(temperature=0, max_tokens=9, logit_bias=bias, structured_outputs={"json": True, **options})
        sample = generate(llm, "x", params)[0].outputs[0]
        assert (json.loads(sample.text), sample.finish_reason) == (value, "stop")
    with pytest.raises(ValueError, match="structured_outputs: json: .*nsatisfiable"):
        generate(llm, "x", SamplingParams(structured_outputs={"json": False, **options}))


def test_a_form_for_a_pydantic_model(llm):
    import pydantic

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=3)
        age: int = pydantic.Field(ge=0, le=9)

    form = StructuredOutputsParams(json=Person, disable_any_whitespace=True)
    (output,) = generate(llm, "a", SamplingParams(seed=3, max_tokens=60, structured_outputs=form))
    Person.model_validate_json(output.outputs[0].text)
    assert re.fullmatch(r'\{"name":.*\}', output.outputs[0].text)


@pytest.fixture
def blocked(monkeypatch):
    """(regexes whose compilation began, what lets it go on)"""
    compile_, begun, gate = GrammarCompiler._compile, [], threading.Event()

    def slowly(self, params, vocabulary):
        begun.append(params.regex)
        assert gate.wait(10)
        return compile_(self, params, vocabulary)

    monkeypatch.setattr(GrammarCompiler, "_compile", slowly)
    yield begun, gate
    gate.set()


def constrained(regex: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": regex})


def test_a_free_prompt_is_not_held_by_a_form_that_compiles(llm, blocked):
    """With on_error="return": otherwise all wait to hear whether any raises."""
    _, gate = blocked
    refused, free = constrained("(?=never)"), SamplingParams(temperature=0, max_tokens=3)
    done = {}
    for i, output in llm.stream(["a", "b", "c"], [constrained("slow"), free, refused], on_error="return"):
        assert i == 1 or gate.is_set(), "a form was not waited for"
        if output.finished:
            done[i] = output.outputs[0]
        if 1 in done:
            gate.set()
    assert (done[0].text, done[1].text, done[2].finish_reason) == ("slow", "cde", "error")
    assert "look-around" in done[2].stop_reason


def test_another_stream_goes_on_while_a_call_waits_for_its_forms(llm, blocked, monkeypatch):
    """And then the call waits on: its own free prompt too, as the form may yet be refused."""
    _, gate = blocked
    other = llm.stream("a", SamplingParams(temperature=0, max_tokens=6))
    assert next(other)[1].outputs[0].text == "b"
    step, stepped = llm.engine.step, []

    def noted():
        outputs = step()
        stepped.extend((output.request.parent_id, gate.is_set()) for output in outputs)
        if any(output.finished for output in outputs):
            threading.Timer(0.1, gate.set).start()
        return outputs

    monkeypatch.setattr(llm.engine, "step", noted)
    free = SamplingParams(temperature=0, max_tokens=3)
    outputs = generate(llm, ["x", "c"], [constrained("held"), free])
    assert [output.outputs[0].text for output in outputs] == ["held", "def"]
    ids = {output.request_id for output in outputs}
    assert stepped[:5] == [(stepped[0][0], False)] * 5 and stepped[0][0] not in ids
    assert set(stepped[5:]) == {(request_id, True) for request_id in ids}
    assert list(other)[-1][1].outputs[0].text == "bcdefg"


def test_a_stream_that_is_closed_is_not_compiled_for(llm, blocked):
    begun, gate = blocked
    params = [SamplingParams(temperature=0, max_tokens=2), *(constrained(f"closed{i}") for i in range(3))]
    stream = llm.stream(["b", "x", "x", "x"], params, on_error="return")
    assert next(stream)[0] == 0
    while len(begun) < 2:
        time.sleep(0.01)
    stream.close()  # two are being compiled, one waits
    gate.set()
    assert generate(llm, "x", constrained("after"))[0].outputs[0].text == "after"
    assert "closed2" not in begun and {"closed0", "closed1", "after"} <= set(begun)


def test_a_stream_that_never_begins_is_not_compiled_for(llm, blocked):
    begun, gate = blocked
    stream = llm.stream(["x", ""], [constrained("never"), constrained("nor this")], on_error="return")
    del stream
    gate.set()
    assert generate(llm, "x", constrained("later"))[0].outputs[0].text == "later"
    assert begun == ["later"]


def test_a_form_that_cannot_be_asked_for_is_its_own_prompts_error(llm, monkeypatch):
    submit = GrammarCompiler.submit

    def refusing(compiler, params):
        if params.regex == "bad":
            raise ValueError("refused on purpose")
        return submit(compiler, params)

    monkeypatch.setattr(GrammarCompiler, "submit", refusing)
    prompts, params = ["x", "x", ""], [constrained("bad"), constrained("good"), constrained("good")]
    bad, good, empty = llm.generate(prompts, params, use_tqdm=False, on_error="return")
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", "refused on purpose")
    assert good.outputs[0].text == "good" and empty.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("warm_up", ["all", "first_use"])
def test_the_vocabulary_is_read_with_the_rest_or_not_at_all(tmp_path, monkeypatch, warm_up):
    monkeypatch.setattr(Programs, "get", lambda *_: None)
    monkeypatch.setattr(Runner, "warm_up", lambda *_: None)
    made = LLM(alphabet_model.save(tmp_path), dtype="float32", compilation_cache_dir="", warm_up=warm_up, **ENGINE)
    read = made.grammars._vocabulary
    assert read is None if warm_up == "first_use" else read is not None and read.done() and read.exception() is None


class Caller:
    pass


def test_a_refused_form_is_kept_without_those_who_asked(llm):
    """Its error is kept, to be told again; the frames that it was raised through, and all that they hold, are not."""

    def ask(use: Callable[[], Any]) -> weakref.ref:
        caller = Caller()
        with pytest.raises(ValueError, match="structured_outputs: regex"):
            use()
        return weakref.ref(caller)

    bad = StructuredOutputsParams(regex="(unclosed")
    params = SamplingParams(max_tokens=4, structured_outputs=bad)
    uses = [lambda: llm.grammars.compile(bad), lambda: generate(llm, "a", params)]
    gone = [ask(use) for use in uses * 2]
    (refused,) = llm.generate("a", params, use_tqdm=False, on_error="return")
    assert refused.outputs[0].finish_reason == "error"
    gc.collect()
    assert not any(caller() for caller in gone)
