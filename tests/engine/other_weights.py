"""Weights to change to, and what they answer."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import Engine, SamplingParams
from jaxserve.models import Decoder, named_leaves, with_leaves
from tests.dummy import ONE_BUCKET, VOCAB, Answer, Ask, dummy_model, serve_alone

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = np.random.default_rng(5).integers(1, VOCAB, 21).tolist()


def other_model() -> Decoder:
    """The dummy's shapes with other weights; new arrays at each call."""
    rng = np.random.default_rng(8)
    leaves = {path: jnp.asarray(rng.permutation(np.asarray(x).ravel()).reshape(x.shape)) for path, x in leaves_of().items()}
    return with_leaves(dummy_model(), leaves)


def leaves_of() -> dict[str, jax.Array]:
    return named_leaves(dummy_model())


OTHER = other_model()


def greedy_alone(model: Decoder, prompt: list[int], max_tokens: int) -> list[int]:
    ask = Ask(prompt, GREEDY.with_(max_tokens=max_tokens))
    return serve_alone(model, [ask], bucket_plan=ONE_BUCKET)["0"].tokens


def run_out(engine: Engine, *prompts: list[int]) -> dict[str, Answer]:
    """The rest of the requests in `engine`."""
    answers: dict[str, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers.setdefault(output.request.request_id, Answer()).take(output)
        engine.scheduler.check_invariants()
    return answers
