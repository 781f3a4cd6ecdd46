"""Prompts that a model makes up: what is kept of its samples, and that a run that was killed goes on to the same ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.training.own_prompts import ROUND, Turn, collect_own_prompts, user_turn
from tests import alphabet_model
from tests.alphabet_model import ids

BEGIN = [1, 5]


class FakeTokenizer:
    bos_token_id, special_ids = 1, {6}


class FakeLLM(LLM):
    """Whose sample of a seed is one of `kinds` texts, or is cut; until it is killed."""

    def __init__(self, kinds: int = 300, most: int = 100, cut: int = 5):
        self.kinds, self.left, self.cut, self.seeds = kinds, most, cut, list[int]()
        self.tokenizer: Any = FakeTokenizer()

    def chat_prompts(self, messages: Any, **options: Any):
        return [{"prompt": "", "prompt_token_ids": [*BEGIN, ord(chat[0]["content"]), 6, 9]} for chat in messages]

    def generate(self, prompts, params, use_tqdm):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        assert all(prompt["prompt_token_ids"] == BEGIN for prompt in prompts)
        assert all(p.temperature > 0 and p.max_tokens == 9 and p.stop_token_ids == (6,) for p in params)
        self.seeds += [p.seed for p in params]
        return [SimpleNamespace(outputs=[self._sample(p.seed)]) for p in params]

    def _sample(self, seed: int) -> SimpleNamespace:
        text = "" if seed % 7 == 0 else f" question {seed % self.kinds}\n"
        return SimpleNamespace(text=text, finish_reason="length" if seed % self.cut == 0 else "stop")


def collect(llm: LLM, num: int, path, **options: Any) -> list[str]:
    options.setdefault("max_tokens", 9)
    return collect_own_prompts(llm, num, path, **options)


def test_what_is_whole_and_new_is_kept(tmp_path):
    llm, told = FakeLLM(), list[int]()
    found = collect(llm, 150, tmp_path / "own" / "prompts.jsonl", report=told.append)
    right = dict.fromkeys(f"question {seed % 300}" for seed in llm.seeds if seed % 7 and seed % 5)
    assert found == list(right)[:150] and told == sorted(told) and told[-1] == 150
    other = FakeLLM()
    collect(other, 150, tmp_path / "other", seed=1)
    assert len({*llm.seeds, *other.seeds}) == len(llm.seeds) + len(other.seeds), "each sample has a seed of its own"


def test_a_run_that_was_killed_goes_on_to_the_same_prompts(tmp_path):
    whole = collect(FakeLLM(), 200, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        collect(FakeLLM(most=1), 200, tmp_path / "killed")
    with (tmp_path / "killed").open("a") as file:
        file.write('{"prompt": "hal')
    assert collect(FakeLLM(), 200, tmp_path / "killed") == whole
    told = list[int]()
    assert collect(FakeLLM(most=0), 200, tmp_path / "killed", report=told.append) == whole, "nothing is drawn again"
    assert told == [200] and collect(FakeLLM(most=0), 50, tmp_path / "killed") == whole[:50]
    for options in ({"seed": 4}, {"max_tokens": 8}):
        with pytest.raises(ValueError, match=f"drawn in another way.*and not .*{next(iter(options))}.*: give a new folder"):
            collect(FakeLLM(), 200, tmp_path / "killed", **options)


@pytest.mark.parametrize("options", [{"kinds": 3}, {"cut": 1}])
def test_a_model_that_makes_no_prompts_is_told_from_one_that_does(options, tmp_path):
    message = f"of {2 * ROUND} samples of a user's turn [0-3] are different prompts of at most 9 tokens, and 200 are asked for"
    with pytest.raises(ValueError, match=message):
        collect(FakeLLM(**options), 200, tmp_path / "none")


class OnlyTokenizer(LLM):
    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (alphabet_model.CHAT_TEMPLATE, Turn(ids("u:"), [], [";"])),
        ("<|turn|>{{ messages[0].content }}<|turn|>\n", Turn([alphabet_model.SPECIALS["<|turn|>"]], [258], [])),
        ("[I] {{ messages[0].content }} [/I]", Turn(ids("[I] "), [], ["[/I]"])),
        ("U: {{ messages[0].content }}{% if add_generation_prompt %} A:{% endif %}", Turn(ids("U: "), [], ["A:"])),
    ],
)
def test_what_a_template_puts_around_a_users_words(template, expected, tmp_path):
    llm = OnlyTokenizer(Tokenizer.from_id(alphabet_model.save(tmp_path, chat_template=template)))
    assert user_turn(llm) == expected


@pytest.mark.parametrize("template", ["{{ messages[0].content }}!", "<s>{{ messages[0].content }}!"])
def test_a_template_that_says_nothing_before_a_users_words_is_refused(template, tmp_path):
    llm = OnlyTokenizer(Tokenizer.from_id(alphabet_model.save(tmp_path, chat_template=template)))
    with pytest.raises(ValueError, match="puts nothing before a user's words"):
        user_turn(llm)
