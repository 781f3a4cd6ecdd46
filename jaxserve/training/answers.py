"""What a head is trained on: prompts, and what the target answers to them.

Owns the prompts that a run without a file of its own makes, and the file that keeps answers, from which a run that was killed goes
on. Answers are greedy, as the drafts are that a head is measured by.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.sampling_params import SamplingParams
from jaxserve.training.draft_trainer import Answer

if TYPE_CHECKING:
    from jaxserve.llm import LLM

ROUND = 64  # prompts that are answered before the file is written on

TOPICS = (
    "volcanoes", "the moon", "tea", "bicycles", "the Roman Empire", "bees", "photography", "chess", "rain", "bread", "glaciers",
    "jazz", "the stock market", "penguins", "electric cars", "vaccines", "poetry", "trains", "the printing press", "coffee",
    "football", "black holes", "gardening", "the Vikings", "whales", "chocolate", "architecture", "sleep", "wind power", "maps",
    "the human heart", "castles", "robots", "the ocean", "mathematics", "yoga", "mountains", "opera", "recycling", "dinosaurs",
)  # fmt: skip
QUESTIONS = (
    "What is interesting about {}?", "Explain {} to a ten-year-old.", "Write a short poem about {}.",
    "Give me five facts about {}.",
    "Why do people care about {}?", "Tell me a short story that has to do with {}.", "What should a beginner know about {}?",
    "Write a polite e-mail that asks a colleague about {}.", "What are common mistakes people make about {}?",
    "Summarise the history of {} in one paragraph.", "Suggest three names for a club about {}.", "What is the future of {}?",
    "List the advantages and disadvantages of {}.", "Write a quiz of three questions on {}.", "How would you teach a class on {}?",
)  # fmt: skip
NAMES = ("count", "total", "values", "names", "lines", "scores", "prices", "words", "items", "points", "ages", "dates")
FUNCTIONS = (
    "def largest_{0}({0}):\n    best = {0}[0]\n    for x in {0}:\n        if x > best:\n            best = x\n    return best",
    "def unique_{0}({0}):\n    seen = []\n    for x in {0}:\n        if x not in seen:\n            seen += [x]\n    return seen",
    "def average_{0}({0}):\n    total = 0\n    for x in {0}:\n        total = total + x\n    return total / len({0})",
    "def positive_{0}({0}):\n    kept = []\n    for x in {0}:\n        if x > 0:\n            kept.append(x)\n    return kept",
    "class {0}Store:\n    def __init__(self):\n        self.{0} = []\n\n    def add(self, x):\n        self.{0}.append(x)",
)
CODE_TASKS = (
    "Add a comment to the first line of this code and print all of it again:",
    "Add a docstring to this code and print all of it again:",
    "Rename the loop variable of this code to `entry` and print all of it again:",
    "Explain what this code does:",
)
SENTENCES = (
    "The {} opened in {}.", "Visitors ask about the {} every day.", "In {1} the {0} was closed for repairs.",
    "Nobody knows who paid for the {}.", "The {} is larger than it looks.", "A guide to the {} can be bought at the gate.",
    "The roof of the {} was replaced in {}.", "Children like the {} best.",
)  # fmt: skip
PLACES = ("museum", "library", "harbour", "bridge", "market", "tower", "garden", "station", "theatre", "school", "mill", "bakery")
TEXT_TASKS = (
    "Repeat this text word for word, and change only its first word:",
    "Correct the spelling of this text and print all of it:",
    "Summarise this text in one sentence:",
)


def make_prompts(num: int, seed: int = 0) -> list[str]:
    """Different prompts of three kinds: half are questions, a quarter edits of code, a quarter rewrites of text.

    Raises:
      ValueError: more are wanted than there are of a kind.
    """
    rng = random.Random(seed)
    questions = [question.format(topic) for question, topic in itertools.product(QUESTIONS, TOPICS)]
    code = [
        f"{task}\n\n```python\n{function.format(name)}\n```"
        for task, function, name in itertools.product(CODE_TASKS, FUNCTIONS, NAMES)
    ]
    texts = [f"{task}\n\n{_text(rng, place)}" for task, place, _ in itertools.product(TEXT_TASKS, PLACES, range(10))]
    wanted = {"questions": num - 2 * (num // 4), "edits of code": num // 4, "rewrites of text": num // 4}
    found: list[str] = []
    for (kind, n), some in zip(wanted.items(), (questions, code, texts), strict=True):
        some = list(dict.fromkeys(some))
        if n > len(some):
            raise ValueError(
                f"num_prompts={num} needs {n} {kind}, and {len(some)} can be made: lower it, or give a file of prompts"
            )
        found += rng.sample(some, n)
    rng.shuffle(found)
    return found


def _text(rng: random.Random, place: str) -> str:
    return " ".join(sentence.format(place, rng.randint(1700, 2000)) for sentence in rng.sample(SENTENCES, 4))


def read_prompts(path: str | Path) -> list[str]:
    """The prompts of a file of JSON lines, {"prompt": text} each. ValueError names the first line that is none."""
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{path}, line {number} is not {{"prompt": text}} ({type(error).__name__}: {error})') from None
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"{path}, line {number}: prompt={prompt!r} must be a text that is not empty")
        found.append(prompt)
    return found


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
    _write(path, found)  # without half a line that was being written
    for i in range(len(found), len(prompts), ROUND):
        some = list(prompts[i : i + ROUND])
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in some], params, use_tqdm=False)
        answered = [Answer(prompt, list(output.outputs[0].token_ids)) for prompt, output in zip(some, outputs, strict=True)]
        with path.open("a") as file:
            file.writelines(json.dumps(answer._asdict()) + "\n" for answer in answered)
        found += answered
        report(len(found))
    return found[: len(prompts)]


def _write(path: Path, answers: Sequence[Answer]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(answer._asdict()) + "\n" for answer in answers))
    partial.replace(path)
