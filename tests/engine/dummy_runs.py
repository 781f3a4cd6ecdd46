"""Runs of an engine on the dummy model to their end."""

import numpy as np

from jaxserve import Engine, SamplingParams
from tests.dummy import (
    VOCAB,
    Answer,
    assert_empty,
    plain_logprobs,
    poison,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(1, VOCAB, n).tolist() for n in lengths]


def greedy(prompt: list[int], **params) -> list[int]:
    """Its greedy tokens, by the plain forward alone."""
    tokens, params = list(prompt), GREEDY.with_(**params)
    assert params.max_tokens is not None
    for _ in range(params.max_tokens):
        tokens.append(int(plain_logprobs(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def finish_all(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = {} if answers is None else answers
    for _ in range(300):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            answers.setdefault(output.request.request_id, Answer()).take(output)
        poison(engine)
    assert_empty(engine)
    return answers


# -- how requests end
