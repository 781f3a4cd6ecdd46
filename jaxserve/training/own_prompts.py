"""Prompts that a model makes up itself: what it samples where its chat template says that a user speaks.

Source: Magpie (Xu et al., 2406.08464). A model that was tuned on conversations has learnt its users' turns too, so that without any
data a head can be trained on far more kinds of requests than a list of templates has. Owns the file that keeps them, from which a
run that was killed goes on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.sampling_params import SamplingParams
from jaxserve.training.answers import write_lines

if TYPE_CHECKING:
    from jaxserve.llm import LLM

ROUND = 256  # samples that are drawn before the file is written on
TEMPERATURE = 0.8
LEAST_KEPT = 0.05  # of the samples that were drawn; a model that makes fewer prompts knows no users' turns, or no more of them
FIRST_ROUNDS = 2  # before that is asked
_TWO_CONTENTS = ("A", "7")  # what a template puts around both is what it puts around any


class Turn(NamedTuple):
    """What a chat template puts around a user's words: token ids before them, and what ends them beside an EOS."""

    begin: list[int]
    stop_token_ids: list[int]
    stop: list[str]


def user_turn(llm: LLM) -> Turn:
    """The turn of the model's chat template.

    Raises:
      ValueError: it has no template, or one that puts nothing before a user's words, or no more than a BOS.
    """
    messages = [[{"role": "user", "content": text}] for text in _TWO_CONTENTS]
    tokenizer, begin = llm.tokenizer, list[int]()
    for generates in (False, True):  # where nothing ends a user's words, what begins the answer does
        chats: list[Any] = llm.chat_prompts(messages, add_generation_prompt=generates)
        assert tokenizer is not None
        first, second = (list[int](chat["prompt_token_ids"]) for chat in chats)
        begin, end = _common(first, second), _common(first[::-1], second[::-1])[::-1]
        if not begin or begin == [tokenizer.bos_token_id]:
            raise ValueError("the chat template puts nothing before a user's words, by which a model knows whose they are")
        if end and end[0] in tokenizer.special_ids:
            return Turn(begin, [end[0]], [])
        if text := tokenizer.decode(end).strip():
            return Turn(begin, [], [text])
    return Turn(begin, [], [])


def _common(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [ours for ours, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def collect_own_prompts(
    llm: LLM,
    num: int,
    path: str | Path,
    *,
    max_tokens: int,
    seed: int = 0,
    report: Callable[[int], None] = lambda num: None,
) -> list[str]:
    """`num` different prompts that the model makes up, none longer than max_tokens. Each round of samples is added to the file at
    `path`: how they are drawn, and then JSON lines {"prompt": text}, null where a sample is none or not new. What is there already
    is not drawn again. report: is told how many prompts there are.

    Raises:
      ValueError: as `user_turn`; the file's samples were drawn in another way; or hardly any sample is a new prompt.
    """
    path, turn = Path(path), user_turn(llm)
    said = json.dumps({"seed": seed, "max_tokens": max_tokens, "temperature": TEMPERATURE, **turn._asdict()})
    lines = _read(path, said)
    found = dict.fromkeys(prompt for prompt in lines if prompt is not None)
    num_drawn = len(lines)
    write_lines(path, [said, *(json.dumps({"prompt": prompt}) for prompt in lines)])  # without half a line that was being written
    report(min(len(found), num))
    while len(found) < num:
        if num_drawn >= FIRST_ROUNDS * ROUND and len(found) < LEAST_KEPT * num_drawn:
            raise ValueError(
                f"of {num_drawn} samples of a user's turn {len(found)} are different prompts of at most {max_tokens} tokens, and "
                f"{num} are asked for: ask for fewer, or give prompts"
            )
        outputs = llm.generate(
            [{"prompt_token_ids": turn.begin}] * ROUND, _params(turn, max_tokens, seed, num_drawn), use_tqdm=False
        )
        with path.open("a") as file:
            for output in outputs:
                sample = output.outputs[0]
                text = sample.text.strip() if sample.finish_reason == "stop" else ""
                prompt = text if text and text not in found else None
                found |= {} if prompt is None else {prompt: None}
                file.write(json.dumps({"prompt": prompt}) + "\n")
        num_drawn += ROUND
        report(min(len(found), num))
    return list(found)[:num]


def _params(turn: Turn, max_tokens: int, seed: int, num_drawn: int) -> list[SamplingParams]:
    """Of a round of samples, each with a seed of its own."""
    seeds = (int(np.random.SeedSequence([seed, num_drawn + i]).generate_state(1, np.uint64)[0]) for i in range(ROUND))
    given: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": max_tokens}
    return [SamplingParams(seed=each, stop=turn.stop, stop_token_ids=turn.stop_token_ids, **given) for each in seeds]


def _read(path: Path, said: str) -> list[str | None]:
    """The file's samples, as far as rounds are whole; none where there is no file. ValueError: they were drawn in another way."""
    head, *lines = path.read_text().split("\n")[:-1] if path.exists() else [said]
    if head != said:
        raise ValueError(
            f"{path} has samples that were drawn in another way, {head[:200]}, and not {said[:200]}: give a new folder"
        )
    return [json.loads(line)["prompt"] for line in lines[: len(lines) // ROUND * ROUND]]
