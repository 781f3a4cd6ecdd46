"""Prompts that heads are trained on: which are made, that they are not those of the benchmark, and files of them."""

import re

import pytest

from jaxserve.training.prompts import FUNCTIONS, NOUNS, make_prompts, read_prompts
from scripts.bench.draft_tasks import CODE, PARAGRAPHS, TASKS


def test_prompts_are_of_three_kinds_and_differ():
    made = make_prompts(100, seed=1)
    assert made == make_prompts(100, seed=1) != make_prompts(100, seed=2) and len(set(made)) == 100
    assert sum("```" in prompt for prompt in made) == 25
    assert len(set(make_prompts(5000))) == 5000
    with pytest.raises(ValueError, match="num_prompts=8000 needs 4000 questions, and [0-9]+ can be made: lower it"):
        make_prompts(8000)


def test_code_that_is_to_be_edited_is_python():
    for function in FUNCTIONS:
        for xs, x in NOUNS:
            compile(function.format(xs=xs, x=x), function, "exec")


def test_no_prompt_is_one_of_the_benchmark_nor_has_a_text_of_its():
    made = make_prompts(5000)
    assert not {*made} & {prompt for prompts in TASKS.values() for prompt in prompts}
    sentences = {sentence for text in PARAGRAPHS for sentence in re.split(r"(?<=[.;]) ", text)}
    heads = {code.splitlines()[0] for code in CODE}
    heads |= {TASKS[task][0].splitlines()[0] for task in ("code", "rewrite")}  # what is to be done with them
    for prompt in made:
        assert not any(sentence in prompt for sentence in sentences) and not heads & {*prompt.splitlines()}


def test_files_of_prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert read_prompts(file) == ["one", "two"]
    for line, message in (("two", "is not"), ('{"text": "x"}', "KeyError"), ('{"prompt": ""}', "must be a text")):
        file.write_text('{"prompt": "one"}\n' + line + "\n")
        with pytest.raises(ValueError, match=f"line 2.*{message}"):
            read_prompts(file)
