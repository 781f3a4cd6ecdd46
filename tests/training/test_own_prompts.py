"""Prompts that a model makes up: what is kept of its samples, and that a run that was killed goes on to the same ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.training.own_prompts import ROUND, collect_own_prompts, turn_begin
from tests import alphabet_model

BEGIN = [1, 5]


class FakeLLM(LLM):
    """Whose sample of a seed is one of `kinds` texts, or is cut; until it is killed."""

    def __init__(self, kinds: int = 300, most: int = 100, cut: int = 5):
        self.kinds, self.left, self.cut, self.seeds = kinds, most, cut, list[int]()

    def chat_prompts(self, messages: Any, **options: Any):
        return [{"prompt": "", "prompt_token_ids": [*BEGIN, ord(chat[0]["content"]), 6]} for chat in messages]

    def generate(self, prompts, params, use_tqdm):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        assert all(prompt["prompt_token_ids"] == BEGIN for prompt in prompts)
        assert all(p.temperature > 0 and p.max_tokens == 9 for p in params)
        self.seeds += [p.seed for p in params]
        return [SimpleNamespace(outputs=[self._sample(p.seed)]) for p in params]

    def _sample(self, seed: int) -> SimpleNamespace:
        text = "" if seed % 7 == 0 else f" question {seed * 31 % self.kinds}\n"
        return SimpleNamespace(text=text, finish_reason="length" if seed % self.cut == 0 else "stop")


class OnlyTokenizer(LLM):
    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer


def collect(llm: LLM, num: int, path, **options) -> list[str]:
    return collect_own_prompts(llm, num, path, max_tokens=9, **options)


def test_what_is_whole_and_new_is_kept(tmp_path):
    llm, told = FakeLLM(), list[int]()
    found = collect(llm, 150, tmp_path / "own" / "prompts.jsonl", report=told.append)
    right = dict.fromkeys(f"question {seed * 31 % 300}" for seed in range(3 * ROUND) if seed % 7 and seed % 5)
    assert found == list(right)[:150] and told == sorted(told) and told[-1] == 150
    assert llm.seeds == [*range(len(llm.seeds))], "each sample has a seed of its own"


def test_a_run_that_was_killed_goes_on_to_the_same_prompts(tmp_path):
    whole = collect(FakeLLM(), 200, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        collect(FakeLLM(most=1), 200, tmp_path / "killed")
    with (tmp_path / "killed").open("a") as file:
        file.write('{"prompt": "hal')
    again = FakeLLM()
    assert collect(again, 200, tmp_path / "killed") == whole and again.seeds[0] == ROUND
    assert collect(FakeLLM(most=0), 200, tmp_path / "killed") == whole, "nothing is drawn again"
    assert collect(FakeLLM(most=0), 50, tmp_path / "killed") == whole[:50]
    with pytest.raises(ValueError, match="has prompts of seed 0, and seed=4 is asked for: give a new folder"):
        collect(FakeLLM(), 200, tmp_path / "killed", seed=4)


@pytest.mark.parametrize("options", [{"kinds": 3}, {"cut": 1}])
def test_a_model_that_makes_no_prompts_is_told_from_one_that_does(options, tmp_path):
    with pytest.raises(
        ValueError, match=f"of {4 * ROUND} samples of a user's turn [0-3] are different prompts of at most 9 tokens"
    ):
        collect(FakeLLM(**options), 200, tmp_path / "none")


def test_what_the_template_puts_before_a_users_words(tmp_path, monkeypatch):
    tokenizer = Tokenizer.from_id(alphabet_model.save(tmp_path))
    llm = OnlyTokenizer(tokenizer)
    begin = turn_begin(llm)
    chat: Any = llm.chat_prompts([[{"role": "user", "content": "tea"}]])[0]
    at = len(begin)
    assert at and chat["prompt_token_ids"][:at] == begin
    assert tokenizer.decode(chat["prompt_token_ids"][at : at + 3]) == "tea"
    monkeypatch.setattr(
        FakeLLM, "chat_prompts", lambda self, messages: [{"prompt_token_ids": [7 + i]} for i, _ in enumerate(messages)]
    )
    with pytest.raises(ValueError, match="puts no token in front of a user's words"):
        turn_begin(FakeLLM())
