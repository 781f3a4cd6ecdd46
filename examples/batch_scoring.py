"""An evaluation by log-probability: of several answers to a question, which does the model find likeliest?

    python examples/batch_scoring.py
    python examples/batch_scoring.py Qwen/Qwen3-0.6B

Each (question, answer) pair is one prompt of `LLM.score`. All pairs run in one batch, and a question that several pairs share is
computed once (the prefix cache). Nothing is generated.
"""

import sys

import tiny

from jaxserve import LLM

QUESTIONS = (
    ("The capital of France is", (" Paris", " Madrid", " Geneva"), 0),
    ("The capital of Japan is", (" Kyoto", " Tokyo", " Seoul"), 1),
    ("The capital of Egypt is", (" Tunis", " Alexandria", " Cairo"), 2),
)


def main(model: str | None) -> None:
    llm = LLM(model) if model else tiny.llm()
    pairs = [(question, answer) for question, answers, _ in QUESTIONS for answer in answers]
    scores = iter(llm.score(pairs, use_tqdm=False))
    right = 0
    for question, answers, truth in QUESTIONS:
        found = [next(scores).cumulative_logprob for _ in answers]
        best = found.index(max(found))
        right += best == truth
        print(
            f"{question}{answers[best]}  ({', '.join(f'{a.strip()} {score:.2f}' for a, score in zip(answers, found, strict=True))})"
        )
    print(f"accuracy {right / len(QUESTIONS):.2f} of {len(QUESTIONS)} questions")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
