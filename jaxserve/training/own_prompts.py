"""Prompts that a model makes up itself: what it samples where its chat template says that a user speaks.

Source: Magpie (Xu et al., 2406.08464). A model that was tuned on conversations has learnt its users' turns too, so that without any
data a head can be trained on far more kinds of requests than a list of templates has. Owns the file that keeps them, from which a
run that was killed goes on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

ROUND = 128  # samples that are drawn before the file is written on
TEMPERATURE = 0.8
LEAST_KEPT = 0.05  # of the samples of the first rounds; a model that makes fewer prompts knows no users' turns
FIRST_ROUNDS = 4
_TWO_CONTENTS = ("A", "7")  # what a template puts in front of both is what it puts in front of any


def turn_begin(llm: LLM) -> list[int]:
    """The token ids that the model's chat template puts in front of a user's first words.

    Raises:
      ValueError: it has no template, or one that puts nothing there.
    """
    chats: list[Any] = llm.chat_prompts([[{"role": "user", "content": text}] for text in _TWO_CONTENTS])
    first, second = (list[int](chat["prompt_token_ids"]) for chat in chats)
    begin = [ours for ours, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
    if not begin:
        raise ValueError("the chat template puts no token in front of a user's words, so that the model can't make up any")
    return begin


def collect_own_prompts(
    llm: LLM,
    num: int,
    path: str | Path,
    *,
    max_tokens: int,
    seed: int = 0,
    report: Callable[[int], None] = lambda num: None,
) -> list[str]:
    """`num` different prompts that the model makes up, none that is new longer than max_tokens. Each round of samples is added to
    the file at `path`, JSON lines {"prompt": text or null, "seed": of its sample}; what is there already is not drawn again.
    report: is told how many prompts there are.

    Raises:
      ValueError: as `turn_begin`; the file is of another seed; or hardly any sample is a prompt.
    """
    path, begin = Path(path), turn_begin(llm)
    lines = _read(path)
    if lines and lines[0]["seed"] != seed:
        raise ValueError(f"{path} has prompts of seed {lines[0]['seed']}, and seed={seed} is asked for: give a new folder")
    found = dict.fromkeys(line["prompt"] for line in lines if line["prompt"] is not None)
    num_drawn = len(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))  # without half a line that was being written
    while len(found) < num:
        if num_drawn >= FIRST_ROUNDS * ROUND and len(found) < LEAST_KEPT * num_drawn:
            raise ValueError(
                f"of {num_drawn} samples of a user's turn {len(found)} are different prompts of at most {max_tokens} tokens: "
                "this model can't make up prompts, give it some"
            )
        params = [SamplingParams(temperature=TEMPERATURE, max_tokens=max_tokens, seed=seed + num_drawn + i) for i in range(ROUND)]
        outputs = llm.generate([{"prompt_token_ids": begin}] * ROUND, params, use_tqdm=False)
        with path.open("a") as file:
            for i, output in enumerate(outputs):
                sample = output.outputs[0]
                text = sample.text.strip() if sample.finish_reason == "stop" else ""
                is_new = bool(text) and text not in found
                if is_new:
                    found[text] = None
                file.write(json.dumps({"prompt": text if is_new else None, "seed": seed + num_drawn + i}) + "\n")
        num_drawn += ROUND
        report(min(len(found), num))
    return list(found)[:num]


def _read(path: Path) -> list[dict[str, Any]]:
    """The file's whole lines, as far as rounds are whole; none where there is no file."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines[: len(lines) // ROUND * ROUND]]
