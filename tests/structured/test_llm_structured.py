"""Structured output through LLM: the text has the form, with every other parameter beside it, and what can't be is refused."""

import json
import re
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from tests import alphabet_model

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


@pytest.mark.parametrize("name", PARAMETERS)
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


def test_refusals(llm):
    params = [SamplingParams(max_tokens=3), SamplingParams(structured_outputs={"regex": "(?=a)"})]
    with pytest.raises(ValueError, match="(?s)prompt 1: structured_outputs: regex: .*look-around"):
        generate(llm, ["a", "b"], params)
    fine, refused = llm.generate(["a", "b"], params, use_tqdm=False, on_error="return")
    assert len(fine.outputs[0].token_ids) == 3
    assert refused.outputs[0].finish_reason == "error" and "look-around" in refused.outputs[0].stop_reason
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.engine.add_request("x", [1], params[1])


def test_a_form_for_a_pydantic_model(llm):
    import pydantic

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=3)
        age: int = pydantic.Field(ge=0, le=9)

    form = StructuredOutputsParams(json=Person, disable_any_whitespace=True)
    (output,) = generate(llm, "a", SamplingParams(seed=3, max_tokens=60, structured_outputs=form))
    Person.model_validate_json(output.outputs[0].text)
    assert re.fullmatch(r'\{"name":.*\}', output.outputs[0].text)
