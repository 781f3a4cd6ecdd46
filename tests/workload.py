"""The requests that the engine's tests serve together, and what each gets alone."""

import functools

import numpy as np

from jaxserve import SamplingParams
from tests.dummy import ONE_BUCKET, VOCAB, Answer, Ask, dummy_model, serve_alone

SMALL_POOL = {True: 48, False: 14}  # pages that hold the largest request, not six; by whether prompts are longer than a step


@functools.cache
def requests(long_prompts: bool, logprobs: bool = False) -> list[Ask]:
    """Greedy and random, n > 1, shared prefixes, edited logits, ends by eos, stop id and length; some arrive while others run.

    long_prompts: some prompts are longer than a step, and than a tile of the attention. logprobs: all ask for 5, not just some.
    """
    rng = np.random.default_rng(3)

    def prompt(n: int) -> list[int]:
        return rng.integers(1, VOCAB, n).tolist()

    def ask(prompt: list[int], at: int = 0, priority: int = 0, **params) -> Ask:
        defaults = {"max_tokens": 14, "temperature": 0.0}
        if logprobs:
            params["logprobs"] = 5
        return Ask(prompt, SamplingParams(**{**defaults, **params}), at=at, priority=priority)

    shared = prompt(12)
    masks = {"allowed_token_ids": range(10), "bad_words_token_ids": [[5], *([i, j] for i in range(10) for j in range(10) if i > j)]}
    asks = [
        ask(prompt(40 if long_prompts else 18), ignore_eos=True, logprobs=3, prompt_logprobs=2),
        ask(prompt(5), max_tokens=20, ignore_eos=True),
        ask(shared + prompt(3), temperature=0.8, top_p=0.9, seed=5, logprobs=0),
        ask(
            prompt(24),
            temperature=1.3,
            top_k=20,
            seed=-1,
            presence_penalty=0.7,
            frequency_penalty=0.4,
            logprob_token_ids=(VOCAB - 1, 0, 9, 3, 31),
        ),
        ask(shared + prompt(1), at=2, logprobs=20, priority=1),
        ask(
            prompt(8),
            temperature=1.0,
            n=3,
            seed=17,
            logprobs=2,
            at=3,
            repetition_penalty=1.4,
            logit_bias={9: 2.5, 0: -1.0},
            prompt_logprobs=0,
        ),
        ask(shared, at=4, ignore_eos=True, max_tokens=9, repetition_penalty=1.8, frequency_penalty=1.0, prompt_logprobs=20),
        ask(prompt(4), temperature=0.7, top_k=40, top_p=0.8, min_p=0.02, seed=2**63, max_tokens=20, at=4, priority=-1, **masks),
        ask(prompt(3), max_tokens=1, at=5),
        ask(prompt(1), max_tokens=20, min_tokens=6, temperature=1.5, seed=0, at=6),
        ask(prompt(17), max_tokens=20, at=8, priority=2),
    ]
    # Its first page is the first request's, its next ones are the shared prompt's, computed after another first page.
    asks.append(ask(asks[0].prompt[:4] + shared[4:] + prompt(2), at=1, max_tokens=6))
    if long_prompts:
        asks.append(ask(prompt(140), temperature=1.0, top_p=0.95, seed=9, ignore_eos=True, at=1, logprobs=1))
        asks.append(ask(asks[0].prompt[:31] + prompt(30), ignore_eos=True, at=7, priority=1))
    # Stop ids that do stop: what a greedy request gets without them, after a few others.
    base = serve_alone(dummy_model(), asks[:2], bucket_plan=ONE_BUCKET)
    asks[0] = asks[0].changed(stop_token_ids=[base["0"].tokens[4]])
    asks[1] = asks[1].changed(stop_token_ids=[VOCAB - 1, base["1"].tokens[9]])
    return asks


@functools.cache
def alone(dtype: str, long_prompts: bool, logprobs: bool = False, transposed: bool = False) -> dict[str, Answer]:
    return serve_alone(dummy_model(dtype, transposed=transposed), requests(long_prompts, logprobs), bucket_plan=ONE_BUCKET)


def forget() -> None:
    """What was served."""
    requests.cache_clear()
    alone.cache_clear()
