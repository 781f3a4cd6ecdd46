"""What a head is trained on: what the target answers to prompts.

Owns the file that keeps answers, from which a run that was killed goes on. Answers are greedy, as the drafts are that a head is
measured by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.sampling_params import SamplingParams
from jaxserve.training.answer_states import Answer

if TYPE_CHECKING:
    from jaxserve.llm import LLM

ROUND = 512  # prompts that are answered before the file is written on


def read_answers(path: str | Path) -> list[Answer]:
    """Those that a file keeps, as far as lines are whole; none where there is no file."""
    path = Path(path)
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Answer(**json.loads(line)) for line in lines]


def collect_answers(
    llm: LLM,
    prompts: Sequence[list[int]],
    path: str | Path,
    max_tokens: int,
    report: Callable[[int], None] = lambda num: None,
) -> list[Answer]:
    """The target's greedy answers to prompts of token ids, in their order. Each round of them is added to the file at `path`; what
    is there already is not computed again. report: is told how many there are.

    Raises:
      ValueError: the file has answers to other prompts.
    """
    path, found = Path(path), read_answers(path)
    for i, (answer, prompt) in enumerate(zip(found, prompts, strict=False)):
        if answer.prompt != prompt:
            raise ValueError(f"{path} has answers to other prompts, line {i + 1} is the first: give a new folder")
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    write_lines(path, [json.dumps(answer._asdict()) for answer in found])  # without half a line that was being written
    for i in range(len(found), len(prompts), ROUND):
        some = list(prompts[i : i + ROUND])
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in some], params, use_tqdm=False)
        answered = [Answer(prompt, list(output.outputs[0].token_ids)) for prompt, output in zip(some, outputs, strict=True)]
        with path.open("a") as file:
            file.writelines(json.dumps(answer._asdict()) + "\n" for answer in answered)
        found += answered
        report(len(found))
    return found[: len(prompts)]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Writes a file of lines at once, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(line + "\n" for line in lines))
    partial.replace(path)
